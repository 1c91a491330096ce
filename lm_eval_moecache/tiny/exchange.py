"""Sums over the workers of a training run; a run of one worker needs no process group."""

from __future__ import annotations

import torch
from torch import Tensor, distributed


def all_sum(tensors: list[Tensor]) -> list[Tensor]:
    """Each tensor summed over all workers, in one message; the same bits on every worker."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    if distributed.is_initialized():
        distributed.all_reduce(flat)
    pieces = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [piece.view_as(tensor) for piece, tensor in zip(pieces, tensors, strict=True)]

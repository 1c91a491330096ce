"""Experts as they lie in the store: encoded at every level of the ladder.

Shapes: E experts; a matrix is [out, in].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lm_eval_moecache.model.precision.base import Codec

Encoded = list[tuple[Tensor, ...]]
"""Level -> the tensors [E, ...] that one parameter is stored as."""


def expert_matrices(experts: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of an experts module that hold one matrix for each expert."""
    named = experts.named_parameters(recurse=False)
    return {name: tensor.data for name, tensor in named if is_matrices(experts, tensor)}


def is_matrices(experts: nn.Module, tensor: Tensor) -> bool:
    return tensor.dim() == 3 and tensor.shape[0] == experts.num_experts


def matrix_shape(experts: nn.Module, stacked: Tensor) -> tuple[int, int]:
    """Return [out, in] of one expert's matrix, however the module has it lie."""
    _, first, second = stacked.shape
    return (second, first) if experts.is_transposed else (first, second)


def expert_bytes(experts: nn.Module, codecs: Sequence[Codec]) -> tuple[int, ...]:
    """Return the size of one expert at each level: matrices encoded, biases as they are."""
    matrices = expert_matrices(experts)
    total = sum(p.numel() * p.element_size() for p in experts.parameters())
    plain = total - sum(m.numel() * m.element_size() for m in matrices.values())
    num_experts = len(next(iter(matrices.values())))
    shapes = [matrix_shape(experts, stacked) for stacked in matrices.values()]
    return tuple(
        sum(codec.nbytes(shape) for shape in shapes) + plain // num_experts for codec in codecs
    )


def decode(
    experts: nn.Module, stacked: Tensor, level: Sequence[Tensor], expert: int, codec: Codec
) -> Tensor:
    """Return one expert's matrix as computations use it; `stacked` gives shape and dtype."""
    return decode_one(experts, stacked, [whole[expert] for whole in level], codec)


def decode_one(
    experts: nn.Module, stacked: Tensor, tensors: Sequence[Tensor], codec: Codec
) -> Tensor:
    """As `decode`, of the tensors of one expert."""
    matrix = codec.decode(tensors, matrix_shape(experts, stacked), stacked.dtype)
    return matrix.t() if experts.is_transposed else matrix


def bytes_of(stored: Mapping[str, Encoded]) -> int:
    """Return the bytes of all that is stored for one layer."""
    return sum(t.nbytes for levels in stored.values() for level in levels for t in level)


def shape_without_memory(tensor: Tensor, device: Any = None) -> nn.Parameter:
    """Return a parameter of the tensor's shape and dtype that takes one number's memory.

    On the tensor's device, or on another one.
    """
    place = tensor.device if device is None else device
    shape = torch.zeros((), dtype=tensor.dtype, device=place).expand(tensor.shape)
    return nn.Parameter(shape, requires_grad=False)


def takes_no_memory(tensor: Tensor) -> bool:
    """Whether a tensor is a shape that `shape_without_memory` has made."""
    return tensor.numel() > 1 and not any(tensor.stride())

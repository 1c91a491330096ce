"""Shared by the codecs that are a floating-point dtype: stored by a cast."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from lm_eval_moecache.model.precision.base import Codec, Layout


class Cast(Codec):
    """Stores the weights at a floating-point dtype; lossless where that is the model's own."""

    dtype: ClassVar[torch.dtype]

    def layout(self, shape: Sequence[int]) -> Layout:
        return ((tuple(shape), self.dtype),)

    def encode(self, matrix: Tensor) -> tuple[Tensor, ...]:
        return (matrix.to(self.dtype).contiguous(),)

    def decode(self, tensors: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return tensors[0].to(dtype)

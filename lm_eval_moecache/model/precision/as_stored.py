"""Experts at the model's own precision, as a store on disk has them that a checkpoint lacks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from lm_eval_moecache.model.precision.base import Codec, Layout


class AsStored(Codec):
    """Leaves matrices as transformers has made them; no level of a ladder."""

    source: ClassVar[str] = "transformers' conversion of the checkpoint"
    library: ClassVar[str | None] = "transformers"
    as_it_lies: ClassVar[bool] = True

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(str(dtype).removeprefix("torch."))
        self._dtype = dtype

    def layout(self, shape: Sequence[int]) -> Layout:
        return ((tuple(shape), self._dtype),)

    def encode(self, matrix: Tensor) -> tuple[Tensor, ...]:
        return (matrix.contiguous(),)

    def decode(self, tensors: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return tensors[0].to(dtype)

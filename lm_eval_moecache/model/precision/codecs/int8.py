"""int8: bitsandbytes' LLM.int8() weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from lm_eval_moecache.model.precision.base import PIECE, Codec, Layout, pieces


class Int8(Codec):
    """One int8 per weight and one float32 per row, its largest magnitude.

    The weights of LLM.int8() (Dettmers et al. 2022), as in SpecMD section 5.1. Its other half,
    int8 activations with outliers held back, belongs to its matrix product: here the decoded
    weights are multiplied at the compute dtype. Quantised from float16, as the library asks.
    """

    source: ClassVar[str] = "bitsandbytes int8_vectorwise_quant"
    library: ClassVar[str | None] = "bitsandbytes"
    minimum: ClassVar[str] = "0.46.1"

    def layout(self, shape: Sequence[int]) -> Layout:
        return ((tuple(shape), torch.int8), ((shape[0],), torch.float32))

    def encode(self, matrix: Tensor) -> tuple[Tensor, ...]:
        from bitsandbytes.functional import int8_vectorwise_quant

        if matrix.device.type != "cpu":
            weights, absmax, _ = int8_vectorwise_quant(matrix.to(torch.float16).contiguous())
            return weights, absmax
        weights = torch.empty(matrix.shape, dtype=torch.int8)
        absmax = torch.empty(len(matrix))
        for rows in pieces(len(matrix), matrix.shape[1], most=4 * PIECE):
            part = matrix[rows].to(torch.float16).contiguous()
            weights[rows], absmax[rows], _ = int8_vectorwise_quant(part)
        return weights, absmax

    def decode(self, tensors: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        from bitsandbytes.functional import int8_vectorwise_dequant

        weights, absmax = tensors
        if weights.device.type != "cpu":
            return int8_vectorwise_dequant(weights, absmax).to(dtype)  # type: ignore[no-any-return]
        # The library's arithmetic, without its temporaries of the whole matrix: the same bits.
        decoded = torch.empty(tuple(shape), dtype=dtype)
        parts = pieces(*weights.shape)
        piece = torch.empty(weights[parts[0]].shape)
        for rows in parts:
            target = decoded[rows]
            scaled = piece[: len(target)].copy_(weights[rows])
            target.copy_(scaled.mul_(absmax[rows, None]).mul_(_PER_STEP))
        return decoded


_PER_STEP = 7.874015718698502e-3
"""1 / 127, as bitsandbytes has it."""

"""Shared by the 4-bit codecs of bitsandbytes: two weights a byte, one scale per group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from lm_eval_moecache.model.precision.base import Codec, Layout


class FourBit(Codec):
    """Stores 4 bits per weight and one float32, the largest magnitude, per group of weights.

    Groups run along the rows and over their ends; scales are not quantised again.
    """

    library: ClassVar[str | None] = "bitsandbytes"
    minimum: ClassVar[str] = "0.46.1"
    group_sizes: ClassVar[tuple[int, ...]] = (64, 128, 256, 512, 1024, 2048, 4096)
    quant_type: ClassVar[str]

    def layout(self, shape: Sequence[int]) -> Layout:
        count = math.prod(shape)
        packed = (-(-count // 2), 1)
        return ((packed, torch.uint8), ((-(-count // self.group_size),), torch.float32))

    def encode(self, matrix: Tensor) -> tuple[Tensor, ...]:
        from bitsandbytes.functional import quantize_4bit

        packed, state = quantize_4bit(
            matrix.contiguous(), blocksize=self.group_size, quant_type=self.quant_type
        )
        return packed, state.absmax

    def decode(self, tensors: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        from bitsandbytes.functional import QuantState, dequantize_4bit

        packed, absmax = tensors
        state = QuantState(
            absmax,
            shape=torch.Size(shape),
            blocksize=self.group_size,
            quant_type=self.quant_type,
            dtype=dtype,
        )
        decoded: Tensor = dequantize_4bit(packed, state)
        # The library takes a packed matrix of one row for a transposed one, and turns it back.
        return decoded.reshape(tuple(shape))

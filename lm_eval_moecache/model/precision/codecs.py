"""The codecs by the names that users type: a table, and those of torch and bitsandbytes.

A new codec is a class here (or in a file of its own, as HQQ's) and one entry of `CODECS`; `ladder`
has its name, for whoever does not need torch yet.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from lm_eval_moecache.model.precision.base import PIECE, Codec, Layout, pieces
from lm_eval_moecache.model.precision.half_quadratic import HQQ2, HQQ3, HQQ4, HQQ8


class Cast(Codec):
    """Stores the weights at a floating-point dtype; lossless where that is the model's own."""

    dtype: ClassVar[torch.dtype]

    def layout(self, shape: Sequence[int]) -> Layout:
        return ((tuple(shape), self.dtype),)

    def encode(self, matrix: Tensor) -> tuple[Tensor, ...]:
        return (matrix.to(self.dtype).contiguous(),)

    def decode(self, tensors: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return tensors[0].to(dtype)


class BF16(Cast):
    """Weights at bfloat16."""

    source = "torch.bfloat16"
    dtype = torch.bfloat16


class FP16(Cast):
    """Weights at float16."""

    source = "torch.float16"
    dtype = torch.float16


class FP32(Cast):
    """Weights at float32."""

    source = "torch.float32"
    dtype = torch.float32


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


class NF4(FourBit):
    """The 16 levels fit normally distributed weights (QLoRA, Dettmers et al. 2023)."""

    source = "bitsandbytes quantize_4bit, nf4"
    quant_type = "nf4"


class FP4(FourBit):
    """The 16 levels are those of a float with sign, exponent and mantissa."""

    source = "bitsandbytes quantize_4bit, fp4"
    quant_type = "fp4"


CODECS: dict[str, type[Codec]] = {
    "bf16": BF16,
    "fp16": FP16,
    "fp32": FP32,
    "int8": Int8,
    "nf4": NF4,
    "fp4": FP4,
    "hqq8": HQQ8,
    "hqq4": HQQ4,
    "hqq3": HQQ3,
    "hqq2": HQQ2,
}

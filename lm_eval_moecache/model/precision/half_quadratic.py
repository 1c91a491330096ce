"""Shared by the codecs of HQQ: packed whole numbers, a scale and a zero per group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from lm_eval_moecache.model.precision.base import Codec, Layout, num_weights


class HalfQuadratic(Codec):
    """HQQ (Badri and Shaji 2023): `bits` per weight; a float16 scale and zero per group.

    Groups run along the rows (`axis=1`), the form that fast kernels take; scale and zero are
    float16, HQQ's default. Encoded on the CPU whatever the device: HQQ optimises in half precision
    on CUDA and in float32 on a CPU, so that the codes would differ by device. Decoded in float32
    and then rounded to the compute dtype, which loses less than HQQ's own arithmetic in the compute
    dtype and is the same on every device.
    """

    source: ClassVar[str] = "HQQ Quantizer"
    library: ClassVar[str | None] = "hqq"
    minimum: ClassVar[str] = "0.2.5"
    group_sizes: ClassVar[tuple[int, ...]] = (8, 16, 32, 64, 128, 256)
    bits: ClassVar[int]
    per_word: ClassVar[int]
    """Weights in one packed word."""
    word: ClassVar[torch.dtype] = torch.uint8

    def layout(self, shape: Sequence[int]) -> Layout:
        # Words pack weights of different groups; three bits alone pad what is left over.
        step = self.group_size * (1 if self.word == torch.int32 else self.per_word)
        groups = num_weights(shape, self, step) // self.group_size
        scales = ((groups, 1), torch.float16)
        packed = (-(-groups // self.per_word), self.group_size)
        return ((packed, self.word), scales, scales)

    def encode(self, matrix: Tensor) -> tuple[Tensor, ...]:
        from hqq.core.quantize import Quantizer

        packed, meta = Quantizer.quantize(
            matrix.cpu(),
            nbits=self.bits,
            group_size=self.group_size,
            axis=1,
            # As HQQ's own configurations do.
            round_zero=self.bits == 4,
            device="cpu",
        )
        parts = (packed, meta["scale"].half(), meta["zero"].half())
        return tuple(part.to(matrix.device) for part in parts)

    def decode(self, tensors: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        from hqq.core.quantize import Quantizer

        packed, scale, zero = tensors
        meta: dict[str, Any] = {
            "nbits": self.bits,
            "group_size": self.group_size,
            "axis": 1,
            "shape": torch.Size(shape),
            "packing": Quantizer.bit_to_packing[self.bits],
            "view_as_float": False,
            "compute_dtype": torch.float32,
            "scale": scale.float(),
            "zero": zero.float(),
        }
        decoded: Tensor = Quantizer.dequantize(packed, meta)
        return decoded.to(dtype)

"""Shared by the codecs of HQQ: packed whole numbers, a scale and a zero per group.

Shapes: G groups, S weights of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from lm_eval_moecache.model.precision.base import Codec, Layout, num_weights, pieces

ITERATIONS, BETA, NORM = 20, 10.0, 0.7
"""HQQ's own settings: steps at most, and what its shrinking operator takes."""
SMALLEST, LARGEST_SCALE = 1e-4, 2e4
"""A group that spans less than this is not stretched, and none more than so much."""


class HalfQuadratic(Codec):
    """HQQ (Badri and Shaji 2023): `bits` per weight; a float16 scale and zero per group.

    Groups run along the rows (`axis=1`), the form that fast kernels take; scale and zero are
    float16, HQQ's default. Encoded on the CPU whatever the device: HQQ optimises in half precision
    on CUDA and in float32 on a CPU, so that the codes would differ by device. Decoded in float32
    and then rounded to the compute dtype, which loses less than HQQ's own arithmetic in the compute
    dtype and is the same on every device.

    The library's steps, taken over pieces of a matrix that a core's cache holds, give the
    library's codes to the last bit. A matrix cannot be divided further: the error that ends the
    search is its mean.
    """

    source: ClassVar[str] = "HQQ Quantizer"
    library: ClassVar[str | None] = "hqq"
    minimum: ClassVar[str] = "0.2.7"
    group_sizes: ClassVar[tuple[int, ...]] = (8, 16, 32, 64, 128, 256)
    encodes_on: ClassVar[str | None] = "cpu"
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

    @torch.no_grad()
    def encode(self, matrix: Tensor) -> tuple[Tensor, ...]:
        from hqq.core.quantize import Quantizer

        weights_GS = matrix.cpu().float().reshape(-1, self.group_size)
        scale_G1, zero_G1 = self._search(weights_GS)
        codes_GS = torch.empty(weights_GS.shape, dtype=torch.uint8)
        for rows in pieces(*weights_GS.shape):
            scaled = (weights_GS[rows] * scale_G1[rows]).add_(zero_G1[rows])
            codes_GS[rows] = scaled.round_().clamp_(0, self._top)
        packed = Quantizer.pack[Quantizer.bit_to_packing[self.bits]](codes_GS)
        parts = (packed, (1.0 / scale_G1).half(), zero_G1.half())
        return tuple(part.to(matrix.device) for part in parts)

    def decode(self, tensors: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        packed, scale, zero = tensors
        if packed.device.type != "cpu":
            return self._decode_by_library(tensors, shape, dtype)
        decoded = torch.empty((len(scale), self.group_size), dtype=dtype)
        parts = pieces(*packed.shape)
        piece = torch.empty(packed[parts[0]].shape)
        for part in range(self.per_word):
            shift = self.bits * (self.per_word - 1 - part)
            # Codes stay where they are in their words: scale and zero are shifted instead, which is
            # exact, as both are multiples of powers of two.
            place = 2.0**shift
            groups = slice(part * len(packed), min((part + 1) * len(packed), len(scale)))
            scales, zeros = scale[groups].float() / place, zero[groups].float() * place
            target = decoded[groups]
            for rows in parts:
                here = target[rows]
                codes = packed[rows][: len(here)] & (self._top << shift)
                found = piece[: len(here)].copy_(codes)
                here.copy_(found.sub_(zeros[rows]).mul_(scales[rows]))
        return decoded.reshape(tuple(shape))

    @property
    def _top(self) -> int:
        return int(2**self.bits - 1)

    def _search(self, weights_GS: Tensor) -> tuple[Tensor, Tensor]:
        """Return scale (codes per weight) and zero of each group, as HQQ's optimiser finds them."""
        from hqq.core.optimize import optimize_weights_proximal_legacy_step as library_step

        least, most = weights_GS.aminmax(dim=1, keepdim=True)
        span = most - least
        scale_G1 = torch.where(span <= SMALLEST, 1.0, self._top / span).clamp_(max=LARGEST_SCALE)
        zero_G1 = -least * scale_G1
        if self.bits == 4:  # As HQQ's own configurations do.
            zero_G1.round_()
        error_GS, best = torch.empty_like(weights_GS), torch.inf
        for _ in range(ITERATIONS):
            for rows in pieces(*weights_GS.shape):
                weights = weights_GS[rows]
                near, _, zero_G1[rows], _ = library_step(
                    weights, scale_G1[rows], zero_G1[rows], [0, self._top], BETA, NORM, 1
                )
                torch.sub(weights, near, out=error_GS[rows]).abs_()
            error = float(error_GS.mean())
            if not error < best:
                break
            best = error
        return scale_G1, zero_G1

    def _decode_by_library(
        self, tensors: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype
    ) -> Tensor:
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


class HQQ2(HalfQuadratic):
    """2 bits per weight."""

    bits, per_word = 2, 4


class HQQ3(HalfQuadratic):
    """3 bits per weight, ten in 32: 3.2 bits stored."""

    bits, per_word = 3, 10
    word = torch.int32


class HQQ4(HalfQuadratic):
    """4 bits per weight."""

    bits, per_word = 4, 2


class HQQ8(HalfQuadratic):
    """8 bits per weight."""

    bits, per_word = 8, 1

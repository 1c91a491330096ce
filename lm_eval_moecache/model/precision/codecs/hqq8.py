"""hqq8: 8-bit weights of HQQ."""

from __future__ import annotations

from typing import ClassVar

from lm_eval_moecache.model.precision.half_quadratic import HalfQuadratic


class HQQ8(HalfQuadratic):
    """8 bits per weight."""

    bits: ClassVar[int] = 8
    per_word: ClassVar[int] = 1

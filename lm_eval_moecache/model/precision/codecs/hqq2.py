"""hqq2: 2-bit weights of HQQ."""

from __future__ import annotations

from typing import ClassVar

from lm_eval_moecache.model.precision.half_quadratic import HalfQuadratic


class HQQ2(HalfQuadratic):
    """2 bits per weight."""

    bits: ClassVar[int] = 2
    per_word: ClassVar[int] = 4

"""hqq4: 4-bit weights of HQQ."""

from __future__ import annotations

from typing import ClassVar

from lm_eval_moecache.model.precision.half_quadratic import HalfQuadratic


class HQQ4(HalfQuadratic):
    """4 bits per weight."""

    bits: ClassVar[int] = 4
    per_word: ClassVar[int] = 2

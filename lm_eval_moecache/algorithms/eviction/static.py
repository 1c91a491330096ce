"""Static placement: the experts that came first stay."""

from __future__ import annotations

from typing import ClassVar

from lm_eval_moecache.algorithms.features import Expert, Layer, Now
from lm_eval_moecache.algorithms.ranked import RankedEviction


class Static(RankedEviction):
    """Keeps the experts that first filled the cache; those loaded later make room for each other.

    With `warm=` these are a profile's most used experts: the static placement of engines that pin
    the hot experts and stream the rest. Without it they are those that came first. Of the others
    the one loaded first leaves; where all are pinned, the first one placed, which `warm` makes the
    coldest. Cost: O(layers + residents of a layer) per victim.
    """

    source: ClassVar[str] = "engines' static placement (thecodacus/llama.cpp#5, imp#2061)"
    moves: ClassVar[bool] = False

    @staticmethod
    def rank(expert: Expert, home: Layer, now: Now) -> tuple[float, float]:
        return (1.0 if expert.founder else 0.0), float(expert.loaded)

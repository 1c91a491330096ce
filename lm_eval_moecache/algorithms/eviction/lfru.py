"""Least frequently and recently used: few uses, long ago."""

from __future__ import annotations

from typing import ClassVar

from lm_eval_moecache.algorithms.features import Expert, Layer, Now
from lm_eval_moecache.algorithms.ranked import RankedEviction


class LFRU(RankedEviction):
    """Evicts the expert with the fewest uses per event since its last one: count / age.

    Engines' proposals use the name for a cache between LRU and LFU (a vLLM pull request;
    llama.cpp#21609), without a formula; this is our reading. `count` is the number of events that
    needed the expert, over the whole run, plus one for being loaded; `age` the number of events
    since its last use or, if unused, its load. Old favourites fade, which under LFU they never do.
    Ties go to the longest unused.
    Cost: O(layers + residents of a layer) per victim, O(1) per use.
    """

    source: ClassVar[str] = "LFRU of engines' proposals (vLLM, llama.cpp#21609); our reading"
    ages: ClassVar[bool] = True
    moves: ClassVar[bool] = False

    @staticmethod
    def rank(expert: Expert, home: Layer, now: Now) -> tuple[float, float]:
        return (expert.uses + 1) / (now.turns + 1 - expert.turn), float(expert.last_use)

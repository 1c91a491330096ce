"""Least frequently, then recently, used: the LFRU published by an engine."""

from __future__ import annotations

from typing import ClassVar

from lm_eval_moecache.algorithms.features import Expert, Layer, Now
from lm_eval_moecache.algorithms.ranked import RankedEviction


class LFRUColibri(RankedEviction):
    """Evicts the expert with the smallest 256 x uses + max(0, 255 - age).

    colibri's `tier_lfru_score` (c/tier.h, c/bench_tier/policy_replay.py): uses are counted over the
    whole run, age is the number of expert accesses, over all layers, since the last use, and ties
    go to the longest resident. So recency only separates equal counts, up to an age of 255; `lfru`
    is our own reading of the name. A prefetched expert ages from its load.
    Cost: O(layers + residents of a layer) per victim, O(1) per use.
    """

    source: ClassVar[str] = "colibri c/tier.h and c/bench_tier/policy_replay.py (LFRU)"
    ages: ClassVar[bool] = True
    moves: ClassVar[bool] = False

    @staticmethod
    def rank(expert: Expert, home: Layer, now: Now) -> tuple[float, float]:
        # As in the source, the age includes the access that needs the room.
        age = now.accesses + 1 - expert.accessed
        return float(256 * expert.uses + max(0, 255 - age)), float(expert.loaded)

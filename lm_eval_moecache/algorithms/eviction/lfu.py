"""Least frequently used."""

from __future__ import annotations

from typing import ClassVar

from lm_eval_moecache.algorithms.features import Expert, Layer, Now
from lm_eval_moecache.algorithms.ranked import RankedEviction


class LFU(RankedEviction):
    """Evicts the expert with the lowest access count over the entire inference history.

    SpecMD appendix B. An access is an event that needs the expert, however many tokens it serves;
    the count survives eviction, and a prefetch is not an access. Ties go to the smaller key: the
    paper gives no second criterion.
    Cost: O(layers + residents of a layer) per victim, O(1) per use.
    """

    source: ClassVar[str] = "SpecMD appendix B; MoE-Infinity's cache (CommitMoE section 5.1)"
    moves: ClassVar[bool] = False

    @staticmethod
    def rank(expert: Expert, home: Layer, now: Now) -> tuple[float, float]:
        return float(expert.uses), 0.0

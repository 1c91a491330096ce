"""Least frequently used."""

from __future__ import annotations

from typing import ClassVar

from lm_eval_moecache.algorithms.features import USES, Features
from lm_eval_moecache.algorithms.ranked import RankedEviction


def fewest_uses(f: Features, key: int, home: int, layer: int) -> tuple[float, float]:
    return float(f.keys[key, USES]), 0.0


class LFU(RankedEviction):
    """Evicts the expert with the lowest access count over the entire inference history.

    SpecMD appendix B. An access is an event that needs the expert, however many tokens it serves;
    the count outlives eviction, and a prefetch is no access. Ties go to the smaller key: the
    paper names no second criterion. Cost: O(log n) per use and eviction, beside pinned keys.
    """

    source: ClassVar[str] = "SpecMD appendix B; MoE-Infinity's cache (CommitMoE section 5.1)"
    rank = staticmethod(fewest_uses)

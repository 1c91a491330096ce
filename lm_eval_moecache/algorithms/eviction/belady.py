"""Belady's rule: the expert needed furthest in the future leaves first."""

from __future__ import annotations

from typing import ClassVar

from lm_eval_moecache.algorithms.features import Expert, Layer, Now
from lm_eval_moecache.algorithms.ranked import RankedEviction


class Belady(RankedEviction):
    """Evicts, among what may be evicted, the expert whose next event is furthest away.

    Belady 1966. It knows the future, so only a replay can run it. Experts that the running event
    has executed count with their next need after this event. Ties (the same event, or never) go to
    the smaller key. If misses of prefill passes do not count, a need there is as good as never
    (`Future.ranks`).

    Requests are counted once per event and key. On demand, with experts of one size and every
    event within the cache, no eviction has fewer misses (then equal to loads). An event larger than
    the cache runs in waves whose last one stays resident, whatever the rule evicts: there a rule
    that breaks ties by luck can have fewer, and the bound is `engine.bound.fewest_misses`. Neither
    bounds time, nor anything under prefetching.
    Cost: O(layers + residents of a layer) per victim.
    """

    name: ClassVar[str] = "belady"
    source: ClassVar[str] = "Belady 1966"
    is_offline: ClassVar[bool] = True
    moves: ClassVar[bool] = False

    @staticmethod
    def rank(expert: Expert, home: Layer, now: Now) -> tuple[float, float]:
        return float(-expert.next_use), 0.0

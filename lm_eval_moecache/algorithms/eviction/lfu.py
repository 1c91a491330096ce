"""Least frequently used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from typing import ClassVar

from lm_eval_moecache.algorithms.eviction.base import EvictionAlgorithm, RankedKeys
from lm_eval_moecache.records.event import Event
from lm_eval_moecache.records.geometry import Geometry


class LFU(EvictionAlgorithm):
    """Evicts the expert with the lowest access count over the entire inference history.

    SpecMD appendix B. An access is an event that needs the expert, however many tokens it serves;
    the count outlives eviction, and a prefetch is no access. Ties go to the smaller key: the
    paper names no second criterion. Cost: O(log n) per use and eviction, beside pinned keys.
    """

    source: ClassVar[str] = "SpecMD appendix B; MoE-Infinity's cache (CommitMoE section 5.1)"

    def __init__(self, geometry: Geometry, *, seed: int = 0) -> None:
        super().__init__(geometry, seed=seed)
        self._count: Counter[int] = Counter()
        self._resident = RankedKeys()

    def on_insert(self, key: int, prefetched: bool) -> None:
        self._resident.put(key, self._count[key])

    def on_event(self, event: Event) -> None:
        for key in event.keys:
            self._count[key] += 1
            if key in self._resident:
                self._resident.put(key, self._count[key])

    def on_evict(self, key: int) -> None:
        self._resident.remove(key)

    def victim(self, pinned: Container[int], layer: int) -> int | None:
        lowest = self._resident.lowest(pinned)
        return None if lowest is None else lowest[1]

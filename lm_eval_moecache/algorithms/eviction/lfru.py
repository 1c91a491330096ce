"""Least frequently and recently used: few uses, long ago."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Container
from typing import ClassVar

from lm_eval_moecache.algorithms.eviction.base import EvictionAlgorithm
from lm_eval_moecache.records.event import Event
from lm_eval_moecache.records.geometry import Geometry


class LFRU(EvictionAlgorithm):
    """Evicts the expert with the fewest uses per event since its last one: count / age.

    The name stands in engines' proposals for a cache that is neither LRU nor LFU (a vLLM pull
    request; llama.cpp#21609), without a formula; this is our reading. `count` are the events that
    needed the expert, over the whole run, and one for being loaded; `age` the events of the run
    since its last use or, if none has used it, its load. Old favourites age away, which under LFU
    they never do. Ties go to the one longest unused. Cost: O(1) per use; O(different counts) per
    victim, beside pinned keys, as among equal counts the one longest unused is the lowest.
    """

    source: ClassVar[str] = "LFRU of engines' proposals (vLLM, llama.cpp#21609); our reading"

    def __init__(self, geometry: Geometry, *, seed: int = 0) -> None:
        super().__init__(geometry, seed=seed)
        self._count: Counter[int] = Counter()
        self._last: dict[int, int] = {}
        self._by_count: dict[int, OrderedDict[int, None]] = {}
        self._now = 1

    def on_insert(self, key: int, prefetched: bool) -> None:
        self._put(key)

    def on_event(self, event: Event) -> None:
        for key in event.keys:
            if key in self._last:
                self.on_evict(key)
                self._count[key] += 1
                self._put(key)
            else:
                self._count[key] += 1
        self._now += 1

    def on_evict(self, key: int) -> None:
        queue = self._by_count[self._count[key]]
        del queue[key], self._last[key]
        if not queue:
            del self._by_count[self._count[key]]

    def victim(self, pinned: Container[int], layer: int) -> int | None:
        best: tuple[float, int, int] | None = None
        for count, queue in self._by_count.items():
            for key in queue:
                if key not in pinned:
                    last = self._last[key]
                    rank = ((count + 1) / (self._now + 1 - last), last, key)
                    best = rank if best is None else min(best, rank)
                    break
        return None if best is None else best[2]

    def _put(self, key: int) -> None:
        self._last[key] = self._now
        self._by_count.setdefault(self._count[key], OrderedDict())[key] = None

"""Belady's bound: whoever is needed last leaves first."""

from __future__ import annotations

import heapq
from collections.abc import Container
from typing import ClassVar

from lm_eval_moecache.algorithms.eviction.base import EvictionAlgorithm
from lm_eval_moecache.records.event import Event
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.trace.future import Future


class Belady(EvictionAlgorithm):
    """Evicts, among what may be evicted, the expert whose next event is furthest away.

    Belady 1966. It knows the events to come, so only a replay can run it. Misses are fewest
    where every expert is equally large and nothing is prefetched; the bound is on misses, not on
    time. Where the future counts no misses of prefill passes, needs there are as good as never
    (`Future.ranks`), and the bound is on the others. Ties (never needed again) go to the smaller
    key. Cost: O(log n) amortised per call.
    """

    source: ClassVar[str] = "Belady 1966"
    is_offline: ClassVar[bool] = True

    def __init__(self, geometry: Geometry, *, seed: int = 0) -> None:
        super().__init__(geometry, seed=seed)
        self._num_keys = geometry.num_layers * geometry.num_experts
        self._next: dict[int, int] = {}
        """Resident key -> its live heap entry."""
        self._heap: list[int] = []
        """key - rank of its next event * num_keys: the smallest goes first."""
        self._pass = 0
        self._now = 0
        """Number of the earliest event that may still come."""

    def prepare(self, future: Future) -> None:
        self._times, self._ranks = future.times, future.ranks
        self._cursor = future.start[:-1]

    def on_pass(self, pass_index: int) -> None:
        self._pass = pass_index
        self._now = max(self._now, pass_index * self.geometry.num_layers)

    def on_insert(self, key: int, prefetched: bool) -> None:
        self._push(key)

    def on_event(self, event: Event) -> None:
        self._now = event.pass_index * self.geometry.num_layers + event.layer + 1
        for key in event.keys:
            if key in self._next:
                self._push(key)

    def on_evict(self, key: int) -> None:
        del self._next[key]

    def victim(self, pinned: Container[int], layer: int) -> int | None:
        passed_over, best = [], None
        while self._heap and (best is None or self._heap[0] < best):
            entry = self._heap[0]
            key = entry % self._num_keys
            if self._next.get(key) != entry:
                heapq.heappop(self._heap)
                continue
            if key not in pinned:
                if -(entry // self._num_keys) == self._pass * self.geometry.num_layers + layer:
                    # Its event is the running one, larger than the cache, and has executed it.
                    entry = key - self._times[self._cursor[key] + 1] * self._num_keys
                best = entry if best is None else min(best, entry)
            passed_over.append(heapq.heappop(self._heap))
        for entry in passed_over:
            heapq.heappush(self._heap, entry)
        return None if best is None else best % self._num_keys

    def _push(self, key: int) -> None:
        """Find the key's next event and enter it; what it had before is found stale later."""
        cursor, times, now = self._cursor[key], self._times, self._now
        while times[cursor] < now:
            cursor += 1
        self._cursor[key] = cursor
        entry = self._next[key] = key - self._ranks[cursor] * self._num_keys
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._next) + 64:
            # Entries of the past are never popped: without this the heap would hold the trace.
            self._heap = list(self._next.values())
            heapq.heapify(self._heap)

"""Least high-precision used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping
from typing import ClassVar

from lm_eval_moecache.algorithms.eviction.base import EvictionAlgorithm, RankedKeys
from lm_eval_moecache.records.event import Event
from lm_eval_moecache.records.geometry import Geometry


class LHU(EvictionAlgorithm):
    """Evicts the expert that was used least often at high precision.

    SpecMD appendix B after HOBBIT: it "tracks high-precision expert usage frequency", as misses of
    such experts "incur significantly higher latency", and "must be combined with fetch cascade
    precision policies". A use is an event that executes the expert at the best level, however many
    tokens it serves; the count outlives eviction, and uses at lower levels leave it alone. Ties go
    to the smaller key. Cost: O(log n) per use and eviction, beside pinned keys.
    """

    source: ClassVar[str] = "SpecMD appendix B (LHU); HOBBIT (Tang et al. 2024)"
    pairs_with: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "miss": ("fetch_lowest", "fetch_priority", "drop_cascade", "cascade")
    }
    pairs_because: ClassVar[str] = (
        "it counts uses at high precision, which are all uses where nothing is loaded lower"
    )

    def __init__(self, geometry: Geometry, *, seed: int = 0) -> None:
        super().__init__(geometry, seed=seed)
        self._count: Counter[int] = Counter()
        self._resident = RankedKeys()

    def on_insert(self, key: int, prefetched: bool) -> None:
        self._resident.put(key, self._count[key])

    def on_event(self, event: Event) -> None:
        self.on_levels(event, {})

    def on_levels(self, event: Event, levels: Mapping[int, int]) -> None:
        for key in event.keys:
            if levels.get(key, 0):
                continue
            self._count[key] += 1
            if key in self._resident:
                self._resident.put(key, self._count[key])

    def on_evict(self, key: int) -> None:
        self._resident.remove(key)

    def victim(self, pinned: Container[int], layer: int) -> int | None:
        lowest = self._resident.lowest(pinned)
        return None if lowest is None else lowest[1]

"""Least frequently, then recently, used: the LFRU published by an engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from typing import ClassVar

from lm_eval_moecache.algorithms.eviction.base import EvictionAlgorithm
from lm_eval_moecache.records.event import Event


class LFRUColibri(EvictionAlgorithm):
    """Evicts the expert with the smallest 256 x uses + max(0, 255 - age).

    colibri's `tier_lfru_score` (c/tier.h, c/bench_tier/policy_replay.py): uses are counted over the
    whole run, age is the number of expert accesses, over all layers, since the last use, and ties
    go to the longest resident. So recency only separates equal counts, up to an age of 255; `lfru`
    is our own reading of the name. A prefetched expert ages from its load.
    Cost: O(residents) per victim, O(1) per use.
    """

    source: ClassVar[str] = "colibri c/tier.h and c/bench_tier/policy_replay.py (LFRU)"

    def __post_init__(self) -> None:
        self._clock = 0
        self._uses: Counter[int] = Counter()
        self._last: dict[int, int] = {}
        self._residents: dict[int, None] = {}
        """In order of arrival."""

    def on_insert(self, key: int, prefetched: bool) -> None:
        self._residents[key] = None
        self._last[key] = self._clock

    def on_event(self, event: Event) -> None:
        for key in event.keys:
            self._clock += 1
            self._uses[key] += 1
            self._last[key] = self._clock

    def on_evict(self, key: int) -> None:
        del self._residents[key]

    def victim(self, pinned: Container[int], layer: int) -> int | None:
        free = (key for key in self._residents if key not in pinned)
        return min(free, key=self._score, default=None)

    def _score(self, key: int) -> int:
        """Return the score; as in the source, the clock includes the access that needs the room."""
        age = self._clock + 1 - self._last[key]
        return 256 * self._uses[key] + max(0, 255 - age)

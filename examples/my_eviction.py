"""An eviction rule of one's own: SIEVE (Zhang et al., NSDI 2024), a FIFO with second chances.

Run it from this folder: `moecache replay TRACE --eviction my_eviction.Sieve`.
"""

from __future__ import annotations

from collections.abc import Container
from typing import ClassVar

from lm_eval_moecache.algorithms.eviction.base import EvictionAlgorithm
from lm_eval_moecache.records import Event, Geometry


class Sieve(EvictionAlgorithm):
    """A hand moves from the oldest key to the newest; what was used since its last visit stays."""

    source: ClassVar[str] = "Zhang et al. 2024 (SIEVE)"

    def __init__(self, geometry: Geometry, *, seed: int = 0) -> None:
        super().__init__(geometry, seed=seed)
        self._used: dict[int, bool] = {}  # in order of insertion
        self._hand: int | None = None

    def on_insert(self, key: int, prefetched: bool) -> None:
        self._used[key] = False

    def on_event(self, event: Event) -> None:
        self._used.update((key, True) for key in event.keys if key in self._used)

    def victim(self, pinned: Container[int], layer: int) -> int | None:
        keys = list(self._used)
        start = keys.index(self._hand) if self._hand in self._used else 0
        around = [key for key in keys[start:] + keys[:start] if key not in pinned]
        return next((key for key in around if not self._used[key]), around[0] if around else None)

    def on_evict(self, key: int) -> None:
        keys = list(self._used)
        for passed in keys[keys.index(self._hand) if self._hand in self._used else 0 :]:
            if passed == key:
                break
            self._used[passed] = False
        self._hand = next(iter(keys[keys.index(key) + 1 :]), None)
        del self._used[key]

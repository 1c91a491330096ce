"""Random replacement: the baseline that knows nothing."""

from __future__ import annotations

import random
from collections.abc import Container
from typing import ClassVar

from lm_eval_moecache.algorithms.eviction.base import EvictionAlgorithm
from lm_eval_moecache.records.geometry import Geometry


class Random(EvictionAlgorithm):
    """Evicts a resident expert drawn uniformly from those that may leave.

    The draws depend on the seed and on the order of the calls, nothing else.
    Cost: O(1) per draw, redrawn while a pinned key comes up, O(n) where most keys are pinned.
    """

    source: ClassVar[str] = "the usual uninformed baseline"
    draws: ClassVar[bool] = True

    def __init__(self, geometry: Geometry, *, seed: int = 0) -> None:
        super().__init__(geometry, seed=seed)
        self._random = random.Random(seed)
        self._keys: list[int] = []
        self._place: dict[int, int] = {}
        self._drawn: int | None = None

    def on_insert(self, key: int, prefetched: bool) -> None:
        self._place[key] = len(self._keys)
        self._keys.append(key)

    def on_evict(self, key: int) -> None:
        place, last = self._place.pop(key), self._keys.pop()
        if last != key:
            self._keys[place] = last
            self._place[last] = place
        self._drawn = None

    def victim(self, pinned: Container[int], layer: int) -> int | None:
        # One draw stands until somebody leaves: asking twice must not change the answer.
        if self._drawn is not None and self._drawn not in pinned:
            return self._drawn
        for _ in range(8):
            if not self._keys:
                return None
            key = self._keys[self._random.randrange(len(self._keys))]
            if key not in pinned:
                self._drawn = key
                return key
        free = sorted(key for key in self._keys if key not in pinned)
        self._drawn = self._random.choice(free) if free else None
        return self._drawn

"""Random replacement: the uninformed baseline."""

from __future__ import annotations

from collections.abc import Container
from typing import ClassVar

from lm_eval_moecache.algorithms.eviction.base import StatefulEviction

_BITS = 2**64 - 1
_STEP = 0x9E3779B97F4A7C15
"""2^64 / the golden ratio, by which SplitMix64 steps."""


class Random(StatefulEviction):
    """Evicts a resident expert drawn uniformly from those that are not pinned.

    The draws depend only on the seed and the number of evictions.
    Cost: O(1) per draw, redrawn for pinned keys, O(n) where most keys are pinned.
    """

    name: ClassVar[str] = "random"
    source: ClassVar[str] = "the usual uninformed baseline"
    draws: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._keys: list[int] = []
        self._place: dict[int, int] = {}
        self._turn = self.seed * _STEP & _BITS
        """Changed by each eviction: what is drawn follows from it alone, however often asked."""

    def on_insert(self, key: int, prefetched: bool) -> None:
        self._place[key] = len(self._keys)
        self._keys.append(key)

    def on_evict(self, key: int) -> None:
        place, last = self._place.pop(key), self._keys.pop()
        if last != key:
            self._keys[place] = last
            self._place[last] = place
        self._turn = (self._turn + _STEP) & _BITS

    def victim(self, pinned: Container[int], layer: int) -> int | None:
        num_keys = len(self._keys)
        for attempt in range(8 if num_keys else 0):
            key = self._keys[_mix(self._turn + attempt) % num_keys]
            if key not in pinned:
                return key
        free = sorted(key for key in self._keys if key not in pinned)
        return free[_mix(self._turn + 8) % len(free)] if free else None


def _mix(number: int) -> int:
    """Hash a number to 64 pseudo-random bits: the output function of SplitMix64."""
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 & _BITS
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB & _BITS
    return number ^ (number >> 31)

"""Segmented LRU."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container
from dataclasses import dataclass
from typing import Annotated, ClassVar

from lm_eval_moecache.algorithms.eviction.base import HitRule
from lm_eval_moecache.records.ranges import Range

Segments = Annotated[int, Range(least=2, why=": one is lru")]


@dataclass(eq=False, kw_only=True)
class SLRU(HitRule):
    """Evicts from the lowest of several LRU segments; a hit moves an expert one segment up.

    Karedla et al. 1994 with two segments; libCacheSim's has four of equal size, the default here.
    An expert that overflows a segment falls into the one below. A new expert enters the lowest
    segment that has room (as in libCacheSim, so that a cold cache fills completely). Pinned experts
    are skipped. Cost: O(segments) per call, not counting pinned keys.

    Parameters: segments, at least 2 (4).
    """

    source: ClassVar[str] = "Karedla et al. 1994; as libCacheSim's SLRU"

    segments: Segments = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        self._segments = [OrderedDict[int, None]() for _ in range(self.segments)]
        """Least recently used first in each; the last segment is the most protected."""

    def _size(self) -> int:
        return self.num_slots // len(self._segments)

    def admit(self, key: int) -> None:
        size = self._size()
        free = (segment for segment in self._segments if len(segment) < size)
        next(free, self._segments[0])[key] = None

    def hit(self, key: int) -> None:
        for number, segment in enumerate(self._segments):
            if key in segment:
                del segment[key]
                self._put(key, min(number + 1, len(self._segments) - 1))
                return

    def _put(self, key: int, number: int) -> None:
        """Insert a key as a segment's most recent; overflowing keys fall to lower segments."""
        self._segments[number][key] = None
        while number and len(self._segments[number]) > self._size():
            falling, _ = self._segments[number].popitem(last=False)
            number -= 1
            self._segments[number][falling] = None

    def forget(self, key: int) -> None:
        for segment in self._segments:
            segment.pop(key, None)

    def victim(self, pinned: Container[int], layer: int) -> int | None:
        keys = (key for segment in self._segments for key in segment if key not in pinned)
        return next(keys, None)

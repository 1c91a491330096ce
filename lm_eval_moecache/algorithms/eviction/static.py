"""Static placement: the experts that came first stay."""

from __future__ import annotations

from collections.abc import Container
from typing import ClassVar

from lm_eval_moecache.algorithms.eviction.base import EvictionAlgorithm


class Static(EvictionAlgorithm):
    """Keeps the experts that first filled the cache; those loaded later make room for each other.

    With `warm=` these are a profile's most used experts: the static placement of engines that pin
    the hot experts and stream the rest. Without it they are those that came first. Of the others
    the one loaded first leaves; where all are pinned, the first one placed, which `warm` makes the
    coldest. Cost: O(1) per call, beside pinned keys.
    """

    source: ClassVar[str] = "engines' static placement (thecodacus/llama.cpp#5, imp#2061)"

    def __post_init__(self) -> None:
        self._placed: dict[int, None] = {}
        self._passing: dict[int, None] = {}
        self._is_full = False

    def on_insert(self, key: int, prefetched: bool) -> None:
        (self._passing if self._is_full else self._placed)[key] = None

    def on_evict(self, key: int) -> None:
        self._is_full = True
        if key in self._passing:
            del self._passing[key]
        else:
            del self._placed[key]

    def victim(self, pinned: Container[int], layer: int) -> int | None:
        keys = (key for part in (self._passing, self._placed) for key in part if key not in pinned)
        return next(keys, None)

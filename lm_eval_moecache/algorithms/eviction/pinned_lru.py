"""Half pinned, half LRU."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import ClassVar

from lm_eval_moecache.algorithms.eviction.base import RecencyRule
from lm_eval_moecache.records.ranges import ProperShare


@dataclass(eq=False, kw_only=True)
class PinnedLRU(RecencyRule):
    """Keeps a share of the experts that first filled the cache, and the most recently used others.

    With `warm=` the kept experts are the hottest of the profile, as in engines that pin hot experts
    and cache the others. Without it they are the last of those that first filled the cache. Kept
    experts leave only where all other residents are pinned by the running event.
    Cost: O(1) per call, beside pinned keys.

    Parameters: share of the cache that is kept, above 0 and below 1 (0.5).
    """

    source: ClassVar[str] = "engines' half-pinned caches (thecodacus/llama.cpp#5, imp#2061)"

    share: ProperShare = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        self._kept: dict[int, None] = {}
        self._filling: dict[int, None] | None = {}
        """In order of arrival, until somebody has to leave."""

    def on_insert(self, key: int, prefetched: bool) -> None:
        super().on_insert(key, prefetched)
        if self._filling is not None:
            self._filling[key] = None

    def on_evict(self, key: int) -> None:
        if self._filling is not None:
            for kept in self._to_keep(self._filling):
                del self.order[kept]
                self._kept[kept] = None
            self._filling = None
        super().on_evict(key)
        self._kept.pop(key, None)

    def _to_keep(self, filling: dict[int, None]) -> list[int]:
        """Return the last keys to arrive, because `warm` loads the hottest last."""
        return list(filling)[max(0, len(filling) - int(self.num_slots * self.share)) :]

    def victim(self, pinned: Container[int], layer: int) -> int | None:
        kept = self._kept
        if self._filling is not None:
            kept = dict.fromkeys(self._to_keep(self._filling))
        free = (key for key in self.order if key not in pinned and key not in kept)
        return next(free, next((key for key in kept if key not in pinned), None))

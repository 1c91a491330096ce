"""LRU that an event larger than the cache passes by."""

from __future__ import annotations

from collections.abc import Container, Sized
from typing import ClassVar

from lm_eval_moecache.algorithms.eviction.base import RecencyRule
from lm_eval_moecache.records.event import Event
from lm_eval_moecache.records.geometry import Geometry


class BypassLRU(RecencyRule):
    """LRU, but an event that needs more experts than the cache holds leaves the others there.

    imp#1365: "a dispatch needing more than `slots_per_layer`" goes through one staging buffer, as
    it would retain nothing and evict what decoding is about to want. The buffer is here one place
    of the cache, the least recently used expert's: what such an event loads into a full cache is
    executed and leaves before the next one is loaded, so that transfers and kernels take turns.
    Meant for a cache per layer: no event is larger than a usual cache for all layers.
    Cost: O(1) per call, beside pinned keys.
    """

    source: ClassVar[str] = "kekzl/imp#1365, #1408 (prefill bypass)"
    splits_waves: ClassVar[bool] = True

    def __init__(self, geometry: Geometry, *, seed: int = 0) -> None:
        super().__init__(geometry, seed=seed)
        self._staged: int | None = None
        """Resident in the staging place, and not in `order`: the first to leave."""
        self._passes_by = False
        """Whether the event in progress does."""
        self._offer: int | None = None
        """The last named victim, where an event that passes by asked for it."""

    def on_insert(self, key: int, prefetched: bool) -> None:
        if self._passes_by and self._staged is None and not prefetched:
            self._staged = key
        else:
            super().on_insert(key, prefetched)

    def on_event(self, event: Event) -> None:
        staged = self._staged
        if staged is not None and not self._passes_by and staged in event.keys:
            self.order[staged], self._staged = None, None
        super().on_event(event)
        self._passes_by = False

    def on_evict(self, key: int) -> None:
        super().on_evict(key)
        self._passes_by = key == self._offer
        if key == self._staged:
            self._staged = None

    def victim(self, pinned: Container[int], layer: int) -> int | None:
        staged = self._staged
        is_free = staged is not None and staged not in pinned
        if self._passes_by and staged is not None and not is_free:
            return None
        chosen = staged if is_free else self.oldest(pinned)
        too_large = isinstance(pinned, Sized) and len(pinned) > self.num_slots
        self._offer = chosen if self._passes_by or too_large else None
        return chosen

"""Shallow-first: shallow layers are kept, deep ones leave."""

from __future__ import annotations

from collections.abc import Container
from typing import ClassVar

from lm_eval_moecache.algorithms.eviction.base import EvictionAlgorithm, LayerQueues
from lm_eval_moecache.records.event import Event
from lm_eval_moecache.records.geometry import Geometry


class ShallowFirst(EvictionAlgorithm):
    """Favours shallow layers: evicts an expert of the deepest layer that has one.

    Fate (Fang et al. 2025), of which BuddyMoE section 6 says that it "uses cross-layer gate signals
    to prefetch next-layer experts and a shallow-favoring cache". How much it favours them is not
    said: read as strictly, and inside a layer the one longest unused leaves first.
    Cost: O(1) per call, O(layers) where the deepest layers are pinned, beside pinned keys.
    """

    source: ClassVar[str] = "Fang et al. 2025 (Fate), as in BuddyMoE section 6"
    compares_layers: ClassVar[bool] = True

    def __init__(self, geometry: Geometry, *, seed: int = 0) -> None:
        super().__init__(geometry, seed=seed)
        self._queues = LayerQueues(geometry)

    def on_insert(self, key: int, prefetched: bool) -> None:
        self._queues.append(key)

    def on_event(self, event: Event) -> None:
        for key in event.keys:
            if key in self._queues:
                self._queues.append(key)

    def on_evict(self, key: int) -> None:
        self._queues.remove(key)

    def victim(self, pinned: Container[int], layer: int) -> int | None:
        mask = self._queues.mask
        while mask:
            deepest = mask.bit_length() - 1
            key = self._queues.first(deepest, pinned)
            if key is not None:
                return key
            mask ^= 1 << deepest
        return None

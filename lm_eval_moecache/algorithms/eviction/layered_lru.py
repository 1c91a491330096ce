"""Layer-wise LRU: the layer that holds most experts gives up its least recently used one."""

from __future__ import annotations

from collections.abc import Container
from typing import ClassVar

from lm_eval_moecache.algorithms.eviction.base import EvictionAlgorithm, LayerQueues
from lm_eval_moecache.records.event import Event
from lm_eval_moecache.records.geometry import Geometry


class LayeredLRU(EvictionAlgorithm):
    """Keeps one LRU list per layer in a common pool; the longest list loses its oldest.

    Engines with one LRU list per layer (`n/layer` here) keep one layer's experts from pushing out
    another's, but cannot lend a layer more room. As an eviction of a common pool it gives each
    layer its equal share once the pool is full, whatever the order of the accesses: unlike LRU it
    does not lose everything below a cycle. Where several layers hold most, the one whose next turn
    is furthest gives. The rule is our reading of "layer-wise LRU"; no paper states a formula.
    Cost: O(1) per use, O(layers) per victim, beside pinned keys.
    """

    source: ClassVar[str] = "layer-wise LRU lists, as in llama.cpp#27861 and mixtral-offloading"
    compares_layers: ClassVar[bool] = True

    def __init__(self, geometry: Geometry, *, seed: int = 0) -> None:
        super().__init__(geometry, seed=seed)
        self._queues = LayerQueues(geometry)
        self._held = [0] * geometry.num_layers

    def on_insert(self, key: int, prefetched: bool) -> None:
        self._queues.append(key)
        self._held[key // self.geometry.num_experts] += 1

    def on_event(self, event: Event) -> None:
        for key in event.keys:
            if key in self._queues:
                self._queues.append(key)

    def on_evict(self, key: int) -> None:
        self._queues.remove(key)
        self._held[key // self.geometry.num_experts] -= 1

    def victim(self, pinned: Container[int], layer: int) -> int | None:
        num_layers, held = self.geometry.num_layers, self._held
        places = sorted(
            range(num_layers), key=lambda p: (-held[p], -((p - layer - 1) % num_layers))
        )
        firsts = (self._queues.first(place, pinned) for place in places)
        return next((key for key in firsts if key is not None), None)

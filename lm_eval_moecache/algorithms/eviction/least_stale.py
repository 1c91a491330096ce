"""Least-Stale: experts of earlier passes leave first, in layer order."""

from __future__ import annotations

from collections.abc import Container
from typing import ClassVar, Literal

from lm_eval_moecache.algorithms.eviction.base import EvictionAlgorithm
from lm_eval_moecache.records.event import Event
from lm_eval_moecache.records.geometry import Geometry

Queue = list[dict[int, int]]


class LeastStale(EvictionAlgorithm):
    """Evicts stale experts before current ones, and within each queue in layer order.

    SpecMD section 4.2: an expert is *current* once the pass in progress used it or a prefetch
    of this pass selected it, and *stale* when its last use lies in an earlier pass. Stale experts
    leave first, the lowest layer first, so that those left of the running layer go before those
    still to come; current ones follow by the same order, only when nothing stale is left.

    The paper says "FIFO ordering based on layer position" and leaves the order inside a layer
    open: `order=last_use` takes the one longest unused, `order=fifo` the one loaded first.
    Cost: amortised O(1) for last_use, O(log n) for fifo, beside the pinned keys stepped over.
    """

    source: ClassVar[str] = "SpecMD section 4.2"

    def __init__(
        self,
        geometry: Geometry,
        *,
        seed: int = 0,
        order: Literal["last_use", "fifo"] = "last_use",
    ) -> None:
        super().__init__(geometry, seed=seed)
        self.order = order
        layers = geometry.num_layers
        # Per layer, key -> rank; insertion order is the order of eviction.
        self._stale: Queue = [{} for _ in range(layers)]
        self._current: Queue = [{} for _ in range(layers)]
        # Bit l is set where layer l's dict holds keys, so the lowest bit is the first layer.
        self._stale_mask = 0
        self._current_mask = 0
        self._loads = 0

    def on_pass(self, pass_index: int) -> None:
        mask = self._current_mask
        while mask:
            bit = mask & -mask
            mask ^= bit
            layer = bit.bit_length() - 1
            stale, current = self._stale[layer], self._current[layer]
            stale.update(current)
            if self.order == "fifo":
                self._stale[layer] = dict(sorted(stale.items(), key=lambda item: item[1]))
            current.clear()
        self._stale_mask |= self._current_mask
        self._current_mask = 0

    def on_insert(self, key: int, prefetched: bool) -> None:
        self._loads += 1
        layer = key // self.geometry.num_experts
        self._current[layer][key] = self._loads
        self._current_mask |= 1 << layer

    def on_event(self, event: Event) -> None:
        layer = event.layer
        stale, current = self._stale[layer], self._current[layer]
        for key in event.keys:
            if key in stale:
                current[key] = stale.pop(key)
            elif key in current and self.order == "last_use":
                current[key] = current.pop(key)
        self._refresh_masks(layer)

    def on_predicted(self, key: int) -> None:
        layer = key // self.geometry.num_experts
        stale = self._stale[layer]
        rank = stale.pop(key, None)
        if rank is not None:
            self._current[layer][key] = rank
            self._current_mask |= 1 << layer
            if not stale:
                self._stale_mask &= ~(1 << layer)

    def on_evict(self, key: int) -> None:
        layer = key // self.geometry.num_experts
        if self._stale[layer].pop(key, None) is None:
            del self._current[layer][key]
        self._refresh_masks(layer)

    def victim(self, pinned: Container[int], layer: int) -> int | None:
        for queue, mask in ((self._stale, self._stale_mask), (self._current, self._current_mask)):
            while mask:
                bit = mask & -mask
                mask ^= bit
                for key in self._in_order(queue, bit.bit_length() - 1):
                    if key not in pinned:
                        return key
        return None

    def _in_order(self, queue: Queue, layer: int) -> list[int] | dict[int, int]:
        keys = queue[layer]
        # A stale queue is kept sorted; a current one only where last use is the order.
        if self.order == "fifo" and queue is self._current:
            return sorted(keys, key=keys.__getitem__)
        return keys

    def _refresh_masks(self, layer: int) -> None:
        bit = 1 << layer
        self._stale_mask = self._stale_mask | bit if self._stale[layer] else self._stale_mask & ~bit
        self._current_mask = (
            self._current_mask | bit if self._current[layer] else self._current_mask & ~bit
        )

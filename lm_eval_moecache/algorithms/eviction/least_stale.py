"""Least-Stale: stale experts leave first, those of layers already served before all others."""

from __future__ import annotations

from collections.abc import Container
from typing import ClassVar, Literal

from lm_eval_moecache.algorithms.eviction.base import EvictionAlgorithm, LayerQueues
from lm_eval_moecache.records.event import Event
from lm_eval_moecache.records.geometry import Geometry


class LeastStale(EvictionAlgorithm):
    """Evicts stale experts before current ones; of the stale, those left of the running layer.

    SpecMD section 4.2: an expert is *current* once the pass in progress used it or a prefetch
    selected it, and *stale* when its last use lies in an earlier pass; it is *left* where its
    layer has been reached already. What a prefetch brings for the next pass stays current in it.
    Public readings differ in whether stale experts of layers to come leave like the others
    ("within each queue, FIFO ordering based on layer position"). `protect=coming` follows figure 3
    and appendix A.3 ("protecting experts needed for upcoming layers"): left ones go, the first
    layer first; those to come only when no stale one is left, the furthest layer first. Current
    ones follow by the same order. `protect=none` takes every stale expert in layer order, so the
    layers after the running one lose theirs just before their turn.

    The order inside a layer is open, too: `order=last_use` takes the one longest unused,
    `order=fifo` the one loaded first. Cost: O(1) per call, O(layers) where whole layers are
    pinned, O(a layer's residents) per victim for fifo, beside pinned keys.
    """

    source: ClassVar[str] = "SpecMD section 4.2, figure 3, appendix A.3"

    def __init__(
        self,
        geometry: Geometry,
        *,
        seed: int = 0,
        protect: Literal["coming", "none"] = "coming",
        order: Literal["last_use", "fifo"] = "last_use",
    ) -> None:
        super().__init__(geometry, seed=seed)
        self._protect, self._fifo = protect == "coming", order == "fifo"
        self._stale, self._current = LayerQueues(geometry), LayerQueues(geometry)
        self._ahead: dict[int, None] = {}
        """Current keys that a prefetch wants for the next pass, in the order of its wishes."""
        self._loads: dict[int, int] = {}
        """Key -> number of its load (fifo only)."""
        self._num_loads = 0
        self._served = -1
        """The layer this pass has served last."""

    def on_pass(self, pass_index: int) -> None:
        self._current.move_to(self._stale)
        for key in self._ahead:
            self._stale.remove(key)
            self._current.append(key)
        self._ahead.clear()
        self._served = -1

    def on_insert(self, key: int, prefetched: bool) -> None:
        self._current.append(key)
        if self._fifo:
            self._num_loads += 1
            self._loads[key] = self._num_loads
        if prefetched and key // self.geometry.num_experts <= self._served:
            self._ahead[key] = None

    def on_event(self, event: Event) -> None:
        self._served = event.layer
        for key in event.keys:
            if key in self._stale:
                self._stale.remove(key)
                self._current.append(key)
            elif key in self._current:
                self._current.append(key)

    def on_predicted(self, key: int) -> None:
        if key in self._stale:
            self._stale.remove(key)
            self._current.append(key)
        if key // self.geometry.num_experts <= self._served:
            self._ahead.pop(key, None)
            self._ahead[key] = None

    def on_evict(self, key: int) -> None:
        self._ahead.pop(key, None)
        (self._stale if key in self._stale else self._current).remove(key)

    def victim(self, pinned: Container[int], layer: int) -> int | None:
        left = (2 << layer) - 1 if self._protect else -1
        for queues in (self._stale, self._current):
            mask = queues.mask
            while mask:
                reached = mask & left
                place = ((reached & -reached) if reached else mask).bit_length() - 1
                mask ^= 1 << place
                rank = self._loads.__getitem__ if self._fifo else None
                key = queues.first(place, pinned, rank)
                if key is not None:
                    return key
        return None

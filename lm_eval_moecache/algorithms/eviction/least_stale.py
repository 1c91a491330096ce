"""Least-Stale: stale experts leave first, those of layers already served before all others."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Sequence
from typing import ClassVar, Literal

from lm_eval_moecache.algorithms.eviction.base import EvictionAlgorithm
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
        num_experts, num_layers = geometry.num_experts, geometry.num_layers
        self._num_experts = num_experts
        self._queues: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(num_layers)]
        """A layer's residents: the stale ones, then the current ones, each in order of last use."""
        self._current_in = [-1] * (num_layers * num_experts)
        """Key -> number of the pass in which it was current last."""
        self._pass = 0
        self._held = 0
        """Bit l is set where layer l has residents."""
        self._stale = 0
        """Bit l is set where layer l may have stale ones: `victim` finds out."""
        self._ahead: dict[int, None] = {}
        """Current keys that a prefetch wants for the next pass, in the order of its wishes."""
        self._loads: dict[int, int] = {}
        """Key -> number of its load (fifo only)."""
        self._num_loads = 0
        self._served = -1
        """The layer this pass has served last."""

    def on_pass(self, pass_index: int) -> None:
        self._pass += 1
        self._stale = self._held
        for key in self._ahead:
            self._queues[key // self._num_experts].move_to_end(key)
            self._current_in[key] = self._pass
        self._ahead.clear()
        self._served = -1

    def on_insert(self, key: int, prefetched: bool) -> None:
        layer = key // self._num_experts
        self._queues[layer][key] = None
        self._current_in[key] = self._pass
        self._held |= 1 << layer
        if self._fifo:
            self._num_loads += 1
            self._loads[key] = self._num_loads
        if prefetched and layer <= self._served:
            self._ahead[key] = None

    def on_event(self, event: Event) -> None:
        self._served = event.layer
        queue, current_in, now = self._queues[event.layer], self._current_in, self._pass
        for key in event.keys:
            if key in queue:
                queue.move_to_end(key)
                current_in[key] = now

    def on_predicted(self, key: int) -> None:
        self.on_all_predicted((key,))

    def on_all_predicted(self, keys: Sequence[int]) -> None:
        layer, current_in, now = keys[0] // self._num_experts, self._current_in, self._pass
        queue = self._queues[layer]
        for key in keys:
            if current_in[key] != now:
                current_in[key] = now
                queue.move_to_end(key)
        if layer <= self._served:
            for key in keys:
                self._ahead.pop(key, None)
                self._ahead[key] = None

    def on_evict(self, key: int) -> None:
        if self._ahead:
            self._ahead.pop(key, None)
        layer = key // self._num_experts
        queue = self._queues[layer]
        del queue[key]
        if not queue:
            self._held &= ~(1 << layer)

    def victim(self, pinned: Container[int], layer: int) -> int | None:
        left = (2 << layer) - 1 if self._protect else -1
        for is_stale in (True, False):
            layers = self._stale if is_stale else self._held
            while layers:
                reached = layers & left
                bit = reached & -reached if reached else 1 << (layers.bit_length() - 1)
                layers ^= bit
                key = self._find(bit, pinned, is_stale)
                if key is not None:
                    return key
        return None

    def _find(self, bit: int, pinned: Container[int], is_stale: bool) -> int | None:
        """Return who goes first of a layer's stale (or current) keys."""
        current_in, now, seen = self._current_in, self._pass, False
        free = []
        for key in self._queues[bit.bit_length() - 1]:
            if (current_in[key] != now) is not is_stale:
                if is_stale:
                    break
                continue
            seen = True
            if key not in pinned:
                if not self._fifo:
                    return key
                free.append(key)
        if is_stale and not seen:
            # It will have none before the next pass.
            self._stale &= ~bit
        return min(free, key=self._loads.__getitem__, default=None)

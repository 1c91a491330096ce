"""Furthest layer distance."""

from __future__ import annotations

from collections.abc import Container
from typing import ClassVar, Literal

from lm_eval_moecache.algorithms.eviction.base import EvictionAlgorithm, LayerQueues
from lm_eval_moecache.records.event import Event
from lm_eval_moecache.records.geometry import Geometry


class FLD(EvictionAlgorithm):
    """Evicts an expert of the layer furthest from the one being served.

    SpecMD appendix B after HOBBIT: "the distance between each cached expert's layer and the
    current inference layer, evicting experts from the farthest layers first". Read as the
    absolute difference (`distance=absolute`), earlier layers first among equals. As near layers
    are kept because they "are more likely to be needed soon", `forward` counts how many
    layers ahead the expert's next turn is, around the end of the pass: the layer just served is
    then the furthest. Inside a layer the one longest unused goes first; the paper leaves it open.
    Cost: O(1) per call, O(layers) where the furthest layers are pinned, beside pinned keys.
    """

    source: ClassVar[str] = "SpecMD appendix B (FLD); HOBBIT (Tang et al. 2024)"
    compares_layers: ClassVar[bool] = True

    def __init__(
        self,
        geometry: Geometry,
        *,
        seed: int = 0,
        distance: Literal["absolute", "forward"] = "absolute",
    ) -> None:
        super().__init__(geometry, seed=seed)
        self._distance = distance
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
            furthest = self._furthest(mask, layer)
            key = self._queues.first(furthest, pinned)
            if key is not None:
                return key
            mask &= ~(1 << furthest)
        return None

    def _furthest(self, mask: int, layer: int) -> int:
        last = mask.bit_length() - 1
        if self._distance == "forward":
            # Next turns come in the order layer, layer + 1, ..., last, 0, ..., layer - 1.
            behind = mask & ((1 << layer) - 1)
            return behind.bit_length() - 1 if behind else last
        first = (mask & -mask).bit_length() - 1
        return first if layer - first >= last - layer else last

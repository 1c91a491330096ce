"""Frequency and layer: rarely used experts of layers that are far off leave first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from typing import ClassVar, Literal

from lm_eval_moecache.algorithms.eviction.base import EvictionAlgorithm, RankedKeys
from lm_eval_moecache.records.event import Event
from lm_eval_moecache.records.geometry import Geometry


class FrequencyLayer(EvictionAlgorithm):
    """Evicts the expert with the lowest product of activation frequency and nearness of its layer.

    EdgeMoE (Yi et al. 2023), of which BuddyMoE section 6 says that it improves upon LRU and LFU by
    "a heuristic that considers both activation frequency and layer index". The formula is our
    reading: count x (1 - d / layers), where d is how many layers ahead the expert's next turn is,
    around the end of the pass (`layer=forward`), or its layer index alone (`layer=index`, which
    favours shallow layers). Counts are events over the whole run; experts never used leave
    first; ties go to the smaller key. Cost: O(log n) per use, O(layers + log n) per victim.
    """

    source: ClassVar[str] = "Yi et al. 2023 (EdgeMoE), as in BuddyMoE section 6"
    compares_layers: ClassVar[bool] = True

    def __init__(
        self, geometry: Geometry, *, seed: int = 0, layer: Literal["forward", "index"] = "forward"
    ) -> None:
        super().__init__(geometry, seed=seed)
        self._reading = layer
        self._count: Counter[int] = Counter()
        self._resident = [RankedKeys() for _ in range(geometry.num_layers)]

    def on_insert(self, key: int, prefetched: bool) -> None:
        self._resident[key // self.geometry.num_experts].put(key, self._count[key])

    def on_event(self, event: Event) -> None:
        resident = self._resident[event.layer]
        for key in event.keys:
            self._count[key] += 1
            if key in resident:
                resident.put(key, self._count[key])

    def on_evict(self, key: int) -> None:
        self._resident[key // self.geometry.num_experts].remove(key)

    def victim(self, pinned: Container[int], layer: int) -> int | None:
        num_layers = self.geometry.num_layers
        best: tuple[float, int] | None = None
        for other, resident in enumerate(self._resident):
            lowest = resident.lowest(pinned)
            if lowest is None:
                continue
            away = other if self._reading == "index" else (other - layer) % num_layers
            # Times layers, to compare whole numbers: a quotient could tie by rounding.
            candidate = (lowest[0] * (num_layers - away), lowest[1])
            if best is None or candidate < best:
                best = candidate
        return None if best is None else best[1]

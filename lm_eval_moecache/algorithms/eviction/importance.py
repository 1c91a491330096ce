"""Importance: the experts with the lowest decayed gate scores leave first."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lm_eval_moecache.algorithms.eviction.base import StatefulEviction
from lm_eval_moecache.algorithms.importance import ImportanceScores
from lm_eval_moecache.records.event import Event
from lm_eval_moecache.records.ranges import Decay


@dataclass(eq=False, kw_only=True)
class Importance(StatefulEviction):
    """Evicts the expert with the least importance, the decayed sum of its gate scores.

    SwapMoE (Kong et al. 2023), implemented from its abstract, as the text was not available:
    important experts are kept. The same importance drives `prefetch=importance`, so that the
    experts it loads stay; each layer's scores sum to its number of tokens, so layers are
    comparable. Ties go to the smaller key. Cost: O(tokens x E) per event, O(n log n) in the number
    of residents per victim.

    Args:
        decay: Weight of a turn of the layer relative to the next one, 0 to 1.
    """

    name: ClassVar[str] = "importance"
    source: ClassVar[str] = "Kong et al. 2023 (SwapMoE), by its abstract"
    uses_logits: ClassVar[bool] = True

    decay: Decay = 0.95

    def __post_init__(self) -> None:
        self._scores = ImportanceScores(self.geometry, self.decay)
        self._importance = np.zeros(self.geometry.num_layers * self.geometry.num_experts)
        self._is_resident = np.zeros(len(self._importance), dtype=bool)

    def on_insert(self, key: int, prefetched: bool) -> None:
        self._is_resident[key] = True

    def on_event(self, event: Event) -> None:
        base = self.geometry.key(event.layer, 0)
        self._importance[base : base + self.geometry.num_experts] = self._scores.add(event)

    def on_evict(self, key: int) -> None:
        self._is_resident[key] = False

    def victim(self, pinned: Container[int], layer: int) -> int | None:
        residents = np.flatnonzero(self._is_resident)
        order = residents[self._importance[residents].argsort(kind="stable")]
        return next((key for key in order.tolist() if key not in pinned), None)

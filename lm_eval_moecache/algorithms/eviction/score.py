"""Score-based: the experts that the gate values least leave first."""

from __future__ import annotations

import math
from collections.abc import Container
from typing import ClassVar, Literal

import numpy as np

from lm_eval_moecache.algorithms.eviction.base import EvictionAlgorithm, RankedKeys
from lm_eval_moecache.records.event import DROPPED, Event
from lm_eval_moecache.records.geometry import Geometry


class Score(EvictionAlgorithm):
    """Evicts the expert with the lowest accumulated gate score.

    SpecMD appendix B after Zhu et al. 2025: "a running history of gate scores for each expert".
    Each use adds the routing weights of the tokens served; the history outlives eviction. What it
    is differs between readings: `history=sum` ("accumulated", section 2), `mean` per token
    served, or `decayed`, a sum in which each pass counts `decay` times the one after it. An expert
    never used has the lowest score; ties go to the smaller key. Cost: O(log n) per use.

    Parameters: decay, per pass, between 0 and 1, for `decayed` alone (default 0.9 there).
    """

    source: ClassVar[str] = "SpecMD appendix B (score-based); Zhu et al. 2025"
    uses_weights: ClassVar[bool] = True

    def __init__(
        self,
        geometry: Geometry,
        *,
        seed: int = 0,
        history: Literal["sum", "mean", "decayed"] = "sum",
        decay: float | None = None,
    ) -> None:
        super().__init__(geometry, seed=seed)
        if decay is not None and history != "decayed":
            raise ValueError(
                f"eviction.decay={decay} has no effect with eviction.history={history!r}: it goes "
                "with history=decayed."
            )
        if decay is not None and not 0 < decay < 1:
            raise ValueError(f"eviction.decay={decay} must lie between 0 and 1.")
        self._history = history
        self._growth = -math.log(0.9 if decay is None else decay)
        self._pass_index = 0
        self._score: dict[int, float] = {}
        self._uses: dict[int, int] = {}
        self._resident = RankedKeys()

    def on_pass(self, pass_index: int) -> None:
        self._pass_index = pass_index

    def on_insert(self, key: int, prefetched: bool) -> None:
        self._resident.put(key, self._rank(key))

    def on_event(self, event: Event) -> None:
        live = event.experts != DROPPED
        experts, num_experts = event.experts[live], self.geometry.num_experts
        sums = np.bincount(experts, event.weights[live], num_experts)
        uses = np.bincount(experts, minlength=num_experts)
        for key in event.keys:
            expert = key % num_experts
            self._add(key, float(sums[expert]), int(uses[expert]))
            if key in self._resident:
                self._resident.put(key, self._rank(key))

    def on_evict(self, key: int) -> None:
        self._resident.remove(key)

    def victim(self, pinned: Container[int], layer: int) -> int | None:
        lowest = self._resident.lowest(pinned)
        return None if lowest is None else lowest[1]

    def _add(self, key: int, weight: float, uses: int) -> None:
        if self._history == "decayed":
            # Instead of ageing every expert, later scores count for more: as logarithms, for the
            # factor outgrows a float.
            fresh = math.log(max(weight, 1e-30)) + self._growth * self._pass_index
            weight = float(np.logaddexp(self._score.get(key, -math.inf), fresh))
            self._score[key] = weight
        else:
            self._score[key] = self._score.get(key, 0.0) + weight
        self._uses[key] = self._uses.get(key, 0) + uses

    def _rank(self, key: int) -> float:
        score = self._score.get(key, -math.inf)
        return score / self._uses[key] if self._history == "mean" and key in self._uses else score

"""Frequency prefetch: each layer's most activated experts so far."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from lm_eval_moecache.algorithms.prefetch.base import PrefetchAlgorithm, activations
from lm_eval_moecache.records.event import Event
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.ranges import LayersAhead, Positive


class Frequency(PrefetchAlgorithm):
    """Proposes the experts that the next layers have activated most often in the whole run.

    The "historical activation frequencies" of BuddyMoE section 2.3 and the frequency-based
    prediction that SP-MoE section 2.2 compares with; neither defines the window: here all tokens of
    the run, prefill included. Ties go to the smaller expert, and experts never used are not
    proposed. After the last layer it continues with the first of the next pass.
    Cost: O(E log E) per layer ahead; no gate.

    Parameters: overfetch, a factor on top_k (1.0); lookahead, layers ahead (1).
    """

    source: ClassVar[str] = "BuddyMoE section 2.3; SP-MoE section 2.2 (frequency-based prediction)"

    def __init__(
        self,
        geometry: Geometry,
        *,
        seed: int = 0,
        overfetch: Positive = 1.0,
        lookahead: LayersAhead = 1,
    ) -> None:
        super().__init__(geometry, seed=seed)
        self._lookahead = lookahead
        self._share = min(geometry.num_experts, math.ceil(geometry.top_k * overfetch))
        self._counts = np.zeros((geometry.num_layers, geometry.num_experts), dtype=np.int64)

    def propose(self, event: Event) -> Sequence[int]:
        geometry = self.geometry
        self._counts[event.layer] += activations(event, geometry.num_experts)
        keys: list[int] = []
        for ahead in range(1, self._lookahead + 1):
            layer = (event.layer + ahead) % geometry.num_layers
            counts = self._counts[layer]
            best = np.argsort(-counts, kind="stable")[: self._share]
            keys += [geometry.key(layer, int(e)) for e in best if counts[e]]
        return keys

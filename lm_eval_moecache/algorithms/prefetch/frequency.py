"""Frequency prefetch: each layer's most activated experts so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lm_eval_moecache.algorithms.prefetch.base import PrefetchAlgorithm, activations
from lm_eval_moecache.records.event import Event
from lm_eval_moecache.records.ranges import LayersAhead, Positive


@dataclass(eq=False, kw_only=True)
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

    overfetch: Positive = 1.0
    lookahead: LayersAhead = 1

    def __post_init__(self) -> None:
        self._share = self.most(self.overfetch)
        shape = self.geometry.num_layers, self.geometry.num_experts
        self._counts = np.zeros(shape, dtype=np.int64)

    def propose(self, event: Event) -> Sequence[int]:
        geometry = self.geometry
        self._counts[event.layer] += activations(event, geometry.num_experts)
        keys: list[int] = []
        for ahead in range(1, self.lookahead + 1):
            layer = (event.layer + ahead) % geometry.num_layers
            counts = self._counts[layer]
            best = np.argsort(-counts, kind="stable")[: self._share]
            keys += [geometry.key(layer, int(e)) for e in best if counts[e]]
        return keys

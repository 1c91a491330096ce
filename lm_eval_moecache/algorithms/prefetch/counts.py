"""Rules that propose a layer's most used or most important experts so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lm_eval_moecache.algorithms.importance import ImportanceScores
from lm_eval_moecache.algorithms.prefetch.base import PrefetchAlgorithm, activations, largest
from lm_eval_moecache.records.event import Event
from lm_eval_moecache.records.ranges import Decay, Experts, LayersAhead, Positive


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

    name: ClassVar[str] = "frequency"
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
            likely = largest(layer, self._counts[layer], self._share)
            keys += [key for key in likely if self._counts[layer, key % geometry.num_experts]]
        return keys


@dataclass(eq=False, kw_only=True)
class Importance(PrefetchAlgorithm):
    """Proposes the layer's own most important experts for its next turn, in the background.

    SwapMoE (Kong et al. 2023), implemented from its abstract, as the text was not available: a
    small set of important "virtual experts" stays in memory for inference, while the mapping to the
    actual experts is kept up to date seamlessly. Importance here is the decayed sum of the router's
    unmodified gate scores, so that experts skipped by routing because they are absent gain it, too.
    Cost: O(tokens x E) per event; no gate.

    Parameters: experts, number per layer (default twice the router's top_k); decay per turn of the
    layer, from 0 (the last turn only) to 1 (the whole run) (0.95).
    """

    name: ClassVar[str] = "importance"
    source: ClassVar[str] = "Kong et al. 2023 (SwapMoE), by its abstract"
    uses_logits: ClassVar[bool] = True

    experts: Experts | None = None
    decay: Decay = 0.95

    def __post_init__(self) -> None:
        most = min(2 * self.geometry.top_k, self.geometry.num_experts)
        self._share = most if self.experts is None else self.experts
        self._scores = ImportanceScores(self.geometry, self.decay)

    def propose(self, event: Event) -> Sequence[int]:
        return largest(event.layer, self._scores.add(event), self._share)

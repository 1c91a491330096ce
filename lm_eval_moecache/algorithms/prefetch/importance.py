"""Importance prefetch: keeps loading each layer's most important experts, requested or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lm_eval_moecache.algorithms.prefetch.base import PrefetchAlgorithm
from lm_eval_moecache.records.event import Event
from lm_eval_moecache.records.importance import ImportanceScores
from lm_eval_moecache.records.ranges import Decay, Experts


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

    source: ClassVar[str] = "Kong et al. 2023 (SwapMoE), by its abstract"
    uses_logits: ClassVar[bool] = True

    experts: Experts | None = None
    decay: Decay = 0.95

    def __post_init__(self) -> None:
        most = min(2 * self.geometry.top_k, self.geometry.num_experts)
        self._share = most if self.experts is None else self.experts
        self._scores = ImportanceScores(self.geometry, self.decay)

    def propose(self, event: Event) -> Sequence[int]:
        best = np.argsort(-self._scores.add(event), kind="stable")[: self._share]
        return [self.geometry.key(event.layer, int(expert)) for expert in best]

"""Importance prefetch: keeps loading each layer's most important experts, requested or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from lm_eval_moecache.algorithms.prefetch.base import PrefetchAlgorithm
from lm_eval_moecache.records.event import Event
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.importance import ImportanceScores
from lm_eval_moecache.records.ranges import Decay, Experts


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

    def __init__(
        self,
        geometry: Geometry,
        *,
        seed: int = 0,
        experts: Experts | None = None,
        decay: Decay = 0.95,
    ) -> None:
        super().__init__(geometry, seed=seed)
        most = geometry.num_experts
        self._share = min(2 * geometry.top_k, most) if experts is None else experts
        self._scores = ImportanceScores(geometry, decay)

    def propose(self, event: Event) -> Sequence[int]:
        assert event.logits is not None, "importance is made of gate scores"
        best = np.argsort(-self._scores.add(event), kind="stable")[: self._share]
        return [self.geometry.key(event.layer, int(expert)) for expert in best]

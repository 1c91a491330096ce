"""Importance of experts: the router's recent gate scores of each, chosen or not."""

from __future__ import annotations

import numpy as np

from lm_eval_moecache.records.arrays import DoubleArray, softmax
from lm_eval_moecache.records.event import Event
from lm_eval_moecache.records.geometry import Geometry


class ImportanceScores:
    """The decayed sums of the router's unmodified gate scores, by layer and expert.

    Experts that routing passed over for being absent gain importance, too. `decay` is per event of
    the layer: 0 keeps the last event only, 1 the whole run.
    """

    def __init__(self, geometry: Geometry, decay: float) -> None:
        self._decay = decay
        self._scores = np.zeros((geometry.num_layers, geometry.num_experts))

    def add(self, event: Event) -> DoubleArray:
        """Add an event's gate scores; return its layer's sums, rounded so that equals tie."""
        row = self._scores[event.layer]
        row *= self._decay
        row += softmax(event.logits).astype(np.float64).sum(axis=0)
        rounded: DoubleArray = np.round(row, 9)
        return rounded

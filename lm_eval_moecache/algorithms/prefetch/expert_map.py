"""Expert-map prefetch: follows the past pass with the most similar gate probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from lm_eval_moecache.algorithms.prefetch.base import PrefetchAlgorithm
from lm_eval_moecache.records.arrays import softmax
from lm_eval_moecache.records.event import Event
from lm_eval_moecache.records.ranges import Count, LayersAhead

Map = npt.NDArray[np.float64]


@dataclass(eq=False, kw_only=True)
class ExpertMap(PrefetchAlgorithm):
    """Matches the pass's trajectory of gate probabilities with stored ones, and follows the best.

    FineMoE (Yu et al., EuroSys 2026; arXiv 2502.05370 calls it fMoE), implemented from its abstract
    and public summaries, as the text was not available: an expert map holds one iteration's gate
    distributions [layers, experts]; the stored map with the highest cosine on the layers seen so
    far predicts the layer `distance` ahead; its likeliest experts are fetched until their mass
    reaches 1 - cosine, never fewer than top_k, so a poor match fetches more. A full store replaces
    the map most similar to the new one.
    Deviations: the semantic search, which serves the first layers from the prompt's embedding, is
    left out, since algorithms see only gate scores: those layers follow the map that the previous
    pass matched. A pass of several tokens has the mean of their distributions.
    Cost: O(maps x layers x E) per event; no gate.

    Parameters: maps, stored at most (256); distance, layers ahead (3, or all there are).
    """

    source: ClassVar[str] = "Yu et al. 2025 (FineMoE), by its abstract"
    uses_logits: ClassVar[bool] = True

    maps: Count = 256
    distance: LayersAhead | None = None

    def __post_init__(self) -> None:
        layers, experts = self.geometry.num_layers, self.geometry.num_experts
        self._distance = min(3, layers) if self.distance is None else self.distance
        self._past: Map = np.zeros((self.maps, layers, experts))
        self._num_past = 0
        self._now: Map = np.zeros((layers, experts))
        self._inner: Map = np.zeros(self.maps)
        self._prefix: Map = np.zeros(self.maps)

    def on_pass(self, pass_index: int) -> None:
        """Store the finished pass's map and begin a new one."""
        if self._now.any():
            place = self._num_past
            if place == len(self._past):
                likeness = np.einsum("nle,le->n", self._past, self._now)
                place = int((likeness / np.sqrt((self._past**2).sum(axis=(1, 2)))).argmax())
            else:
                self._num_past += 1
            self._past[place] = self._now
        self._now = np.zeros_like(self._now)
        self._inner[:] = self._prefix[:] = 0

    def propose(self, event: Event) -> Sequence[int]:
        row = softmax(event.logits).astype(np.float64).mean(axis=0)
        self._now[event.layer] = row
        if not self._num_past:
            return ()
        # Only this layer was added to the trajectory since the last event.
        past = self._past[: self._num_past, event.layer]
        self._inner[: self._num_past] += past @ row
        self._prefix[: self._num_past] += (past**2).sum(axis=1)
        length = np.sqrt((self._now**2).sum() * self._prefix[: self._num_past])
        cosine = self._inner[: self._num_past] / np.maximum(length, 1e-20)
        best = int(cosine.argmax())
        target = (event.layer + self._distance) % self.geometry.num_layers
        return self._likeliest(self._past[best, target], target, 1 - float(cosine[best]))

    def _likeliest(self, row: Map, layer: int, mass: float) -> list[int]:
        # Rounded, so that equal shares tie despite rounding errors.
        order = np.argsort(-np.round(row, 9), kind="stable")
        enough = int(np.searchsorted(np.cumsum(row[order]), mass)) + 1
        chosen = order[: max(self.geometry.top_k, min(enough, len(order)))]
        return [self.geometry.key(layer, int(expert)) for expert in chosen]

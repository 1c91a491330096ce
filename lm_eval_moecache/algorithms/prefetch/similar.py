"""Rules that follow the past request or pass most similar to the running one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lm_eval_moecache.algorithms.prefetch.base import PrefetchAlgorithm, activations
from lm_eval_moecache.records.arrays import DoubleArray, softmax
from lm_eval_moecache.records.event import PREFILL, Event
from lm_eval_moecache.records.ranges import Count, LayersAhead, Positive


@dataclass(eq=False, kw_only=True)
class History(PrefetchAlgorithm):
    """Matches the request's activation matrix with past ones and proposes the best match's experts.

    MoE-Infinity (Xue et al. 2024), as described in SP-MoE section 5 and CommitMoE section 5.1:
    "request-level prefetching based on historical sequence-level expert activation patterns". A
    request, from one prefill pass to the next, is a matrix [layers, experts] of tokens served (so
    each chunk of `prefill_chunk_size` counts as one). The past one with the highest cosine,
    averaged over the layers this request has reached, predicts the layers ahead: each expert's
    share of its row, discounted by the distance (1 - d / layers). The papers give no formula: the
    cosine, the discount and the rule that a full collection replaces its most similar matrix are
    our readings. Cost: O(requests x E) per event; no gate.

    Parameters: requests, matrices kept (100); overfetch, a factor on top_k (1.0); lookahead,
    layers ahead (default: the rest of the pass; a number may reach into the next pass).
    """

    name: ClassVar[str] = "history"
    source: ClassVar[str] = "Xue et al. 2024 (MoE-Infinity), as in SP-MoE section 5"

    requests: Count = 100
    overfetch: Positive = 1.0
    lookahead: LayersAhead | None = None

    def __post_init__(self) -> None:
        layers, experts = self.geometry.num_layers, self.geometry.num_experts
        self._share = self.most(self.overfetch)
        self._past: DoubleArray = np.zeros((self.requests, layers, experts))  # rows of unit length
        self._num_past = 0
        self._now: DoubleArray = np.zeros((layers, experts))
        self._cosine: DoubleArray = np.zeros((self.requests, layers))
        self._request = -1

    def propose(self, event: Event) -> Sequence[int]:
        if event.phase == PREFILL and event.pass_index != self._request:
            self._finish()
            self._request = event.pass_index
        self._now[event.layer] += activations(event, self.geometry.num_experts)
        if not self._num_past:
            return ()
        # Only this layer's row changed since the last event.
        row = _unit(self._now[event.layer])
        past = self._past[: self._num_past]
        self._cosine[: self._num_past, event.layer] = past[:, event.layer] @ row
        best = int(self._cosine[: self._num_past].sum(axis=1).argmax())
        return self._rank(past[best], event.layer)

    def _rank(self, matrix: DoubleArray, layer: int) -> list[int]:
        geometry = self.geometry
        reach = geometry.num_layers - 1 - layer if self.lookahead is None else self.lookahead
        ranked: list[tuple[float, int]] = []
        for ahead in range(1, reach + 1):
            target = (layer + ahead) % geometry.num_layers
            row, discount = matrix[target], 1 - ahead / geometry.num_layers
            for expert in np.argsort(-row, kind="stable")[: self._share]:
                if row[expert]:
                    # Rounded, so that equal shares tie despite rounding errors.
                    share = round(discount * float(row[expert] / row.sum()), 9)
                    ranked.append((-share, geometry.key(target, int(expert))))
        return [key for _, key in sorted(ranked)]

    def _finish(self) -> None:
        """Store the finished request's matrix and start a new one."""
        if self._now.any():
            unit = _unit(self._now)
            place = self._num_past
            if place == len(self._past):
                place = int(np.einsum("nle,le->n", self._past, unit).argmax())
            else:
                self._num_past += 1
            self._past[place] = unit
        self._now = np.zeros_like(self._now)
        self._cosine[:] = 0


def _unit(rows: DoubleArray) -> DoubleArray:
    length = np.linalg.norm(rows, axis=-1, keepdims=True)
    return np.asarray(rows / np.where(length > 0, length, 1.0))


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

    name: ClassVar[str] = "expert_map"
    source: ClassVar[str] = "Yu et al. 2025 (FineMoE), by its abstract"
    uses_logits: ClassVar[bool] = True

    maps: Count = 256
    distance: LayersAhead | None = None

    def __post_init__(self) -> None:
        layers, experts = self.geometry.num_layers, self.geometry.num_experts
        self._distance = min(3, layers) if self.distance is None else self.distance
        self._past: DoubleArray = np.zeros((self.maps, layers, experts))
        self._num_past = 0
        self._now: DoubleArray = np.zeros((layers, experts))
        self._inner: DoubleArray = np.zeros(self.maps)
        self._prefix: DoubleArray = np.zeros(self.maps)

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

    def _likeliest(self, row: DoubleArray, layer: int, mass: float) -> list[int]:
        # Rounded, so that equal shares tie despite rounding errors.
        order = np.argsort(-np.round(row, 9), kind="stable")
        enough = int(np.searchsorted(np.cumsum(row[order]), mass)) + 1
        chosen = order[: max(self.geometry.top_k, min(enough, len(order)))]
        return [self.geometry.key(layer, int(expert)) for expert in chosen]

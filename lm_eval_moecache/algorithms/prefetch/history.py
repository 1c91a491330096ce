"""History prefetch: follows the past request with the most similar expert activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from lm_eval_moecache.algorithms.prefetch.base import PrefetchAlgorithm, activations
from lm_eval_moecache.records.event import PREFILL, Event
from lm_eval_moecache.records.ranges import Count, LayersAhead, Positive

Matrix = npt.NDArray[np.float64]


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

    source: ClassVar[str] = "Xue et al. 2024 (MoE-Infinity), as in SP-MoE section 5"

    requests: Count = 100
    overfetch: Positive = 1.0
    lookahead: LayersAhead | None = None

    def __post_init__(self) -> None:
        layers, experts = self.geometry.num_layers, self.geometry.num_experts
        self._share = self.most(self.overfetch)
        self._past: Matrix = np.zeros((self.requests, layers, experts))  # rows of unit length
        self._num_past = 0
        self._now: Matrix = np.zeros((layers, experts))
        self._cosine: Matrix = np.zeros((self.requests, layers))
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

    def _rank(self, matrix: Matrix, layer: int) -> list[int]:
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


def _unit(rows: Matrix) -> Matrix:
    length = np.linalg.norm(rows, axis=-1, keepdims=True)
    return np.asarray(rows / np.where(length > 0, length, 1.0))

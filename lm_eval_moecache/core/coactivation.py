"""Co-activation of experts and the buddy lists made of it (BuddyMoE sections 3.1 to 3.3).

Shapes: T tokens, L layers, E experts, K experts per token.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from lm_eval_moecache.core.artefact import Artefact
from lm_eval_moecache.core.records import FloatArray, Geometry, IntArray

Counts = npt.NDArray[np.float64]
PAIRS, WEIGHTED, SIMILARITY = "pairs", "weighted_pairs", "similarity"
TOP_LOGITS = "top_logits"
"""Of some tokens, the logits of their own experts [L, T, K]: what entropy is calibrated on."""
MEASURES = {"binary": PAIRS, "weighted": WEIGHTED, "similarity": SIMILARITY}
NO_BUDDY = -1


class Coactivation:
    """Counts of one model: A(i) [L, E], M(i, j) [L, E, E] and M weighted by min(p(i), p(j))."""

    def __init__(self, geometry: Geometry) -> None:
        shape = (geometry.num_layers, geometry.num_experts)
        self.activations: Counts = np.zeros(shape)
        self.pairs: Counts = np.zeros((*shape, geometry.num_experts))
        self.weighted_pairs: Counts = np.zeros((*shape, geometry.num_experts))

    def add(self, layer: int, experts: IntArray, logits: FloatArray, weight: Counts) -> None:
        """Count tokens that chose `experts` [T, K] by `logits` [T, E], each `weight` [T] times."""
        top_k = experts.shape[-1]
        chosen = np.take_along_axis(logits, experts, axis=-1)
        shares = top_k_shares(chosen, 1.0)
        np.add.at(self.activations[layer], experts, weight[:, None])
        for one in range(top_k):
            for other in range(top_k):
                if one == other:
                    continue
                pair = (experts[:, one], experts[:, other])
                np.add.at(self.pairs[layer], pair, weight)
                smaller = np.minimum(shares[:, one], shares[:, other])
                np.add.at(self.weighted_pairs[layer], pair, weight * smaller)


def top_k_shares(logits: FloatArray, temperature: float) -> FloatArray:
    """Return softmax(z / T) restricted to a token's own experts [T, K] and renormalised there.

    An expert that routing has dropped has the logit -inf, and no share.
    """
    scaled = logits.astype(np.float64) / temperature
    scores = np.exp(scaled - scaled.max(axis=-1, keepdims=True))
    return np.asarray(scores / scores.sum(axis=-1, keepdims=True), dtype=np.float32)


def activating_entropy(shares: FloatArray) -> FloatArray:
    """Return TAE [T] of renormalised probabilities [T, K] (equation 1); 0 for a single expert."""
    live = shares > 0
    terms = np.where(live, shares * np.log(np.where(live, shares, 1.0)), 0.0)
    most = np.log(np.maximum(live.sum(axis=-1), 2))
    return np.asarray(-terms.sum(axis=-1) / most, dtype=np.float32)


def conditional(counts: npt.NDArray[Any], smoothing: float) -> Counts:
    """Return q [E, E], row i being q(j|i) (equation 4) after Laplace smoothing.

    A row without any evidence stays zero: smoothing it would invent buddies. Negative similarities
    count as none.
    """
    evidence = np.maximum(counts.astype(np.float64), 0.0)
    np.fill_diagonal(evidence, 0.0)
    smoothed = evidence + smoothing
    np.fill_diagonal(smoothed, 0.0)
    smoothed[evidence.sum(axis=-1) == 0] = 0.0
    totals = smoothed.sum(axis=-1, keepdims=True)
    return np.asarray(smoothed / np.where(totals == 0, 1.0, totals))


def buddy_lists(q: Counts, alpha: float, k_max: int) -> IntArray:
    """Return B(i; alpha) [E, k_max] (equations 5 and 6), padded with NO_BUDDY.

    The shortest prefix of the peers by falling q (ties to the smaller index) that covers alpha,
    cut at k_max; never empty for an expert with evidence.
    """
    order = np.argsort(-q, axis=-1, kind="stable")
    ranked = np.take_along_axis(q, order, axis=-1)
    # What the better peers cover already; sums of shares miss a bound by rounding only.
    before = np.cumsum(ranked, axis=-1) - ranked
    is_buddy = (ranked > 0) & (before < alpha - 1e-9)
    width = min(k_max, q.shape[-1] - 1)
    return np.where(is_buddy, order, NO_BUDDY)[:, :width].astype(np.int64)


def check_profile(artefact: Artefact) -> None:
    """Raise ValueError for a buddy profile whose lists would rest on no evidence."""
    layers, experts = artefact.num_layers, artefact.num_experts
    square = (layers, experts, experts)
    shapes: dict[str, tuple[int, ...]] = {"activations": (layers, experts)}
    shapes |= dict.fromkeys((PAIRS, WEIGHTED, SIMILARITY), square)
    num_sampled = artefact.arrays[TOP_LOGITS].shape[1:2] if TOP_LOGITS in artefact.arrays else (1,)
    artefact.require(**shapes, **{TOP_LOGITS: (layers, *num_sampled, artefact.top_k)})
    where = artefact.path or "the profile"
    for name in (PAIRS, WEIGHTED):
        counts = artefact.arrays[name]
        if (counts < 0).any() or not np.allclose(counts, counts.transpose(0, 2, 1)):
            raise ValueError(f"{where}: {name!r} holds no counts: negative or not symmetric.")
        rows = counts.sum(axis=-1) - np.diagonal(counts, axis1=1, axis2=2)
        empty = np.argwhere(rows == 0)
        if len(empty):
            named = ", ".join(f"{expert} of layer {layer}" for layer, expert in empty[:5].tolist())
            raise ValueError(
                f"{where}: {len(empty)} of {layers * experts} experts were never activated beside "
                f"another (expert {named}{', ...' if len(empty) > 5 else ''}), so their buddies "
                "would rest on no evidence. Profile more, or more varied, text."
            )

"""Co-activation of experts and the buddy lists made from it (BuddyMoE sections 3.1 to 3.3).

Shapes: T tokens, L layers, E experts, K experts per token.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from lm_eval_moecache.records.arrays import BoolArray, DoubleArray, FloatArray, IntArray
from lm_eval_moecache.records.artifact import Artifact
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.numbers import per_layer

PAIRS, WEIGHTED, SIMILARITY = "pairs", "weighted_pairs", "similarity"
TOP_LOGITS = "top_logits"
"""Array of the chosen experts' logits of sampled tokens [L, T, K], to calibrate entropy on."""
MEASURES = {"binary": PAIRS, "weighted": WEIGHTED, "similarity": SIMILARITY}
NO_BUDDY = -1


class Coactivation:
    """Counts of one model: A(i) [L, E], M(i, j) [L, E, E] and M weighted by min(p(i), p(j))."""

    def __init__(self, geometry: Geometry) -> None:
        shape = (geometry.num_layers, geometry.num_experts)
        self.activations: DoubleArray = np.zeros(shape)
        self.pairs: DoubleArray = np.zeros((*shape, geometry.num_experts))
        self.weighted_pairs: DoubleArray = np.zeros((*shape, geometry.num_experts))

    def add(self, layer: int, experts: IntArray, logits: FloatArray) -> None:
        """Count tokens that chose `experts` [T, K] by `logits` [T, E]."""
        shares = top_k_shares(np.take_along_axis(logits, experts, axis=-1), 1.0)
        np.add.at(self.activations[layer], experts, 1)
        one, other = np.nonzero(~np.eye(experts.shape[-1], dtype=bool))
        pairs = experts.T[one], experts.T[other]
        np.add.at(self.pairs[layer], pairs, 1)
        smaller = np.minimum(shares.T[one], shares.T[other])
        np.add.at(self.weighted_pairs[layer], pairs, smaller)


def top_k_shares(logits: FloatArray, temperature: float) -> FloatArray:
    """Return softmax(z / temperature) over each token's own experts [..., K].

    An expert that routing has dropped has logit -inf and share 0.
    """
    scaled = logits.astype(np.float64) / temperature
    scores = np.exp(scaled - scaled.max(axis=-1, keepdims=True))
    return np.asarray(scores / scores.sum(axis=-1, keepdims=True), dtype=np.float32)


def activating_entropy(shares: FloatArray) -> FloatArray:
    """Return the TAE [...] of renormalised shares [..., K] (equation 1); 0 for a single expert."""
    positive = shares > 0
    terms = np.where(positive, shares * np.log(np.where(positive, shares, 1.0)), 0.0)
    max_entropy = np.log(np.maximum(positive.sum(axis=-1), 2))
    return np.asarray(-terms.sum(axis=-1) / max_entropy, dtype=np.float32)


def conditional(counts: npt.NDArray[Any], smoothing: float) -> DoubleArray:
    """Return q [E, E] with rows q(j|i) (equation 4) after Laplace smoothing of the counts.

    A row without any evidence stays zero: smoothing it would invent buddies.
    """
    evidence = counts.astype(np.float64)
    np.fill_diagonal(evidence, 0.0)
    smoothed = evidence + smoothing
    np.fill_diagonal(smoothed, 0.0)
    smoothed[evidence.sum(axis=-1) == 0] = 0.0
    totals = smoothed.sum(axis=-1, keepdims=True)
    return np.asarray(smoothed / np.where(totals == 0, 1.0, totals))


def buddy_lists(q: DoubleArray, alpha: float, k_max: int) -> IntArray:
    """Return B(i; alpha) [E, k_max] (equations 5 and 6), padded with NO_BUDDY.

    The shortest prefix of the peers by falling q (ties to the smaller index) that covers alpha,
    cut at k_max; never empty for an expert with evidence.
    """
    order = np.argsort(-q, axis=-1, kind="stable")
    ranked = np.take_along_axis(q, order, axis=-1)
    # Covered by better peers already; the margin absorbs the rounding of these sums.
    covered = np.cumsum(ranked, axis=-1) - ranked
    is_buddy = (ranked > 0) & (covered < alpha - 1e-9)
    width = min(k_max, q.shape[-1] - 1)
    return np.where(is_buddy, order, NO_BUDDY)[:, :width].astype(np.int64)


class BuddyProfile:
    """A buddy artifact, turned into entropy thresholds and buddy lists."""

    def __init__(self, artifact: Artifact) -> None:
        """Raise ValueError for a profile without evidence for its lists."""
        check_profile(artifact)
        self._arrays, self._settings = artifact.arrays, artifact.made_from
        self._num_layers, self._num_experts = artifact.num_layers, artifact.num_experts

    def thresholds(self, tau: float, scale: str, temperature: float) -> DoubleArray:
        """Return the entropy [L] up to which tokens are left alone: tau, or that percentile."""
        limit = 100 if scale == "percentile" else 1
        if not 0 <= tau <= limit:
            raise ValueError(f"miss.tau={tau} must lie between 0 and {limit} (tau_scale={scale}).")
        if scale == "absolute":
            return np.full(self._num_layers, tau)
        entropies = activating_entropy(top_k_shares(self._arrays[TOP_LOGITS], temperature))
        return np.percentile(entropies.astype(np.float64), tau, axis=-1)

    def buddies(
        self, measure: str, alpha: float | list[float] | None, k_max: int | None, rank: int | None
    ) -> tuple[DoubleArray, BoolArray]:
        """Return q [L, E, E], and which experts j are among the first `rank` buddies of i."""
        value = self._settings["alpha"] if alpha is None else alpha
        alphas = per_layer("miss.alpha", value, self._num_layers)
        k_max = int(self._settings["k_max"]) if k_max is None else k_max
        longest = min(k_max, self._num_experts - 1)
        if rank is not None and not 1 <= rank < longest:
            raise ValueError(
                f"miss.H={rank} must be at least 1 and below the longest list, {longest}: leave it "
                "out to search whole lists."
            )
        evidence, smoothing = self._arrays[MEASURES[measure]], self._settings["smoothing"]
        if measure == "similarity":
            # Cosines mapped to 0..1, so that every expert has a buddy; smoothing is for counts.
            evidence, smoothing = (1 + evidence) / 2, 0.0
        q = np.stack([conditional(layer, smoothing) for layer in evidence])
        is_buddy = np.zeros(q.shape, dtype=bool)
        for layer, share in enumerate(alphas):
            lists = buddy_lists(q[layer], share, k_max)[:, :rank]
            pivots, places = (lists != NO_BUDDY).nonzero()
            is_buddy[layer, pivots, lists[pivots, places]] = True
        return q, is_buddy


def check_profile(artifact: Artifact) -> None:
    """Raise ValueError for a buddy profile without evidence for its lists."""
    from lm_eval_moecache.records.schemas import check
    from lm_eval_moecache.records.schemas.artifacts import MadeBuddies

    layers, experts = artifact.num_layers, artifact.num_experts
    square = (layers, experts, experts)
    shapes: dict[str, tuple[int, ...]] = {"activations": (layers, experts)}
    shapes |= dict.fromkeys((PAIRS, WEIGHTED, SIMILARITY), square)
    num_sampled = artifact.arrays[TOP_LOGITS].shape[1:2] if TOP_LOGITS in artifact.arrays else (1,)
    artifact.require(**shapes, **{TOP_LOGITS: (layers, *num_sampled, artifact.top_k)})
    where = artifact.path or "the profile"
    check(MadeBuddies, artifact.made_from, f"{where}: its `made_from`")
    for name in (PAIRS, WEIGHTED):
        counts = artifact.arrays[name]
        if (counts < 0).any() or not np.allclose(counts, counts.transpose(0, 2, 1)):
            raise ValueError(f"{where}: {name!r} holds no counts: negative or not symmetric.")
        rows = counts.sum(axis=-1) - np.diagonal(counts, axis1=1, axis2=2)
        empty = np.argwhere(rows == 0)
        if len(empty):
            examples = ", ".join(
                f"{expert} of layer {layer}" for layer, expert in empty[:5].tolist()
            )
            raise ValueError(
                f"{where}: {len(empty)} of {layers * experts} experts were never activated with "
                f"another (expert {examples}{', ...' if len(empty) > 5 else ''}), so their buddies "
                "would rest on no evidence. Profile more, or more varied, text."
            )

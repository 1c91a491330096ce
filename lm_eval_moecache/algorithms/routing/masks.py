"""Rules that leave experts of a token out, cached or not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from lm_eval_moecache.algorithms.learned.sensitivity import (
    LAYERS,
    THRESHOLDS,
    load_sensitivity,
    rises,
)
from lm_eval_moecache.algorithms.routing.base import (
    FewerExperts,
    RoutingOverRows,
    fewer_experts,
)
from lm_eval_moecache.records.artifact import SENSITIVITY
from lm_eval_moecache.records.event import Event
from lm_eval_moecache.records.ranges import Positive, ProperShare, Range
from lm_eval_moecache.records.selection import Selection


@dataclass(eq=False, kw_only=True)
class Pruning(RoutingOverRows):
    """Keeps the h heaviest experts of each token and discards the rest, cached or not.

    Mixture of Cache-Conditional Experts section 4.2: "experts ranked >= h (with 1 < h <= k) are
    discarded", read with ranks from 0, so that h experts are kept. The miss rate per token stays
    normalised by k, as in the paper. The paper does not say that the kept weights are
    renormalised: `renormalize` does so, preserving each token's total weight. Cost: O(1) per token.

    Parameters: h, experts kept, 1 to top_k - 1 (default top_k - 1, the mildest; the paper sweeps).
    """

    name: ClassVar[str] = "pruning"
    source: ClassVar[str] = "Cache-conditional experts section 4.2 (pruning baseline)"

    uses_residents: ClassVar[bool] = False

    h: FewerExperts | None = None
    renormalize: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._left = fewer_experts(self.h, self.geometry.top_k)

    def choose(self, event: Event) -> Selection | None:
        keep = np.zeros(event.experts.shape, dtype=bool)
        keep[:, : self._left] = True
        return Selection(event.experts, keep, self.renormalize)


Threshold = Annotated[float, Range(above=0, most=1, why="; 0 keeps all")]


@dataclass(eq=False, kw_only=True)
class SkipRatio(RoutingOverRows):
    """Keeps a token's k_min heaviest experts, and of the others those with p_i > t p_0.

    ik_llama.cpp#239 (smart expert reduction, `-ser k_min,t`), cached or not; t = 1 keeps k_min of
    them. p are the router's weights; renormalising does not change their ratios. The source leaves
    the skipped weight to the model: families that renormalise do so over the kept experts
    (`renormalize`). Cost: O(k) per token.

    Parameters: k_min, experts always kept, 1 to top_k - 1 (top_k - 1, the mildest); t, above 0 and
    at most 1 (1.0); renormalize (false).
    """

    name: ClassVar[str] = "skip_ratio"
    source: ClassVar[str] = "ik_llama.cpp#239 (smart expert reduction)"
    uses_weights: ClassVar[bool] = True

    k_min: FewerExperts | None = None
    t: Threshold = 1.0
    renormalize: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._least = fewer_experts(self.k_min, self.geometry.top_k)

    def choose(self, event: Event) -> Selection | None:
        keep = event.weights > self.t * event.weights.max(axis=-1, keepdims=True)
        ranks = np.argsort(np.argsort(-event.weights, axis=-1, kind="stable"), axis=-1)
        keep |= ranks < self._least
        return None if keep.all() else Selection(event.experts, keep, self.renormalize)


Mass = Annotated[float, Range(above=0, below=1, why=", which keeps all")]


@dataclass(eq=False, kw_only=True)
class SkipMass(RoutingOverRows):
    """Keeps a token's heaviest experts until their share of its weight reaches p, cached or not.

    colibri#704 (`TOPP`; the same in #676 and the first engine): sorted by weight, the expert that
    crosses p is the last one kept, and "the dropped weight simply does not contribute".
    Cost: O(k log k) per token.

    Parameters: p, share of a token's weight, above 0 and below 1 (0.9; the source has it off by
    default); renormalize, share the skipped weight among the kept ones (false).
    """

    name: ClassVar[str] = "skip_mass"
    source: ClassVar[str] = "colibri#704, #676 (TOPP)"
    uses_weights: ClassVar[bool] = True

    p: Mass = 0.9
    renormalize: bool = False

    def choose(self, event: Event) -> Selection | None:
        order = np.argsort(-event.weights, axis=-1, kind="stable")
        sorted_weights = np.take_along_axis(event.weights, order, axis=-1).astype(np.float64)
        before = sorted_weights.cumsum(axis=-1) - sorted_weights
        keep = np.empty(order.shape, dtype=bool)
        total = sorted_weights.sum(axis=-1, keepdims=True)
        np.put_along_axis(keep, order, before < self.p * total, axis=-1)
        return None if keep.all() else Selection(event.experts, keep, self.renormalize)


@dataclass(eq=False, kw_only=True)
class Sensitivity(RoutingOverRows):
    """Keeps as few of a token's heaviest experts as the layer's sensitivity allows.

    AdapMoE (Zhong et al., ICCAD 2024; arXiv 2408.10284): with top-2 gating the second expert is
    dropped if (1 - alpha)^2 S_l <= T, where alpha is the first expert's weight and S_l the
    second-order (Fisher) sensitivity of layer l; activations fall by 25% "without accuracy loss"
    (its repository's README, on which this is based). For more than two experts 1 - alpha is the
    weight share of all dropped experts, lightest first; the kept ones are renormalised, like the
    one of two in the paper. Cost: O(top_k) per token.

    Parameters: profile, a file of `moecache profile sensitivity` (default: the one that ships for
    the model); share of activations to drop on the profile's text, above 0 and below 1 (0.25);
    threshold T in place of it.
    """

    name: ClassVar[str] = "sensitivity"
    source: ClassVar[str] = "Zhong et al. 2024 (AdapMoE), sensitivity-based gating"
    uses_logits: ClassVar[bool] = True
    uses_weights: ClassVar[bool] = True
    artifact_kind: ClassVar[str | None] = SENSITIVITY

    profile: str | None = None
    share: ProperShare = 0.25
    threshold: Positive | None = None

    def __post_init__(self) -> None:
        self.artifact = load_sensitivity(self.profile, self.geometry)
        self._sensitivity: list[float] = self.artifact.arrays[LAYERS].tolist()
        known = self.artifact.arrays[THRESHOLDS]
        asked = float(np.interp(100 * self.share, np.arange(101), known))
        self._threshold = asked if self.threshold is None else self.threshold

    def choose(self, event: Event) -> Selection | None:
        keep = rises(event.weights, self._sensitivity[event.layer]) > self._threshold
        return None if keep.all() else Selection(event.experts, keep, renormalize=True)

"""Sensitivity gating: light experts are dropped where the loss is insensitive to them."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lm_eval_moecache.algorithms.routing.base import RoutingAlgorithm
from lm_eval_moecache.records.artifact import SENSITIVITY
from lm_eval_moecache.records.event import Event
from lm_eval_moecache.records.ranges import Positive, ProperShare
from lm_eval_moecache.records.selection import Selection
from lm_eval_moecache.records.sensitivity import LAYERS, THRESHOLDS, load_sensitivity, rises


@dataclass(eq=False, kw_only=True)
class Sensitivity(RoutingAlgorithm):
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

    def select(self, event: Event, resident: Container[int]) -> Selection | None:
        assert event.experts is not None and event.weights is not None
        keep = rises(event.weights, self._sensitivity[event.layer]) > self._threshold
        return None if keep.all() else Selection(event.experts, keep, renormalize=True)

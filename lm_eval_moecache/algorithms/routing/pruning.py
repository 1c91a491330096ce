"""Pruning: the lightest experts of every token are dropped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lm_eval_moecache.algorithms.routing.base import FewerExperts, RoutingOverRows, fewer_experts
from lm_eval_moecache.records.selection import Selection
from lm_eval_moecache.records.tokens import Tokens


@dataclass(eq=False, kw_only=True)
class Pruning(RoutingOverRows):
    """Keeps the h heaviest experts of each token and discards the rest, cached or not.

    Mixture of Cache-Conditional Experts section 4.2: "experts ranked >= h (with 1 < h <= k) are
    discarded", read with ranks from 0, so that h experts are kept. The miss rate per token stays
    normalised by k, as in the paper. The paper does not say that the kept weights are
    renormalised: `renormalize` does so, preserving each token's total weight. Cost: O(1) per token.

    Parameters: h, experts kept, 1 to top_k - 1 (default top_k - 1, the mildest; the paper sweeps).
    """

    source: ClassVar[str] = "Cache-conditional experts section 4.2 (pruning baseline)"

    uses_residents: ClassVar[bool] = False

    h: FewerExperts | None = None
    renormalize: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._left = fewer_experts(self.h, self.geometry.top_k)

    def choose(self, tokens: Tokens) -> Selection | None:
        keep = np.zeros(tokens.experts.shape, dtype=bool)
        keep[:, : self._left] = True
        return Selection(tokens.experts, keep, self.renormalize)

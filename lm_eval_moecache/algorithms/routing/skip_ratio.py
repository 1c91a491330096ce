"""Skipping by ratio: experts far lighter than the heaviest are dropped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from lm_eval_moecache.algorithms.routing.base import FewerExperts, RoutingOverRows, fewer_experts
from lm_eval_moecache.records.ranges import Range
from lm_eval_moecache.records.selection import Selection
from lm_eval_moecache.records.tokens import Tokens

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

    source: ClassVar[str] = "ik_llama.cpp#239 (smart expert reduction)"
    uses_weights: ClassVar[bool] = True

    k_min: FewerExperts | None = None
    t: Threshold = 1.0
    renormalize: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._least = fewer_experts(self.k_min, self.geometry.top_k)

    def choose(self, tokens: Tokens) -> Selection | None:
        keep = tokens.weights > self.t * tokens.weights.max(axis=-1, keepdims=True)
        ranks = np.argsort(np.argsort(-tokens.weights, axis=-1, kind="stable"), axis=-1)
        keep |= ranks < self._least
        return None if keep.all() else Selection(tokens.experts, keep, self.renormalize)

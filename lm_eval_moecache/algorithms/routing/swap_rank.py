"""Swap-rank: the sensitivity analysis that replaces one expert by a random one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lm_eval_moecache.algorithms.routing.base import RoutingOverRows
from lm_eval_moecache.records.ranges import Rank
from lm_eval_moecache.records.selection import Selection
from lm_eval_moecache.records.tokens import Tokens


@dataclass(eq=False, kw_only=True)
class SwapRank(RoutingOverRows):
    """Replaces each token's expert of one rank by a random expert that the token did not select.

    Mixture of Cache-Conditional Experts section 2.3, Figure 2 right. The substitute is drawn
    uniformly and, as in equation 1, has its own weight from the unmodified logits, not that of
    the expert it replaces. Draws depend only on the seed, the pass and the layer.
    Cost: O(E) per token.

    Parameters: rank, from 1, the heaviest, to top_k (default 1).
    """

    source: ClassVar[str] = "Cache-conditional experts section 2.3, Figure 2 (right)"
    draws: ClassVar[bool] = True

    rank: Rank = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.geometry.top_k == self.geometry.num_experts:
            raise ValueError("the router selects every expert: there is none to swap in.")

    def choose(self, tokens: Tokens) -> Selection | None:
        size = tokens.by_row[1], self.geometry.num_experts
        seeds = [(self.seed, index, tokens.layer) for index in tokens.passes]
        draws = np.concatenate([np.random.default_rng(seed).random(size) for seed in seeds])
        np.put_along_axis(draws, tokens.experts, -1.0, axis=-1)
        experts = tokens.experts.copy()
        experts[:, self.rank - 1] = draws.argmax(axis=-1)
        return Selection(experts)

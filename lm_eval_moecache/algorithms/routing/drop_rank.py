"""Drop-rank: the sensitivity analysis that drops experts from a given rank on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from lm_eval_moecache.algorithms.routing.base import RoutingOverRows
from lm_eval_moecache.records.ranges import Rank
from lm_eval_moecache.records.selection import Selection
from lm_eval_moecache.records.tokens import Tokens


@dataclass(eq=False, kw_only=True)
class DropRank(RoutingOverRows):
    """Drops each token's expert of the given rank and all lighter ones, or that one only.

    Mixture of Cache-Conditional Experts section 2.3, Figure 2 left: "completely removing experts
    ranked at or above a specified index" (`scope=from`). `scope=only` is the counterpart of
    `swap_rank` at one rank. Weights are renormalised only with `renormalize`.
    Cost: O(1) per token.

    Parameters: rank, from 1, the heaviest, to top_k (default 2, from which on all four models of
    the figure suffer).
    """

    source: ClassVar[str] = "Cache-conditional experts section 2.3, Figure 2 (left)"

    rank: Rank = 2
    scope: Literal["from", "only"] = "from"
    renormalize: bool = False

    def choose(self, tokens: Tokens) -> Selection | None:
        keep = np.ones(tokens.experts.shape, dtype=bool)
        keep[:, self.rank - 1 : self.rank if self.scope == "only" else None] = False
        return Selection(tokens.experts, keep, self.renormalize)

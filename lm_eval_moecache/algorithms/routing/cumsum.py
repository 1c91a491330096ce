"""Cumsum: max-rank with M set by the router's cumulative probability."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from lm_eval_moecache.algorithms.routing.base import (
    AlwaysKept,
    RoutingOverRows,
    ranking,
    take_best,
    unless_same,
)
from lm_eval_moecache.records.arrays import each_token, softmax
from lm_eval_moecache.records.ranges import Range
from lm_eval_moecache.records.selection import Selection
from lm_eval_moecache.records.tokens import Tokens

Mass = Annotated[float, Range(above=0, most=1, why="; 0 is routing=standard")]


@dataclass(eq=False, kw_only=True)
class Cumsum(RoutingOverRows):
    """Promotes the cached experts among the fewest top experts that sum to p, then the top J.

    Mixture of Cache-Conditional Experts section 3.2, equation 8 and algorithm 2. The
    probabilities are the softmax of the logits (equation 3) for every family. The sum is taken in
    double precision, and a p of 1 that rounding keeps out of reach means all experts.
    Cost: O(E log E) per token.

    Parameters: p, 0 to 1 (0.9; the paper sweeps 50 values and names none); J, experts always
    kept (1: the paper fixes J > 0 without a figure).
    """

    source: ClassVar[str] = "Cache-conditional experts section 3.2, algorithm 2"
    uses_logits: ClassVar[bool] = True

    p: Mass = 0.9
    J: AlwaysKept = 1

    def choose(self, tokens: Tokens) -> Selection | None:
        ranked = ranking(tokens)
        weights = softmax(tokens.logits)[each_token(ranked), ranked]
        sums = np.cumsum(weights, axis=-1, dtype=np.float64)
        # Rank i is within M where the sum of those before it has not reached p yet.
        before = np.concatenate([np.zeros((len(sums), 1)), sums[:, :-1]], axis=-1)
        cached = tokens.resident[each_token(ranked), ranked]
        place = np.where(cached & (before < self.p), 1, 2)
        place[:, : self.J] = 0
        return unless_same(tokens, take_best(ranked, place, self.geometry.top_k))

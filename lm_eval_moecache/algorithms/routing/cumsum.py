"""Cumsum: max-rank with M set by the router's cumulative probability."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from lm_eval_moecache.algorithms.costs import RankCost, Ranked, Seen
from lm_eval_moecache.algorithms.routing.base import AlwaysKept, RoutingByCost
from lm_eval_moecache.records.ranges import Range

Mass = Annotated[float, Range(above=0, most=1, why="; 0 is routing=standard")]


@dataclass(eq=False, kw_only=True)
class Cumsum(RoutingByCost):
    """Promotes the cached experts among the fewest top experts that sum to p, then the top J.

    Mixture of Cache-Conditional Experts section 3.2, equation 8 and algorithm 2. The
    probabilities are the softmax of the logits (equation 3) for every family. The sum is taken in
    double precision, and a p of 1 that rounding keeps out of reach means all experts.
    Cost: O(E log E) per token.

    Parameters: p, 0 to 1 (0.9; the paper sweeps 50 values and names none); J, experts always
    kept (1: the paper fixes J > 0 without a figure).
    """

    source: ClassVar[str] = "Cache-conditional experts section 3.2, algorithm 2"
    uses_scores: ClassVar[bool] = True

    p: Mass = 0.9
    J: AlwaysKept = 1

    def cost(self) -> RankCost:
        p, kept = self.p, self.J

        def cost(expert: Ranked, seen: Seen) -> tuple[float, float]:
            if expert.rank < kept:
                return 0.0, 0.0
            # A rank is within M where the sum of those before it has not reached p yet.
            return (1.0 if expert.resident and expert.before < p else 2.0), 0.0

        return cost

"""Max-rank: cached experts among the top M go first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lm_eval_moecache.algorithms.costs import RankCost, Ranked, Seen
from lm_eval_moecache.algorithms.routing.base import AlwaysKept, RoutingByCost


@dataclass(eq=False, kw_only=True)
class MaxRank(RoutingByCost):
    """Promotes the cached experts of rank up to M, then the top J whether cached or not.

    Mixture of Cache-Conditional Experts section 3.1, equations 5-7 and algorithm 1. M counts
    ranks from the best one, as printed in the algorithm, so an M up to the router's top_k changes
    nothing and is refused. (Section 4.2 sweeps "0, 1, ..., K", which by the algorithm would all be
    standard routing, and so may mean ranks beyond K.) Cost: O(E log E) per token.

    Parameters: M, ranks (default twice the router's top_k, at most all); J, experts always kept
    (1: the paper fixes J > 0 without a figure).
    """

    source: ClassVar[str] = "Cache-conditional experts section 3.1, algorithm 1"

    M: int | None = None
    J: AlwaysKept = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        top_k, num_experts = self.geometry.top_k, self.geometry.num_experts
        self._first = min(2 * top_k, num_experts) if self.M is None else self.M
        if not top_k < self._first <= num_experts:
            raise ValueError(
                f"routing.M={self._first} must lie above the router's top_k={top_k} (below that "
                f"nothing changes) and be at most the {num_experts} experts of a layer."
            )

    def cost(self) -> RankCost:
        first, kept = self._first, self.J

        def cost(expert: Ranked, seen: Seen) -> tuple[float, float]:
            # promote(r[:J]; promote(r[:M] & C; r)): three classes, each in the order of r.
            if expert.rank < kept:
                return 0.0, 0.0
            return (1.0 if expert.resident and expert.rank < first else 2.0), 0.0

        return cost

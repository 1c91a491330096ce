"""Rules that prefer cached experts, by a cost of each rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from numpy import float32

from lm_eval_moecache.algorithms.cheapest import RankCost, Ranked, Seen
from lm_eval_moecache.algorithms.routing.base import AlwaysKept, RoutingByCost
from lm_eval_moecache.records.numbers import per_layer
from lm_eval_moecache.records.ranges import Positive, Range


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

    name: ClassVar[str] = "max_rank"
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

    name: ClassVar[str] = "cumsum"
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


Lambda = Annotated[float, Range(above=0, most=1, why="; 0 is routing=standard")]


@dataclass(eq=False, kw_only=True)
class CachePrior(RoutingByCost):
    """Selects by z' = z + lambda * Delta_avg * m, where m marks the cached and the top-J experts.

    Mixture of Cache-Conditional Experts section 3.3, equations 9 and 10; SpecMD equation 1 is
    top_j=0. Weights come from the unmodified logits. Delta_avg is the running average, per layer,
    of max(z) - min(z) over the tokens seen; the paper does not say whether the token being
    routed counts: here it does, so that the first one has an estimate. SpecMD defines Delta_avg as
    "the historical average logit value", without the range: `delta=mean` takes that literally.
    `delta=token` is BigMoeOnEdge's range bias (#171): "the range is the token's own", no average.
    If a router selects by more than its logits, z is rearranged to the router's ranking, so that a
    lambda near 0 gives the router's own choice. Cost: O(E log E) per token.

    Parameters: lambda, 0 to 1 (0.5, Table 2); top_j, experts always kept (1: the paper fixes
    J > 0 without a figure); logit_range, the calibrated Delta_avg of appendix C in logits, one
    for all layers or one each, instead of the running average.
    """

    name: ClassVar[str] = "cache_prior"
    source: ClassVar[str] = "Cache-conditional experts section 3.3, eq. 9-10; SpecMD eq. 1"

    lambda_: Lambda = 0.5
    top_j: AlwaysKept = 1
    delta: Literal["range", "mean", "token"] = "range"
    logit_range: Positive | list[float] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.only_with("logit_range", delta="range")
        given = 0.0 if self.logit_range is None else self.logit_range
        self._calibrated = (*per_layer("routing.logit_range", given, self.geometry.num_layers),)

    def cost(self) -> RankCost:
        strength, top_j, delta = self.lambda_, self.top_j, self.delta
        by_token, by_mean, fixed = delta == "token", delta == "mean", self.logit_range is not None
        calibrated = self._calibrated

        def cost(expert: Ranked, seen: Seen) -> tuple[float, float]:
            if not (expert.resident or expert.rank < top_j):
                return -expert.logit, 0.0
            average = seen.range
            if fixed:
                average = calibrated[seen.layer]
            elif by_mean:
                average = seen.means / seen.tokens
            elif not by_token:
                average = seen.ranges / seen.tokens
            # In the precision of the logits.
            return float(float32(-expert.logit - float32(strength * average))), 0.0

        return cost

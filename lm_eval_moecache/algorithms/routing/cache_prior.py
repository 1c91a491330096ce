"""Cache-prior: a fraction of the logit range is added to the logits of resident experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from numpy import float32

from lm_eval_moecache.algorithms.costs import RankCost, Ranked, Seen
from lm_eval_moecache.algorithms.routing.base import AlwaysKept, RoutingByCost
from lm_eval_moecache.records.ranges import Positive, Range

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

    source: ClassVar[str] = "Cache-conditional experts section 3.3, eq. 9-10; SpecMD eq. 1"

    lambda_: Lambda = 0.5
    top_j: AlwaysKept = 1
    delta: Literal["range", "mean", "token"] = "range"
    logit_range: Positive | list[float] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.logit_range is not None and self.delta != "range":
            raise ValueError(
                f"routing.logit_range has no effect with routing.delta={self.delta!r}."
            )
        self._calibrated = _per_layer(self.logit_range, self.geometry.num_layers) or (0.0,)

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


def _per_layer(value: float | list[float] | None, num_layers: int) -> tuple[float, ...]:
    values = value if isinstance(value, list) else [] if value is None else [value] * num_layers
    if value is not None and len(values) != num_layers:
        raise ValueError(
            f"routing.logit_range has {len(values)} values for {num_layers} MoE layers; allowed: "
            "one number, or one for each layer."
        )
    return tuple(values)

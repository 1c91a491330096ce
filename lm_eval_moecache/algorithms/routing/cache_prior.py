"""Cache-prior: a fraction of the logit range is added to the logits of resident experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np

from lm_eval_moecache.algorithms.routing.base import (
    AlwaysKept,
    RoutingOverRows,
    ranking,
    take_best,
    unless_same,
)
from lm_eval_moecache.records.arrays import FloatArray, each_token
from lm_eval_moecache.records.ranges import Positive, Range
from lm_eval_moecache.records.selection import Selection
from lm_eval_moecache.records.tokens import Tokens

Lambda = Annotated[float, Range(above=0, most=1, why="; 0 is routing=standard")]


@dataclass(eq=False, kw_only=True)
class CachePrior(RoutingOverRows):
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
    uses_logits: ClassVar[bool] = True
    num_kept: ClassVar[int] = 2  # the sum of what Delta_avg averages, and the number of tokens

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
        self._calibrated = _per_layer(self.logit_range, self.geometry.num_layers)

    def choose(self, tokens: Tokens) -> Selection | None:
        ranked = ranking(tokens)
        by_rank = np.sort(-tokens.logits, axis=-1)  # -z, and so the cost -z'
        boosted = tokens.resident[each_token(ranked), ranked]
        boosted[:, : self.top_j] = True
        cost = by_rank - self._prior(tokens, by_rank) * boosted
        return unless_same(tokens, take_best(ranked, cost, self.geometry.top_k))

    def _prior(self, tokens: Tokens, by_rank: FloatArray) -> FloatArray:
        """Return lambda * Delta_avg, these tokens included: one, or one each [tokens, 1]."""
        if self._calibrated:
            return np.array(self.lambda_ * self._calibrated[tokens.layer], np.float32)
        is_mean = self.delta == "mean"
        own = tokens.logits.mean(-1) if is_mean else by_rank[:, -1] - by_rank[:, 0]
        if self.delta == "token":
            prior = self.lambda_ * own.astype(np.float64)
            return np.asarray(prior, np.float32)[:, None]
        state, (_, per_row) = tokens.state, tokens.by_row
        state[:, 0] += np.add.reduce(own.reshape(tokens.by_row), axis=-1, dtype=np.float64)
        state[:, 1] += per_row
        average = self.lambda_ * (state[:, 0] / state[:, 1])
        return np.asarray(average, np.float32).repeat(per_row)[:, None]


def _per_layer(value: float | list[float] | None, num_layers: int) -> list[float]:
    values = value if isinstance(value, list) else [] if value is None else [value] * num_layers
    if value is not None and len(values) != num_layers:
        raise ValueError(
            f"routing.logit_range has {len(values)} values for {num_layers} MoE layers; allowed: "
            "one number, or one for each layer."
        )
    return values

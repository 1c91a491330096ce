"""Cache-prior: a fraction of the logit range is added to the logits of resident experts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np

from lm_eval_moecache.algorithms.routing.base import (
    AlwaysKept,
    RoutingAlgorithm,
    is_by_logits,
    ranking,
    take_best,
    unless_same,
)
from lm_eval_moecache.records.arrays import FloatArray, as_float32
from lm_eval_moecache.records.event import Event, resident_mask
from lm_eval_moecache.records.ranges import Positive, Range
from lm_eval_moecache.records.selection import Selection

Lambda = Annotated[float, Range(above=0, most=1, why="; 0 is routing=standard")]


@dataclass(eq=False, kw_only=True)
class CachePrior(RoutingAlgorithm):
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

    lambda_: Lambda = 0.5
    top_j: AlwaysKept = 1
    delta: Literal["range", "mean", "token"] = "range"
    logit_range: Positive | list[float] | None = None

    def __post_init__(self) -> None:
        if self.logit_range is not None and self.delta != "range":
            raise ValueError(
                f"routing.logit_range has no effect with routing.delta={self.delta!r}."
            )
        layers = self.geometry.num_layers
        self._calibrated = _per_layer(self.logit_range, layers)
        self._sum, self._count = [0.0] * layers, [0] * layers

    def select(self, event: Event, resident: Collection[int]) -> Selection | None:
        if event.num_tokens == 1 and self.delta != "mean":  # which may be negative
            asked, logits = event.experts.tolist()[0], event.logits.tolist()[0]
            if is_by_logits(asked, logits):
                prior = self._prior(event.layer, event.logits, logits)
                found = self._of_one(event.layer, asked, logits, resident, prior)
                return Selection(np.array([found])) if found != asked else None
        prior = self._prior(event.layer, event.logits)
        ranked = ranking(event)
        by_rank = -np.sort(-event.logits, axis=-1)
        boosted = resident_mask(event.layer, self.geometry.num_experts, resident)[ranked]
        boosted[:, : self.top_j] = True
        modified = by_rank + np.asarray(prior, dtype=np.float32) * boosted
        return unless_same(event, take_best(ranked, -modified, self.geometry.top_k))

    def _of_one(
        self,
        layer: int,
        asked: Sequence[int],
        logits: Sequence[float],
        resident: Collection[int],
        prior: float,
    ) -> list[int]:
        """Return the selection for one token, as `select` would, without ranking all experts.

        An expert that the router did not choose has to be raised, and beats none that is raised
        too: the best of these experts replace the worst that are not.
        """
        base, found = layer * self.geometry.num_experts, list(asked)
        keys = range(base, base + len(logits))
        held = {key - base for key in resident if key in keys}
        unraised = [expert for expert in asked[self.top_j :] if expert not in held]
        others = sorted(held.difference(asked))
        others.sort(key=logits.__getitem__, reverse=True)
        [prior] = as_float32([prior])
        modified = as_float32([logits[expert] + prior for expert in others])
        for other, raised, worst in zip(others, modified, reversed(unraised), strict=False):
            if raised <= logits[worst]:
                break
            found.remove(worst)
            found.append(other)
        return found

    def _prior(self, layer: int, logits: FloatArray, of_one: Sequence[float] | None = None) -> Any:
        """Return lambda * Delta_avg, these tokens included; `of_one` holds a single token's logits.

        With `delta=token` and several tokens, one value per token: [tokens, 1].
        """
        if self.delta == "token":
            if of_one is not None:
                return self.lambda_ * as_float32([max(of_one) - min(of_one)])[0]
            return self.lambda_ * np.ptp(logits, axis=-1, keepdims=True)
        if self._calibrated:
            return self.lambda_ * self._calibrated[layer]
        if self.delta == "mean":
            total = float(logits.mean(-1).sum(dtype=np.float64))
        elif of_one is not None:
            total = as_float32([max(of_one) - min(of_one)])[0]
        else:
            total = float((logits.max(-1) - logits.min(-1)).sum(dtype=np.float64))
        self._sum[layer] += total
        self._count[layer] += len(logits)
        return self.lambda_ * (self._sum[layer] / self._count[layer])


def _per_layer(value: float | list[float] | None, num_layers: int) -> list[float]:
    values = value if isinstance(value, list) else [] if value is None else [value] * num_layers
    if value is not None and len(values) != num_layers:
        raise ValueError(
            f"routing.logit_range has {len(values)} values for {num_layers} MoE layers; allowed: "
            "one number, or one for each layer."
        )
    return values

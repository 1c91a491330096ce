"""Hazard: the expert with the longest expected wait leaves first, or LRU's if that fails."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lm_eval_moecache.algorithms.features import Expert, Layer, Now
from lm_eval_moecache.algorithms.ranked import RankedEviction
from lm_eval_moecache.records.ranges import Count, ZeroOrMore

_PRIOR = 0.02
"""Hazard of an expert that was never needed: no wait is forecast beyond fifty turns."""


@dataclass(eq=False, kw_only=True)
class Hazard(RankedEviction):
    """Evicts the expert with the longest expected wait, and falls back to LRU while that is wrong.

    An expert's hazard p is the probability that its layer's next turn needs it: the mean of three
    decayed use rates (0.6, 0.9, 0.98 per turn), a prefill counting token by token. Its wait is
    1 / (p + 0.02) turns plus `nearness` x the share of a cycle until its layer's turn. An expert
    predicted for its layer's next turn has no such wait; the layer's others then wait one turn
    longer. No weights, no training, no parameters of the model.

    Each eviction on which LRU disagrees is a duel, lost by the rule whose victim is needed first.
    While LRU leads the last duels (an exponential window of `memory`) by more than 5, LRU chooses.

    Parameters: nearness, turns that a whole cycle counts as (default 2); memory, duels (200).
    Cost: O(experts of a layer) per event, O(layers + residents of a layer) per victim;
    `results/real_routing` has the microseconds.
    """

    source: ClassVar[str] = "ours; the decayed rates after ds4#636, the bound in moe-cache-eval"
    forecasts: ClassVar[bool] = True

    nearness: ZeroOrMore = 2.0
    memory: Count = 200

    @staticmethod
    def rank(expert: Expert, home: Layer, now: Now) -> tuple[float, float]:
        wait = 1 / (expert.rate + _PRIOR) + home.predicted
        if expert.predicted:
            wait = 0.0
        turns = (home.index - now.layer - 1) % now.num_layers + 1
        return -(wait + now.parameter * turns / now.num_layers), 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.parameter, self.keep = float(self.nearness), 1 - 1 / self.memory

"""Rules that leave absent experts out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from lm_eval_moecache.algorithms.miss.base import MissOverRows, keep_one, unless_all, weight_shares
from lm_eval_moecache.records.arrays import each_token
from lm_eval_moecache.records.event import DROPPED, PREFILL, Event
from lm_eval_moecache.records.ranges import Count, Range, Share
from lm_eval_moecache.records.selection import Selection

FewerExperts = Annotated[
    int, Range(least=0, below="top_k", why=": with none to drop it is miss=fetch")
]


@dataclass(eq=False, kw_only=True)
class Drop(MissOverRows):
    """Fetches a token's absent expert if it is among the h heaviest, and drops it otherwise.

    SpecMD section 3.1.2: models are "resilient beyond rank 2", so it drops "only low-rank experts
    and always fetch[es] high-rank ones" after Skliar et al.: their pruning of ranks >= h, limited
    to absent experts (ranks from 0, so h are safe). A dropped expert's weight is lost, as
    renormalising is not mentioned; `renormalize` shares it among the kept ones.
    Cost: O(1) per token and expert.

    Parameters: h, experts that are never dropped, 0 to top_k - 1 (2).
    """

    name: ClassVar[str] = "drop"
    source: ClassVar[str] = "SpecMD section 3.1.2 (drop)"

    h: FewerExperts = 2
    renormalize: bool = False

    def choose(self, event: Event) -> Selection | None:
        light = np.arange(self.geometry.top_k) >= self.h
        return unless_all(event, ~(event.is_missing & light), self.renormalize)


@dataclass(eq=False, kw_only=True)
class DropCold(MissOverRows):
    """Drops an absent expert if its share of the token's weight is below F / top_k.

    BigMoeOnEdge#94, whose replay of Qwen3-30B-A3B avoids 66% of the misses for 9.5% of the weight
    at F = 1, and 37% for 4.4% at 0.75. The heaviest expert has at least an even share, so one is
    always executed. The kept ones share the dropped weight (`drop_renorm`, on by default there).
    Cost: O(k) per token.

    Parameters: factor, F, above 0 and at most 1 (1.0); renormalize, whether the kept experts share
    the dropped weight (true).
    """

    name: ClassVar[str] = "drop_cold"
    source: ClassVar[str] = "BigMoeOnEdge#94 (drop cold)"
    uses_weights: ClassVar[bool] = True

    factor: Share = 1.0
    renormalize: bool = True

    def choose(self, event: Event) -> Selection | None:
        cold = weight_shares(event.experts, event.weights) < self.factor / self.geometry.top_k
        return unless_all(event, ~(event.is_missing & cold), self.renormalize)


@dataclass(eq=False, kw_only=True)
class DegradeZero(MissOverRows):
    """While decoding, drops absent experts whose share of the token's weight is below tau.

    colibri#906: each token keeps at least one expert, the heaviest if all would go, and the kept
    ones are renormalised. Prefills load everything. Cost: O(k) per token.

    Parameters: tau, share of the token's weight, above 0 and at most 1 (0.1: the source leaves it
    to the user).
    """

    name: ClassVar[str] = "degrade_zero"
    source: ClassVar[str] = "colibri#906 (degrade to zero)"
    uses_weights: ClassVar[bool] = True
    only_decodes: ClassVar[bool] = True

    tau: Share = 0.1

    def choose(self, event: Event) -> Selection | None:
        if event.phase == PREFILL:
            return None
        shares = weight_shares(event.experts, event.weights)
        keep = ~(event.is_missing & (shares < self.tau))
        keep_one(keep, shares)
        return unless_all(event, keep, renormalize=True)


@dataclass(eq=False, kw_only=True)
class ExpertBudget(MissOverRows):
    """Keeps an event's hits and, up to a budget of distinct experts, its heaviest misses.

    MoE-Spec (arXiv 2602.16052) and colibri#254 bound the union of experts that a verify pass of
    several drafts needs. Hits are kept even above the budget; misses are ranked by their weight
    summed over the event's tokens, ties by key, and those beyond it are dropped for all tokens. A
    token may thus lose all its experts, unless `rescue` keeps its heaviest one even beyond the
    budget (colibri#565, after such a token had corrupted the following ones); `renormalize` gives
    the lost weight to the kept ones, as there.
    Prompts need most experts of a layer: `phases=decode` exempts them.
    Cost: O(tokens x k) per event.

    Parameters: budget, distinct experts per layer (twice the router's top_k); renormalize (false);
    rescue (false).
    """

    name: ClassVar[str] = "expert_budget"
    source: ClassVar[str] = "MoE-Spec (arXiv 2602.16052); colibri#254, #565"
    uses_weights: ClassVar[bool] = True

    budget: Count | None = None
    renormalize: bool = False
    rescue: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._budget = 2 * self.geometry.top_k if self.budget is None else self.budget

    def choose(self, event: Event) -> Selection | None:
        rows, num_experts = len(event.passes), self.geometry.num_experts
        live, shares = event.experts != DROPPED, weight_shares(event.experts, event.weights)
        places = (event.rows[:, None] * num_experts + event.experts)[live]
        summed = np.bincount(places, shares[live], rows * num_experts).reshape(rows, -1)
        needed = np.bincount(places, minlength=rows * num_experts).reshape(rows, -1) > 0
        missed = needed & event.absent
        room = np.maximum(self._budget - (needed & ~missed).sum(axis=-1), 0)
        ranked = np.where(missed, -summed, np.inf).argsort(axis=-1, kind="stable")
        left_out = missed.copy()
        left_out[each_token(ranked), ranked] &= np.arange(num_experts) >= room[:, None]
        keep = ~(left_out[event.rows[:, None], event.experts] & live)
        if self.rescue:
            keep_one(keep, shares)
        return unless_all(event, keep, self.renormalize)

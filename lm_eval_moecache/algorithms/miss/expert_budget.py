"""Expert budget: a layer executes a limited number of distinct experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lm_eval_moecache.algorithms.miss.base import (
    MissOverRows,
    keep_one,
    unless_all,
    weight_shares,
)
from lm_eval_moecache.records.arrays import each_token
from lm_eval_moecache.records.event import DROPPED
from lm_eval_moecache.records.ranges import Count
from lm_eval_moecache.records.selection import Selection
from lm_eval_moecache.records.tokens import Tokens


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

    source: ClassVar[str] = "MoE-Spec (arXiv 2602.16052); colibri#254, #565"
    uses_weights: ClassVar[bool] = True

    budget: Count | None = None
    renormalize: bool = False
    rescue: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._budget = 2 * self.geometry.top_k if self.budget is None else self.budget

    def choose(self, tokens: Tokens) -> Selection | None:
        (rows, per_row), num_experts = tokens.by_row, self.geometry.num_experts
        live, shares = tokens.experts != DROPPED, weight_shares(tokens)
        places = (tokens.rows[:, None] * num_experts + tokens.experts)[live]
        summed = np.bincount(places, shares[live], rows * num_experts).reshape(rows, -1)
        needed = np.bincount(places, minlength=rows * num_experts).reshape(rows, -1) > 0
        missed = needed & tokens.absent[::per_row]
        room = np.maximum(self._budget - (needed & ~missed).sum(axis=-1), 0)
        ranked = np.where(missed, -summed, np.inf).argsort(axis=-1, kind="stable")
        left_out = missed.copy()
        left_out[each_token(ranked), ranked] &= np.arange(num_experts) >= room[:, None]
        keep = ~(left_out[tokens.rows[:, None], tokens.experts] & live)
        if self.rescue:
            keep_one(keep, shares)
        return unless_all(tokens, keep, self.renormalize)

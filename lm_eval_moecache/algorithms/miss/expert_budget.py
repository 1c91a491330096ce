"""Expert budget: a layer executes a limited number of distinct experts."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lm_eval_moecache.algorithms.miss.base import (
    MissAlgorithm,
    Resolution,
    keep_one,
    still_needed,
    weight_shares,
)
from lm_eval_moecache.records.event import DROPPED, Event
from lm_eval_moecache.records.ranges import Count
from lm_eval_moecache.records.selection import Selection


@dataclass(eq=False, kw_only=True)
class ExpertBudget(MissAlgorithm):
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

    def resolve(
        self, event: Event, absent: Sequence[int], resident: Container[int]
    ) -> Resolution | None:
        room = max(0, self._budget - (len(event.keys) - len(absent)))
        if len(absent) <= room:
            return None
        num_experts = self.geometry.num_experts
        live = event.experts != DROPPED
        shares = weight_shares(event)
        summed = np.bincount(event.experts[live], weights=shares[live], minlength=num_experts)
        ranked = sorted(absent, key=lambda key: (-summed[key % num_experts], key))
        left_out = [key % num_experts for key in ranked[room:]]
        keep = ~np.isin(event.experts, left_out)
        if self.rescue:
            keep_one(keep, shares)
        fetch = still_needed(event, absent, event.experts, keep, num_experts)
        return Resolution(fetch, Selection(event.experts, keep, self.renormalize))

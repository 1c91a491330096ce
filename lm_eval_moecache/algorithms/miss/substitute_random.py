"""Substitute-random: an absent expert is replaced by any resident one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from lm_eval_moecache.algorithms.miss.base import Budget, MissOverRows, substituted
from lm_eval_moecache.records.arrays import DoubleArray, IntArray
from lm_eval_moecache.records.selection import Selection
from lm_eval_moecache.records.tokens import Tokens


@dataclass(eq=False, kw_only=True)
class SubstituteRandom(MissOverRows):
    """Replaces an absent expert by a random resident one that the token does not use already.

    The "random replacement" baseline of BuddyMoE, section 5.1 and Tables 2 to 4: "uniformly
    selected GPU-resident experts", read as those of the layer, without a budget. If none is left,
    `fallback=fetch` loads the expert and `drop` drops it. With a budget rho it is the control that
    separates the effect of the budget from that of the buddies. The substitute is weighted by its
    own score; `weight=missing` gives it the missing expert's, as replacing indices does (the
    composition `buddy_random`). Draws depend only on the seed, the pass and the layer.
    Cost: O(E) per absent expert of a token.

    Parameters: rho, replacements per token and layer, heaviest first (no limit), the rest is
    loaded; late, whether an expert with a prefetch under way is replaced as well or awaited.
    """

    source: ClassVar[str] = "BuddyMoE Tables 2-4 (random)"
    draws: ClassVar[bool] = True

    rho: Budget | None = None
    fallback: Literal["fetch", "drop"] = "fetch"
    weight: Literal["own", "missing"] = "own"
    late: Literal["replace", "await"] = "replace"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.awaits_late = self.late == "await"
        self._budget = self.geometry.top_k if self.rho is None else self.rho

    def choose(self, tokens: Tokens) -> Selection | None:
        seeds = [(self.seed, index, tokens.layer) for index in tokens.passes]
        draws = [np.random.default_rng(seed) for seed in seeds]
        rows, num_experts = tokens.rows, self.geometry.num_experts

        def cost(places: IntArray, missing: IntArray) -> DoubleArray:
            own = [draws[row].random(num_experts) for row in rows[places].tolist()]
            return np.array(own).reshape(-1, num_experts)

        budget = np.full(len(rows), self._budget)
        return substituted(tokens, cost, fallback=self.fallback, weight=self.weight, budget=budget)

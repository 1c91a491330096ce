"""Substitute-random: an absent expert is replaced by any resident one."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt

from lm_eval_moecache.algorithms.miss.base import (
    Budget,
    MissAlgorithm,
    Resolution,
    resolve_substitution,
)
from lm_eval_moecache.records.arrays import IntArray
from lm_eval_moecache.records.event import Event


@dataclass(eq=False, kw_only=True)
class SubstituteRandom(MissAlgorithm):
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

    def resolve(
        self, event: Event, absent: Sequence[int], resident: Container[int]
    ) -> Resolution | None:
        num_experts = self.geometry.num_experts
        rng = np.random.default_rng((self.seed, event.pass_index, event.layer))

        def cost(tokens: IntArray, missing: IntArray) -> npt.NDArray[np.float64]:
            return rng.random((len(tokens), num_experts))

        return resolve_substitution(
            event,
            absent,
            resident,
            self.geometry,
            cost,
            fallback=self.fallback,
            weight=self.weight,
            budget=np.full(event.num_tokens, self._budget),
        )

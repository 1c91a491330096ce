"""Rules that replace an absent expert by a resident one."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import ClassVar, Literal

import numpy as np

from lm_eval_moecache.algorithms.miss.base import Budget, SubstitutingMiss
from lm_eval_moecache.algorithms.substitution import Missing, Substitute, SubstituteCost
from lm_eval_moecache.records.event import Event
from lm_eval_moecache.records.ranges import Share
from lm_eval_moecache.records.selection import Selection


@dataclass(eq=False, kw_only=True)
class SubstituteScore(SubstitutingMiss):
    """Replaces an absent expert by the resident one whose softmax score for the token is closest.

    SpecMD sections 2 and 3.1.2 after Zhu et al. 2025: cached experts "whose scores fall within
    tolerance thresholds". Neither gives a value nor says what happens beyond the tolerance:
    `fallback=fetch` loads the expert, `drop` drops it. `scale=absolute` compares the scores
    themselves, `relative` the gap as a share of the missing expert's score. The substitute is
    weighted by its own score (SpecMD appendix A.1); `weight=missing` gives it the missing one's.
    Cost: O(E) per absent expert of a token.

    Parameters: tolerance, in softmax score (0.1) or as a share of it; late, whether an expert with
    a prefetch under way is replaced as well or awaited.
    """

    name: ClassVar[str] = "substitute_score"
    source: ClassVar[str] = "SpecMD section 3.1.2 (substitution); Zhu et al. 2025"
    uses_scores: ClassVar[bool] = True

    tolerance: Share = 0.1
    scale: Literal["absolute", "relative"] = "absolute"
    fallback: Literal["fetch", "drop"] = "fetch"
    weight: Literal["own", "missing"] = "own"
    late: Literal["replace", "await"] = "replace"

    def cost(self) -> SubstituteCost:
        tolerance, is_relative = self.tolerance, self.scale == "relative"

        def cost(missing: Missing, other: Substitute) -> tuple[float, float]:
            gap = abs(other.score - missing.score)
            allowed = tolerance * missing.score if is_relative else tolerance
            return (gap if gap <= allowed else inf), 0.0

        return cost


@dataclass(eq=False, kw_only=True)
class SubstituteCached(SubstitutingMiss):
    """Replaces an absent expert with a share below tau by the resident one with the highest gate.

    colibri#865; heavier absent experts are loaded. Residents that the token already has are not
    candidates. The source does not say which weight applies: `weight=own` is the substitute's gate
    score, `missing` the replaced expert's. Cost: O(E) per absent expert of a token.

    Parameters: tau, share of the token's weight, above 0 and at most 1 (0.1); weight.
    """

    name: ClassVar[str] = "substitute_cached"
    source: ClassVar[str] = "colibri#865 (cached substitution)"
    uses_scores: ClassVar[bool] = True
    uses_shares: ClassVar[bool] = True

    tau: Share = 0.1
    weight: Literal["own", "missing"] = "own"

    def cost(self) -> SubstituteCost:
        tau = self.tau

        def cost(missing: Missing, other: Substitute) -> tuple[float, float]:
            return (-other.score if missing.share < tau else inf), 0.0

        return cost


@dataclass(eq=False, kw_only=True)
class SubstituteRandom(SubstitutingMiss):
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

    name: ClassVar[str] = "substitute_random"
    source: ClassVar[str] = "BuddyMoE Tables 2-4 (random)"
    draws: ClassVar[bool] = True

    rho: Budget | None = None
    fallback: Literal["fetch", "drop"] = "fetch"
    weight: Literal["own", "missing"] = "own"
    late: Literal["replace", "await"] = "replace"

    def cost(self) -> SubstituteCost:
        return _draw

    def choose(self, event: Event) -> Selection | None:
        missing = event.is_missing
        within = missing & (missing.cumsum(axis=-1) <= self.budget(event)[:, None])
        columns, tokens = within.T.nonzero()
        draws = np.zeros((*missing.shape, self.geometry.num_experts))
        draws[tokens, columns] = self.drawn(event, event.rows[tokens])
        self.loop.give(draws=draws)
        return super().choose(event)


def _draw(missing: Missing, other: Substitute) -> tuple[float, float]:
    return other.given, 0.0

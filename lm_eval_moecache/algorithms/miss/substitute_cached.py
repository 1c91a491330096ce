"""Cached substitution: a light absent expert is replaced by the resident one with the best gate."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import ClassVar, Literal

from lm_eval_moecache.algorithms.costs import Missing, Substitute, SubstituteCost
from lm_eval_moecache.algorithms.miss.base import SubstitutingMiss
from lm_eval_moecache.records.ranges import Share


@dataclass(eq=False, kw_only=True)
class SubstituteCached(SubstitutingMiss):
    """Replaces an absent expert with a share below tau by the resident one with the highest gate.

    colibri#865; heavier absent experts are loaded. Residents that the token already has are not
    candidates. The source does not say which weight applies: `weight=own` is the substitute's gate
    score, `missing` the replaced expert's. Cost: O(E) per absent expert of a token.

    Parameters: tau, share of the token's weight, above 0 and at most 1 (0.1); weight.
    """

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

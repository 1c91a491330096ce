"""Substitute-score: an absent expert is replaced by a resident one with a similar gate score."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import ClassVar, Literal

from lm_eval_moecache.algorithms.costs import Missing, Substitute, SubstituteCost
from lm_eval_moecache.algorithms.miss.base import SubstitutingMiss
from lm_eval_moecache.records.ranges import Share


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

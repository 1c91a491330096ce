"""Substitute-score: an absent expert is replaced by a resident one with a similar gate score."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from lm_eval_moecache.algorithms.miss.base import MissOverRows, substituted
from lm_eval_moecache.records.arrays import FloatArray, IntArray, softmax
from lm_eval_moecache.records.ranges import Share
from lm_eval_moecache.records.selection import Selection
from lm_eval_moecache.records.tokens import Tokens


@dataclass(eq=False, kw_only=True)
class SubstituteScore(MissOverRows):
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
    uses_logits: ClassVar[bool] = True

    tolerance: Share = 0.1
    scale: Literal["absolute", "relative"] = "absolute"
    fallback: Literal["fetch", "drop"] = "fetch"
    weight: Literal["own", "missing"] = "own"
    late: Literal["replace", "await"] = "replace"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.awaits_late = self.late == "await"

    def choose(self, tokens: Tokens) -> Selection | None:
        scores = softmax(tokens.logits)

        def cost(places: IntArray, missing: IntArray) -> FloatArray:
            own = scores[places, missing][:, None]
            gap = np.abs(scores[places] - own)
            allowed = self.tolerance * (own if self.scale == "relative" else 1.0)
            return np.asarray(np.where(gap <= allowed, gap, np.inf), dtype=np.float32)

        return substituted(tokens, cost, fallback=self.fallback, weight=self.weight)

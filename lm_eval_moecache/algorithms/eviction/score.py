"""Score-based: the experts with the lowest gate scores leave first."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from lm_eval_moecache.algorithms.features import Expert, Layer, Now
from lm_eval_moecache.algorithms.ranked import RankedEviction
from lm_eval_moecache.records.ranges import ProperShare


def lowest_sum(expert: Expert, home: Layer, now: Now) -> tuple[float, float]:
    return (expert.weight if expert.served_tokens else -math.inf), 0.0


def lowest_mean(expert: Expert, home: Layer, now: Now) -> tuple[float, float]:
    tokens = expert.served_tokens
    return (expert.weight / tokens if tokens else -math.inf), 0.0


@dataclass(eq=False, kw_only=True)
class Score(RankedEviction):
    """Evicts the expert with the lowest accumulated gate score.

    SpecMD appendix B after Zhu et al. 2025: "a running history of gate scores for each expert".
    Each use adds the routing weights of the tokens served; the history survives eviction. Readings
    of it differ: `history=sum` ("accumulated", section 2), `mean` per token served, or `decayed`, a
    sum in which each pass counts `decay` times the next one. An expert never used has the lowest
    score; ties go to the smaller key.
    Cost: O(layers + residents of a layer) per victim, O(1) per use.

    Parameters: decay, per pass, between 0 and 1, only for `decayed` (default 0.9 there).
    """

    source: ClassVar[str] = "SpecMD appendix B (score-based); Zhu et al. 2025"
    uses_weights: ClassVar[bool] = True
    moves: ClassVar[bool] = False

    history: Literal["sum", "mean", "decayed"] = "sum"
    decay: ProperShare | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.decay is not None and self.history != "decayed":
            raise ValueError(
                f"eviction.decay={self.decay} has no effect with eviction.history={self.history!r}:"
                " it needs history=decayed."
            )
        self.rank = lowest_mean if self.history == "mean" else lowest_sum
        if self.history == "decayed":
            self.growth = -math.log(0.9 if self.decay is None else self.decay)

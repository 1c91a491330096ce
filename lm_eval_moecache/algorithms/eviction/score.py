"""Score-based: the experts with the lowest gate scores leave first."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

from lm_eval_moecache.algorithms.features import Expert, Layer, Now
from lm_eval_moecache.algorithms.ranked import RankedEviction
from lm_eval_moecache.records.geometry import Geometry


def lowest_sum(expert: Expert, home: Layer, now: Now) -> tuple[float, float]:
    return (expert.weight if expert.served_tokens else -math.inf), 0.0


def lowest_mean(expert: Expert, home: Layer, now: Now) -> tuple[float, float]:
    tokens = expert.served_tokens
    return (expert.weight / tokens if tokens else -math.inf), 0.0


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

    def __init__(
        self,
        geometry: Geometry,
        *,
        seed: int = 0,
        history: Literal["sum", "mean", "decayed"] = "sum",
        decay: float | None = None,
    ) -> None:
        super().__init__(geometry, seed=seed)
        if decay is not None and history != "decayed":
            raise ValueError(
                f"eviction.decay={decay} has no effect with eviction.history={history!r}: it goes "
                "with history=decayed."
            )
        if decay is not None and not 0 < decay < 1:
            raise ValueError(f"eviction.decay={decay} must lie between 0 and 1.")
        self.rank = lowest_mean if history == "mean" else lowest_sum
        if history == "decayed":
            self.growth = -math.log(0.9 if decay is None else decay)

"""Fetch-priority: a token's heavy experts are loaded at the best precision, light ones lower."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lm_eval_moecache.algorithms.miss.base import LadderMiss
from lm_eval_moecache.records.arrays import FloatArray, IntArray


@dataclass(eq=False, kw_only=True)
class FetchPriority(LadderMiss):
    """Loads absent experts at lower levels the lower they rank for their token.

    SpecMD section 5.4: it "selectively degrades low-importance experts (bottom 60th percentile)
    during cache misses". Read as the ranks of one token: the experts below the 60th percentile of
    its top-k weights, the last ceil(0.6 (k - 1)) of them, so never the heaviest; `h` sets the
    number of heavy ones instead. The light ones are spread over the lower levels in order of rank
    ("fallback levels, int8, int4, int2", section 3.1.2). A prefetched expert gets the level of its
    rank in the predicted gate or, without a prediction, among the proposals; beyond the predicted
    top-k it gets the lowest level, as it ranks no better than a miss that is degraded. Section
    3.1.2's other wording, "always fetches highest precision" with lower ones "under capacity
    constraints", gives no constraint and is not followed. With `upgrade` a heavy expert that is
    resident at a lower level is loaded again; otherwise it is used at that level.
    Cost: O(1) per token and expert.

    Parameters: percentile, above 0 and at most 100 (60); h, from 1 to top_k - 1 (none).
    """

    source: ClassVar[str] = "SpecMD sections 3.1.2 and 5.4 (fetch-priority)"

    percentile: float = 60.0
    h: int | None = None
    upgrade: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        percentile, h = self.percentile, self.h
        if h is not None and percentile != 60.0:
            raise ValueError(f"miss.percentile={percentile} has no effect with miss.h={h}.")
        top_k, light = self.geometry.top_k, 0
        if 0 < percentile <= 100:
            light = math.ceil(percentile / 100 * (top_k - 1)) if h is None else top_k - h
        if not 0 < light < top_k:
            raise ValueError(
                f"miss.percentile={percentile}, miss.h={h}: of the router's top_k={top_k} experts "
                "one at least must be heavy and one light. Allowed: a percentile above 0 and at "
                f"most 100, or h from 1 to {top_k - 1}."
            )
        lower = len(self.geometry.precision) - 1
        shared = [1 + rank * lower // light for rank in range(light)]
        self._level_of_rank = np.array([0] * (top_k - light) + shared)

    def levels(self, experts: IntArray, weights: FloatArray) -> IntArray:
        return np.broadcast_to(self._level_of_rank, experts.shape)

    def unpredicted(self, count: int) -> Sequence[int]:
        beyond = [len(self.geometry.precision) - 1] * count
        return [*self._level_of_rank.tolist(), *beyond][:count]

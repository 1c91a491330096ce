"""Rules that load absent experts at lower levels of precision."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lm_eval_moecache.algorithms.miss.base import (
    LadderMiss,
    MissOverRows,
    unless_all,
    weight_before,
)
from lm_eval_moecache.records.arrays import FloatArray, IntArray
from lm_eval_moecache.records.event import DROPPED, Event
from lm_eval_moecache.records.selection import Selection


class FetchLowest(MissOverRows):
    """Loads every absent expert at the lowest level of the ladder.

    SpecMD section 3.1.2: it "fetches the lowest available precision to minimize latency". This
    refers to misses: prefetches, which cause no stall, are loaded at the best level, so that a
    ladder of two (int8:int4) uses both. A resident expert is used at whatever level it has.
    """

    name: ClassVar[str] = "fetch_lowest"
    source: ClassVar[str] = "SpecMD section 3.1.2 (fetch-lowest-bit)"
    uses_ladder: ClassVar[bool] = True

    def choose(self, event: Event) -> Selection | None:
        return None

    def levels(self, experts: IntArray, weights: FloatArray) -> IntArray:
        return np.full(experts.shape, len(self.geometry.precision) - 1)


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

    Parameters: percentile, from 1 to 100 (60); h, from 1 to top_k - 1 (none).
    """

    name: ClassVar[str] = "fetch_priority"
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
        if 1 <= percentile <= 100:
            light = math.ceil(percentile / 100 * (top_k - 1)) if h is None else top_k - h
        if not 0 < light < top_k:
            raise ValueError(
                f"miss.percentile={percentile}, miss.h={h}: of the router's top_k={top_k} experts "
                "one at least must be heavy and one light. Allowed: a percentile from 1 to 100 "
                f"(60 for the 60th, not 0.6), or h from 1 to {top_k - 1}."
            )
        lower = len(self.geometry.precision) - 1
        shared = [1 + rank * lower // light for rank in range(light)]
        self._level_of_rank = np.array([0] * (top_k - light) + shared)

    def levels(self, experts: IntArray, weights: FloatArray) -> IntArray:
        return np.broadcast_to(self._level_of_rank, experts.shape)

    def unpredicted(self, count: int) -> Sequence[int]:
        beyond = [len(self.geometry.precision) - 1] * count
        return [*self._level_of_rank.tolist(), *beyond][:count]


@dataclass(eq=False, kw_only=True)
class Cascade(LadderMiss):
    """Loads an absent expert at a lower level the more of its token's weight is on heavier ones.

    HOBBIT (Tang et al. 2024), as in SpecMD sections 2 and 3.1.2: "dynamically loading
    lower-precision versions ... based on gating score thresholds". An expert's unimportance is
    the share of the top-k weight on heavier experts, 0 for the heaviest. Up to t1 it is loaded at
    the best level, above t2 at the lowest; with more than three levels the others share the range
    in between. The papers give no thresholds: 0.6 and 0.9 are HOBBIT's for Mixtral.
    A prefetched expert gets the level that the predicted gate gives it, or the best without a
    prediction. With `upgrade` an important expert that is resident at a lower level is loaded
    again. Cost: O(k) per token.

    Parameters: t1 (0.6) and t2 (0.9; none with two levels), shares of a token's weight.
    """

    name: ClassVar[str] = "cascade"
    source: ClassVar[str] = "SpecMD sections 2 and 3.1.2 (precision cascade); HOBBIT"
    uses_logits: ClassVar[bool] = True

    t1: float = 0.6
    t2: float | None = None
    upgrade: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        precision, t1, t2 = self.geometry.precision, self.t1, self.t2
        steps = len(precision) - 1
        if steps == 1 and t2 is not None:
            raise ValueError(
                f"miss.t2={t2} has no effect with the two levels of precision="
                f"{':'.join(precision)!r}. Allowed with it: three levels or more."
            )
        last = max(t1, 0.9) if t2 is None else t2
        if not 0 < t1 <= last < 1:
            raise ValueError(f"miss.t1={t1}, miss.t2={last}: allowed is 0 < t1 <= t2 < 1.")
        if steps > 1 and t1 == last:
            raise ValueError(
                f"miss.t1={t1}, miss.t2={last}: with precision={':'.join(precision)!r} "
                "the levels in between would never be chosen. Allowed: t1 below t2."
            )
        self._bounds = np.linspace(t1, last, steps, dtype=np.float32)

    def levels(self, experts: IntArray, weights: FloatArray) -> IntArray:
        return np.searchsorted(self._bounds, weight_before(weights, experts != DROPPED))


@dataclass(eq=False, kw_only=True)
class DropCascade(LadderMiss):
    """Loads absent experts at lower levels the more weight is on heavier ones; drops the last.

    "Drop Priority Cascade" of SpecMD section 5.4, which it does not describe; HOBBIT, whose
    unimportance (see `cascade`) and thresholds these are, "decides whether to fully load, skip, or
    use lower-bitwidth versions" (cache-conditional experts, section 5). Up to t1 an expert is
    loaded at the best level, above t2 it is dropped, and the lower levels share the range in
    between. A dropped expert's weight is lost; `renormalize` shares it among the kept ones.
    Prefetches get the levels of `cascade`; none is dropped. Cost: O(k) per token.

    Parameters: t1 (0.6) and t2 (0.9), shares of a token's weight.
    """

    name: ClassVar[str] = "drop_cascade"
    source: ClassVar[str] = "SpecMD section 5.4 (drop priority cascade); HOBBIT"
    uses_logits: ClassVar[bool] = True

    t1: float = 0.6
    t2: float = 0.9
    renormalize: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.t1 < self.t2 < 1:
            raise ValueError(f"miss.t1={self.t1}, miss.t2={self.t2}: allowed is 0 < t1 < t2 < 1.")
        self._num_levels = len(self.geometry.precision)
        self._bounds = np.linspace(self.t1, self.t2, self._num_levels, dtype=np.float32)

    def choose(self, event: Event) -> Selection | None:
        is_beyond = self.levels(event.experts, event.weights) == self._num_levels
        return unless_all(event, ~(event.is_missing & is_beyond), self.renormalize)

    def levels(self, experts: IntArray, weights: FloatArray) -> IntArray:
        return np.searchsorted(self._bounds, weight_before(weights, experts != DROPPED))

"""Cascade: an absent expert's precision falls as its unimportance passes thresholds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lm_eval_moecache.algorithms.miss.base import LadderMiss, weight_before
from lm_eval_moecache.records.arrays import FloatArray, IntArray
from lm_eval_moecache.records.event import DROPPED


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

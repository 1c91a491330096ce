"""Drop-cascade: an absent expert's precision falls with its importance; the last are dropped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lm_eval_moecache.algorithms.miss.base import LadderMiss, unless_all, weight_before
from lm_eval_moecache.records.arrays import FloatArray, IntArray
from lm_eval_moecache.records.event import DROPPED
from lm_eval_moecache.records.selection import Selection
from lm_eval_moecache.records.tokens import Tokens


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

    def choose(self, tokens: Tokens) -> Selection | None:
        is_beyond = self.levels(tokens.experts, tokens.weights) == self._num_levels
        return unless_all(tokens, ~(tokens.is_missing & is_beyond), self.renormalize)

    def levels(self, experts: IntArray, weights: FloatArray) -> IntArray:
        return np.searchsorted(self._bounds, weight_before(weights, experts != DROPPED))

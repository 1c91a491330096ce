"""Fetch-lowest: absent experts are loaded at the lowest stored precision."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from lm_eval_moecache.algorithms.miss.base import MissOverRows
from lm_eval_moecache.records.arrays import FloatArray, IntArray
from lm_eval_moecache.records.selection import Selection
from lm_eval_moecache.records.tokens import Tokens


class FetchLowest(MissOverRows):
    """Loads every absent expert at the lowest level of the ladder.

    SpecMD section 3.1.2: it "fetches the lowest available precision to minimize latency". This
    refers to misses: prefetches, which cause no stall, are loaded at the best level, so that a
    ladder of two (int8:int4) uses both. A resident expert is used at whatever level it has.
    """

    source: ClassVar[str] = "SpecMD section 3.1.2 (fetch-lowest-bit)"
    uses_ladder: ClassVar[bool] = True

    def choose(self, tokens: Tokens) -> Selection | None:
        return None

    def levels(self, experts: IntArray, weights: FloatArray) -> IntArray:
        return np.full(experts.shape, len(self.geometry.precision) - 1)

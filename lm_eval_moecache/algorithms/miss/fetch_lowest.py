"""Fetch-lowest: absent experts are loaded at the lowest stored precision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from lm_eval_moecache.algorithms.miss.base import MissAlgorithm, Resolution
from lm_eval_moecache.records.event import Event, Fetch


class FetchLowest(MissAlgorithm):
    """Loads every absent expert at the lowest level of the ladder.

    SpecMD section 3.1.2: it "fetches the lowest available precision to minimize latency". This
    refers to misses: prefetches, which cause no stall, are loaded at the best level, so that a
    ladder of two (int8:int4) uses both. A resident expert is used at whatever level it has.
    """

    source: ClassVar[str] = "SpecMD section 3.1.2 (fetch-lowest-bit)"
    uses_ladder: ClassVar[bool] = True

    def resolve(
        self, event: Event, absent: Sequence[int], resident: Mapping[int, int]
    ) -> Resolution | None:
        lowest = len(self.geometry.precision) - 1
        return Resolution([Fetch(key, lowest) for key in absent])

"""No prefetching: the baseline every table needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from lm_eval_moecache.algorithms.prefetch.base import PrefetchAlgorithm
from lm_eval_moecache.records.event import Event


class NoPrefetch(PrefetchAlgorithm):
    """Never proposes anything: every expert that is not resident is a miss."""

    source: ClassVar[str] = "SpecMD Table 1 (No Pref)"
    is_active: ClassVar[bool] = False

    def propose(self, event: Event) -> Sequence[int]:
        return ()

"""Fetch, with the resident experts executed while the absent ones are being loaded."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import ClassVar

from lm_eval_moecache.algorithms.miss.base import MissAlgorithm, Resolution
from lm_eval_moecache.records.event import Event


class FetchCachedFirst(MissAlgorithm):
    """Loads every absent expert, as `fetch` does, and executes the resident ones meanwhile.

    SP-MoE section 4.3, after ProMoE and Klotski: "experts already cached in GPU memory are
    prioritized for immediate token processing, while the remaining experts [...] are loaded on
    demand". The results are those of `fetch`; an event with absent experts launches the experts'
    kernels twice. Cost: none of its own.
    """

    source: ClassVar[str] = "SP-MoE section 4.3"
    is_lossless: ClassVar[bool] = True
    cached_first: ClassVar[bool] = True

    def resolve(
        self, event: Event, absent: Sequence[int], resident: Container[int]
    ) -> Resolution | None:
        return None

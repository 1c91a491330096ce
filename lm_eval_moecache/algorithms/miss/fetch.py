"""Fetch: load absent experts and wait for them."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import ClassVar

from lm_eval_moecache.algorithms.miss.base import MissAlgorithm, Resolution
from lm_eval_moecache.records.event import Event


class FetchMiss(MissAlgorithm):
    """Loads every absent expert at the best stored precision while compute waits."""

    source: ClassVar[str] = "SpecMD section 3.1.2 (basic fetch)"
    is_lossless: ClassVar[bool] = True

    def resolve(
        self, event: Event, absent: Sequence[int], resident: Container[int]
    ) -> Resolution | None:
        return None

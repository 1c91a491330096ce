"""Fetch: load absent experts and wait for them."""

from __future__ import annotations

from typing import ClassVar

from lm_eval_moecache.algorithms.miss.base import LosslessMiss


class FetchMiss(LosslessMiss):
    """Loads every absent expert at the best stored precision while compute waits."""

    source: ClassVar[str] = "SpecMD section 3.1.2 (basic fetch)"

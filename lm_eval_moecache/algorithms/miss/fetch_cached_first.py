"""Fetch, with the resident experts executed while the absent ones are being loaded."""

from __future__ import annotations

from typing import ClassVar

from lm_eval_moecache.algorithms.miss.base import LosslessMiss


class FetchCachedFirst(LosslessMiss):
    """Loads every absent expert, as `fetch` does, and executes the resident ones meanwhile.

    SP-MoE section 4.3, after ProMoE and Klotski: "experts already cached in GPU memory are
    prioritized for immediate token processing, while the remaining experts [...] are loaded on
    demand". The results are those of `fetch`; an event with absent experts launches the experts'
    kernels twice. Cost: none of its own.
    """

    source: ClassVar[str] = "SP-MoE section 4.3"
    cached_first: ClassVar[bool] = True

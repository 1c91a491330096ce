"""The algorithms of one run, built for its model."""

from __future__ import annotations

from dataclasses import dataclass

from lm_eval_moecache.algorithms.miss.base import MissAlgorithm
from lm_eval_moecache.algorithms.prefetch.base import PrefetchAlgorithm
from lm_eval_moecache.algorithms.routing.base import RoutingAlgorithm


@dataclass(frozen=True, slots=True)
class Algorithms:
    """One algorithm per axis; the eviction algorithms live in their caches."""

    routing: RoutingAlgorithm
    prefetch: PrefetchAlgorithm
    miss: MissAlgorithm
    decode_only: bool = False
    """Whether lossy algorithms stand aside in prefill (`phases=decode`)."""

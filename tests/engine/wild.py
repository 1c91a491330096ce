"""Algorithms without sense, which ask of the engine what sensible ones rarely do."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lm_eval_moecache.algorithms.miss.base import MissOverRows
from lm_eval_moecache.algorithms.prefetch.base import PrefetchAlgorithm
from lm_eval_moecache.records.arrays import FloatArray, IntArray
from lm_eval_moecache.records.event import Event
from lm_eval_moecache.records.geometry import Geometry


class RandomPrefetch(PrefetchAlgorithm):
    """Proposes random keys of random layers, some of them resident or pending."""

    source = "test"
    draws = True

    def __init__(self, geometry: Geometry, *, seed: int = 0) -> None:
        super().__init__(geometry, seed=seed)
        self._rng = np.random.default_rng(seed)

    def propose(self, event: Event) -> Sequence[int]:
        num_keys = self.geometry.num_layers * self.geometry.num_experts
        keys: list[int] = self._rng.permutation(num_keys)[: self._rng.integers(0, 4)].tolist()
        return keys


class RandomLevels(MissOverRows):
    """Demands absent and resident experts, and prefetches, at random levels."""

    source = "test"
    uses_ladder = upgrade = draws = True

    def forget(self) -> None:
        self._rng = np.random.default_rng(self.seed)

    def choose(self, event: Event) -> None:
        return None

    def levels(self, experts: IntArray, weights: FloatArray) -> IntArray:
        return self._rng.integers(0, len(self.geometry.precision), experts.shape)

    def prefetch_levels(self, event: Event, layer: int, experts: IntArray) -> IntArray:
        return self._rng.integers(0, len(self.geometry.precision), len(experts))

"""Algorithms without sense, which ask of the engine what sensible ones rarely do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from lm_eval_moecache.algorithms.miss.base import MissAlgorithm, Resolution
from lm_eval_moecache.algorithms.prefetch.base import PrefetchAlgorithm
from lm_eval_moecache.records.event import Event, Fetch
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


class RandomLevels(MissAlgorithm):
    """Demands absent and resident experts, and prefetches, at random levels."""

    source = "test"
    uses_ladder = upgrade = draws = True

    def __init__(self, geometry: Geometry, *, seed: int = 0) -> None:
        super().__init__(geometry, seed=seed)
        self._rng = np.random.default_rng(seed)

    def resolve(
        self, event: Event, absent: Sequence[int], resident: Mapping[int, int]
    ) -> Resolution | None:
        demands = zip(event.keys, self.prefetch_levels(event, 0, event.keys), strict=True)
        return Resolution([Fetch(k, level) for k, level in demands if level < resident.get(k, 9)])

    def prefetch_levels(self, event: Event, layer: int, keys: Sequence[int]) -> Sequence[int]:
        levels: list[int] = self._rng.integers(0, len(self.geometry.precision), len(keys)).tolist()
        return levels

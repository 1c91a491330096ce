"""The two ends of every table: no prefetching, and a predictor of stated quality."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lm_eval_moecache.algorithms.prefetch.base import PrefetchAlgorithm
from lm_eval_moecache.records.event import Event
from lm_eval_moecache.records.ranges import LayersAhead, Share
from lm_eval_moecache.trace.future import Future


class NoPrefetch(PrefetchAlgorithm):
    """Never proposes anything: every expert that is not resident is a miss."""

    name: ClassVar[str] = "none"
    source: ClassVar[str] = "SpecMD Table 1 (No Pref)"
    is_active: ClassVar[bool] = False

    def propose(self, event: Event) -> Sequence[int]:
        return ()


@dataclass(eq=False, kw_only=True)
class Oracle(PrefetchAlgorithm):
    """Proposes the experts of the next `horizon` events, nearest first, with a given accuracy.

    It knows the future, so only a replay can run it, and it predicts for free: with `recall` and
    `precision` 1, experts are late only where the link cannot carry them in time. Below 1 it
    answers "how good must a predictor be": each expert that an event will need is predicted with
    probability `recall`, and enough of the layer's other experts are inserted at random places that
    the expected share of correct ones is `precision`. Missed experts are drawn uniformly (real
    gates tend to miss the light ones), once per event and seed: a proposal from a nearer layer
    misses the same ones.

    Parameters: horizon, events (layers) ahead, at most one pass; recall and precision, above 0
    and up to 1. Cost: O(horizon * top_k) per event.
    """

    name: ClassVar[str] = "oracle"
    source: ClassVar[str] = "the bound that needs the future; no paper"
    is_offline: ClassVar[bool] = True

    horizon: LayersAhead = 1
    recall: Share = 1.0
    precision: Share = 1.0

    def __post_init__(self) -> None:
        # Wrong experts per correct one.
        self._wrong = 1 / self.precision - 1

    def prepare(self, future: Future) -> None:
        self._future = future

    def propose(self, event: Event) -> Sequence[int]:
        num_layers = self.geometry.num_layers
        now = event.pass_index * num_layers + event.layer
        keys: list[int] = []
        for ahead in range(now + 1, now + 1 + self.horizon):
            needed = self._future.keys_of(ahead)
            keys += self._blurred(needed, ahead) if needed else needed
        # The events are of different layers, so their keys are distinct.
        return keys

    def _blurred(self, needed: list[int], number: int) -> list[int]:
        if self.recall == 1 and not self._wrong:
            return needed
        draw = np.random.default_rng((self.seed, number))
        seen = draw.random(len(needed)) < self.recall
        keys = [key for key, is_seen in zip(needed, seen, strict=True) if is_seen]
        num_experts = self.geometry.num_experts
        base = needed[0] // num_experts * num_experts
        is_other = np.ones(num_experts, bool)
        is_other[np.subtract(needed, base)] = False
        others = np.flatnonzero(is_other) + base
        # Stochastic rounding: exact on average.
        count = min(len(others), int(len(keys) * self._wrong + draw.random()))
        for key in draw.choice(others, count, replace=False).tolist():
            keys.insert(int(draw.integers(len(keys) + 1)), key)
        return keys

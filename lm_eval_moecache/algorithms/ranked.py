"""Evictions that rank residents: one function of an expert's features, lowest first."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Container, Iterable, Sequence
from functools import cache
from inspect import unwrap
from typing import Any, ClassVar

import numpy as np

from lm_eval_moecache.algorithms import features
from lm_eval_moecache.algorithms.eviction.base import EvictionAlgorithm
from lm_eval_moecache.algorithms.features import (
    A_LOAD,
    A_PASS,
    A_PREFETCH,
    A_TURN,
    A_USE,
    A_WISH,
    AN_EVICTION,
    Features,
    make_features,
)
from lm_eval_moecache.records.event import Event
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.jit import specialise

Rank = Callable[[Features, int, int, int], tuple[float, float]]


class RankedEviction(EvictionAlgorithm):
    """An eviction that is a ranking of residents, which a compiled replay knows, too.

    A subclass names its `rank`, a plain function in the part of Python that numba compiles (see
    `features.rank` for what it may do), or returns another one by its parameters. What it overrides
    beside that must not change who leaves, or a replay would not be the live run's.

    What happens is noted in a log, which is taken in where somebody has to leave: one call of a
    compiled function for each victim. Cost: O(layers + residents of a layer) per victim.
    """

    rank: Any
    """A `Rank`, which says who leaves: the lowest."""
    ages: ClassVar[bool] = False
    """Whether the order within a layer changes with every event, used or not."""
    growth: float = 0.0
    """See `Features.weights`."""

    def __init__(self, geometry: Geometry, *, seed: int = 0) -> None:
        super().__init__(geometry, seed=seed)
        self._log = array("q")
        self._features: Features | None = None

    @property
    def plain_rank(self) -> Rank:
        """The function itself, whatever has been put around the algorithm's methods."""
        found: Rank = unwrap(self.rank)
        return found

    def on_pass(self, pass_index: int) -> None:
        self._log.extend((A_PASS, pass_index, 0))

    def on_insert(self, key: int, prefetched: bool) -> None:
        self._log.extend((A_PREFETCH if prefetched else A_LOAD, key, 0))

    def on_event(self, event: Event) -> None:
        log = self._log
        for key in event.keys:
            log.extend((A_USE, key, 0))
        log.extend((A_TURN, event.layer, 0))
        if len(log) > 4096:
            self._play(np.empty(0, np.int64), 0)

    def on_predicted(self, key: int) -> None:
        self._log.extend((A_WISH, key, 0))

    def on_evict(self, key: int) -> None:
        self._log.extend((AN_EVICTION, key, 0))

    def victim(self, pinned: Container[int], layer: int) -> int | None:
        if not isinstance(pinned, Iterable):
            keys: Sequence[int] = range(self.geometry.num_layers * self.geometry.num_experts)
            pinned = [key for key in keys if key in pinned]
        found = self._play(np.fromiter(pinned, np.int64), layer)
        return None if found < 0 else found

    def _note_weights(self, event: Event, weights: Any, tokens: Any) -> None:
        """Note what an event's tokens gave each expert of its layer; `on_event` follows."""
        f, base = self._take_in(), event.layer * self.geometry.num_experts
        for key in event.keys:
            features.add_weight(f, key, float(weights[key - base]), int(tokens[key - base]))

    def _take_in(self) -> Features:
        """Return the features as they are now."""
        self._play(np.empty(0, np.int64), 0)
        assert self._features is not None
        return self._features

    def _play(self, pins: Any, layer: int) -> int:
        geometry, log = self.geometry, self._log
        if self._features is None:
            shape = geometry.num_layers, geometry.num_experts
            self._features = make_features(*shape, growth=self.growth)
            self._player = player(self.plain_rank, self.ages)
        told = np.frombuffer(log, np.int64) if log else np.empty(0, np.int64)
        found = int(self._player(*self._features, told, pins, layer))
        del told, log[:]
        return found


@cache
def player(rank: Rank, ages: bool) -> Callable[..., int]:
    """Return `features.play` for a rule."""
    return specialise([features], "play", {"rank": rank, "AGES": ages})

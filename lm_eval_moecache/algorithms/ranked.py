"""Evictions that rank residents: one function of an expert's features, lowest first."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
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
    Expert,
    Features,
    Layer,
    Now,
    Rank,
    make_features,
)
from lm_eval_moecache.records.event import Event
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.jit import (
    NotCompilable,
    Upgrade,
    as_records,
    compiled,
    compiled_function,
)

_NOBODY = -1
"""In place of a layer: nobody has to leave."""
UPGRADE = Upgrade((features,), "play", load=5_000, make=20_000)
"""Counts victims."""


class RankedEviction(EvictionAlgorithm):
    """An eviction that ranks residents, shared by the live run and the compiled replay.

    A subclass sets `rank`, a plain function in the subset of Python that numba compiles (see
    `features.Rank`), or returns another one depending on its parameters. Whatever else it overrides
    must not change the victims, or a replay would differ from the live run.

    Calls are logged, and the log is processed when a victim is needed; after many victims a
    compiled function does so. Cost: O(layers + residents of a layer) per victim.
    """

    rank: Any
    """A `Rank`, which says who leaves: the lowest."""
    ages: ClassVar[bool] = False
    """Whether the order within a layer changes with every event, used or not."""
    moves: ClassVar[bool] = True
    """Whether a rank can change with the layer being served."""
    growth: float = 0.0
    forecasts: ClassVar[bool] = False
    nearness: float = 0.0
    keep: float = 0.0
    """See `features.Now`."""

    def __init__(self, geometry: Geometry, *, seed: int = 0) -> None:
        super().__init__(geometry, seed=seed)
        self._log: list[int] = []
        self._features: Features | None = None
        self._play: Callable[..., int] = features.play
        self._rank: Any = None
        self._can_compile = True

    @property
    def plain_rank(self) -> Rank:
        """The rank function itself, without wrappers around the algorithm's methods."""
        found: Rank = unwrap(self.rank)
        return found

    def on_pass(self, pass_index: int) -> None:
        self._log.extend((A_PASS, pass_index, 0))

    def on_insert(self, key: int, prefetched: bool) -> None:
        self._log.extend((A_PREFETCH if prefetched else A_LOAD, key, 0))

    def on_event(self, event: Event) -> None:
        log, uses = self._log, [A_USE, 0, 0] * len(event.keys)
        uses[1::3] = event.keys
        log += uses
        log += (A_TURN, event.layer, event.num_tokens)
        if len(log) > 4096:
            self._take_in()

    def on_predicted(self, key: int) -> None:
        self._log.extend((A_WISH, key, 0))

    def on_evict(self, key: int) -> None:
        self._log.extend((AN_EVICTION, key, 0))

    def victim(self, pinned: Container[int], layer: int) -> int | None:
        if not isinstance(pinned, Iterable):
            every = range(self.geometry.num_layers * self.geometry.num_experts)
            pinned = [key for key in every if key in pinned]
        if self._play is features.play and self._can_compile and UPGRADE.is_due(1):
            self._compile()
        found = self._take_in([*pinned], layer)
        return None if found < 0 else found

    def make_features(self, per_layer: bool = False) -> Features:
        """Return the rule's initial features, for one cache or one per layer."""
        now = Now(
            self.geometry.num_layers,
            self.geometry.num_experts,
            ages=int(self.ages),
            moves=int(self.moves),
            growth=self.growth,
            forecasts=int(self.forecasts),
            nearness=self.nearness,
            keep=self.keep,
        )
        return make_features(now, per_layer)

    def _note(self, name: str, layer: int, experts: Any, *values: Any) -> None:
        """Call the function `name` of `features` for each of these experts, before `on_event`.

        Each of `values` [experts of the layer] holds what the event's tokens contributed.
        """
        self._take_in()
        is_plain = self._play is features.play
        function = getattr(features, name) if is_plain else compiled((features,), name)
        base = self.geometry.key(layer, 0)
        for expert in experts:
            function(self._features, base + expert, *(own[expert].item() for own in values))

    def _take_in(self, pins: Any = (), layer: int = _NOBODY) -> int:
        """Process the log; return the victim's key, or -1 for none."""
        log: Any = self._log
        if self._features is None:
            self._features = self.make_features()
            self._rank = self.plain_rank
        if self._play is not features.play:
            log, pins = np.array(log, np.int64), np.array(pins, np.int64)
        found = int(self._play(*self._features, self._rank, log, pins, layer))
        self._log = []
        return found

    def _compile(self) -> None:
        """Switch to compiled functions on records, unless numba cannot compile the rank."""
        self._take_in()
        assert self._features is not None
        try:
            rank = compiled_rank(self.plain_rank)
        except NotCompilable:
            self._can_compile = False
            return
        self._features = Features(*map(as_records, self._features))
        self._play, self._rank = compiled((features,), "play"), rank


def compiled_rank(rank: Rank) -> Any:
    """Return a rule's rank in the form that compiled functions take. Raises NotCompilable."""
    return compiled_function(rank, Expert, Layer, Now)

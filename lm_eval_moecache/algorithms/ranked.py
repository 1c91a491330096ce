"""Evictions that rank residents: one function of an expert's features, lowest first."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from functools import cached_property
from inspect import isfunction, unwrap
from typing import Any, ClassVar

from lm_eval_moecache.algorithms.eviction.base import EvictionAlgorithm
from lm_eval_moecache.algorithms.features import (
    Chosen,
    Expert,
    Features,
    Layer,
    Now,
    Rank,
    find_lowest,
    make_features,
    note_event,
    note_eviction,
    note_hint,
    note_load,
    note_pass,
)
from lm_eval_moecache.algorithms.registry import is_own
from lm_eval_moecache.records.event import Event
from lm_eval_moecache.records.jit import compiled_function


class RankedEviction(EvictionAlgorithm):
    """An eviction that ranks residents by their features.

    A subclass sets `rank`, a plain function in the subset of Python that numba compiles (see
    `features.Rank`), or returns another one depending on its parameters. The engine has the
    features in its own tables and asks the rank alone; the methods below keep the features of a
    rule that is used by itself, or that overrides some of them.
    Cost: O(layers + residents of a layer) per victim.
    """

    rank: Any
    """A `Rank`, which says who leaves: the lowest."""
    ages: ClassVar[bool] = False
    """Whether the order within a layer changes with every event, used or not."""
    moves: ClassVar[bool] = True
    """Whether a rank can change with the layer being served."""
    only_best: ClassVar[bool] = False
    by_token: ClassVar[bool] = False
    forecasts: ClassVar[bool] = False
    growth = parameter = keep = 0.0
    """See `features.Now`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._num_searches = 0

    @classmethod
    def is_rank_alone(cls) -> bool:
        """Whether the rank says all: a rule from outside may override other methods."""
        outside = [c for c in cls.__mro__ if issubclass(c, RankedEviction) and not is_own(c)]
        return not any(
            isfunction(value) and not name.startswith("__") and name != "rank"
            for kind in outside
            for name, value in vars(kind).items()
            if hasattr(RankedEviction, name)
        )

    @property
    def plain_rank(self) -> Rank:
        """The rank function itself, without wrappers around the algorithm's methods."""
        found: Rank = unwrap(self.rank)
        return found

    def make_features(self, slots: Sequence[int]) -> Features:
        """Return the rule's initial features, for one cache or one per layer of so many slots."""
        now = Now(
            self.geometry.num_layers,
            self.geometry.num_experts,
            ages=int(self.ages),
            moves=int(self.moves),
            growth=self.growth,
            forecasts=int(self.forecasts),
            weighs=int(self.uses_weights),
            offline=int(self.is_offline),
            only_best=int(self.only_best),
            by_token=int(self.by_token),
            parameter=self.parameter,
            keep=self.keep,
        )
        return make_features(now, slots)

    @cached_property
    def _features(self) -> Features:
        return self.make_features([self.num_slots])

    def on_pass(self, pass_index: int) -> None:
        note_pass(self._features, pass_index)

    def on_insert(self, key: int, prefetched: bool) -> None:
        note_load(self._features, key, key // self.geometry.num_experts, prefetched)

    def on_event(self, event: Event) -> None:
        keys, rows = event.keys, (event.experts.ravel().tolist(), event.weights.ravel().tolist())
        next_use = self._next_uses(event) if self.is_offline else ()
        sizes = 0, len(keys), 0, len(rows[0])
        chosen = Chosen(keys, next_use, *rows)
        note_event(self._features, event.layer, event.num_tokens, chosen, *sizes)

    def _next_uses(self, event: Event) -> list[int]:
        """Return, for offline rules, the next event that needs each of the event's keys."""
        return [0] * len(event.keys)

    def on_levels(self, event: Event, levels: Mapping[int, int]) -> None:
        for key in event.keys:
            self._features.experts[key].ran_below_best_precision = int(levels.get(key, 0) > 0)
        self.on_event(event)

    def on_predicted(self, key: int) -> None:
        note_hint(self._features, key, key // self.geometry.num_experts)

    def on_evict(self, key: int) -> None:
        note_eviction(self._features, key, key // self.geometry.num_experts)

    def victim(self, pinned: Container[int], layer: int) -> int | None:
        if not isinstance(pinned, Iterable):
            every = range(self.geometry.num_layers * self.geometry.num_experts)
            pinned = [key for key in every if key in pinned]
        tables, num_layers = self._features, self.geometry.num_layers
        self._num_searches += 1
        for key in pinned:
            tables.experts[key].pinned = self._num_searches
        for home in tables.layers:
            home.stale = 1
        rank, mark = self.plain_rank, self._num_searches
        found = find_lowest(tables, rank, 0, num_layers, mark, layer)
        return None if found < 0 else found


def no_rank(expert: Expert, home: Layer, now: Now) -> tuple[float, float]:
    """Stand for the rank in machine code that asks evictions with a state of their own."""
    return 0.0, 0.0


def compiled_rank(rank: Rank) -> Any:
    """Return a rule's rank in the form that compiled functions take. Raises NotCompilable."""
    return compiled_function(rank, Expert, Layer, Now)

"""Runs `engine.core` over tables of objects, or in machine code over arrays of records.

Which of the two it is changes no figure: a reader may take all of it for plain Python.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain
from typing import Any, Protocol

import numpy as np

from lm_eval_moecache.algorithms import costs, features
from lm_eval_moecache.algorithms.eviction.base import EvictionAlgorithm
from lm_eval_moecache.algorithms.ranked import compiled_rank, no_rank
from lm_eval_moecache.algorithms.registry import is_own
from lm_eval_moecache.engine import core
from lm_eval_moecache.engine.decide import Rules
from lm_eval_moecache.engine.outside import Outside
from lm_eval_moecache.engine.tables import HasState, read_some
from lm_eval_moecache.records.event import Fetch
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.jit import (
    Array,
    NotCompilable,
    Upgrade,
    as_records,
    callback,
    compiled,
    dtype_of,
    make_table,
)
from lm_eval_moecache.records.ledger import COUNTED, PassRecord

_TYPES = (
    *(np.int64, np.int64, np.int64, np.int64, np.float64, np.float64, np.float64),
    *(np.int64, np.int64, np.int64, np.int64, np.int64),
)
"""Dtypes of the arrays of a `PassBatch`, in order, for which the loop is compiled.

One for all integers: numba compiles a function once for each type of its arguments."""
_EMPTY = tuple(np.zeros(0, kind) for kind in _TYPES)
_NO_EVENT = core.PassBatch(0, 0, *_EMPTY)._replace(
    bounds=np.zeros(2, np.int64), predict_s=np.zeros(1), proposed_bounds=np.zeros(2, np.int64)
)
_KINDS = (
    *(features.Expert, features.Layer, features.Now, features.Forecast),
    *(core.Slot, core.Level, core.LayerState, core.Queue, core.CacheState, core.RunState),
)
"""What the tables hold, in the order of `core.State`."""
NOTHING, NO_WEIGHTS = np.zeros(0, np.int64), np.zeros(0, np.float64)
NOTHING_PROPOSED = NOTHING, np.zeros(1, np.int64)
NO_KEYS = core.Keys(NOTHING, 0, 0)
_NO_FLAGS = np.zeros((0, 0), np.uint8)
NO_ROWS = core.Rows(
    np.zeros((0, 0), np.int64), NOTHING, NOTHING, _NO_FLAGS, _NO_FLAGS, 0, NOTHING, 0
)
COUNTS_TYPE = dtype_of(core.PassCounts)
COUNTS = COUNTS_TYPE.names
MODULES = features, costs, *core.MODULES
_MESSAGES = 4096
"""To evictions with a state of their own, before they have to be read."""
UPGRADE = Upgrade(MODULES, "step", load=20_000, make=200_000)
"""Counts events, of which plain Python serves one in about 15 us; twice with a prefetcher."""
EVENT_S = 40e-6
"""Seconds that count as an event, so that time is worth compiling for when it has cost as much."""


@cache
def _nobody() -> Any:
    """Stand for what answers, in machine code that asks nobody."""
    return callback(min, 4)


class Looped(HasState, Protocol):
    """An engine, as its loop sees it."""

    geometry: Geometry
    rules: Rules
    eviction: EvictionAlgorithm
    rank: Any
    future: Any
    record: PassRecord
    outside: Outside


class Loop:
    """The form of an engine's tables, and the function that serves them."""

    def __init__(self, engine: Looped) -> None:
        self._engine = engine
        self.is_compiled = False
        self._can_compile = True
        prefetches = engine.rules.prefetch.is_active
        # Rules act between the steps of an event: plain Python then takes several times as long.
        weight = (2 if prefetches else 1) * (4 if engine.rules.is_lossy else 1)
        self._work_per_pass = engine.geometry.num_layers * weight
        self._step: Callable[..., int] = core.step
        self._unrouted: tuple[Any, ...] = ()
        self.rank: Any = engine.rank
        self._asks = engine.rank is None
        """Whether machine code asks evictions for victims, as they keep a state of their own."""
        self.counts: Any = [engine.record]
        self.addresses: Sequence[int] = ()
        """Where the tables and counts of machine code are, which stay there."""
        self._initial: Sequence[Array] = ()
        """The tables of such an engine before its first pass, as records, once there was one."""

    def expect(self, num_passes: int, done: int = 0) -> None:
        """Switch to machine code if that pays for the passes done and those known to come."""
        if self._can_compile and not self.is_compiled:
            work, done = num_passes * self._work_per_pass, done * self._work_per_pass
            if UPGRADE.is_due(done=done, ahead=work):
                self._compile(self._as_records())
                if self.is_compiled:
                    self._engine.rules.get_ready()

    def follow(self, other: Loop) -> None:
        """Take the form of another engine's tables, of the same setting, before the first pass."""
        if other.is_compiled:
            tables = self._as_records()
            if self._engine.future is None and not other._initial:
                other._initial = [table.copy() for table in tables]
            self._compile(tables)

    def initial(self) -> Sequence[Array]:
        """Return the tables of another engine before its first pass, if they are known."""
        return [table.copy() for table in self._initial] if self.is_compiled else ()

    def _as_records(self) -> list[Array]:
        return [as_records(table) for table in self._engine.state[: len(_KINDS)]]

    def leave(self) -> None:
        """Return to plain Python for good: something is asked that only it can do."""
        if self.is_compiled:
            tables = zip(_KINDS, self._engine.state, strict=False)
            objects: list[Any] = [[kind(*row) for row in table.tolist()] for kind, table in tables]
            self._engine.state = core.State(*[*objects, (), self._engine.outside])
            self._step, self.rank = core.step, self._engine.rank
        self._can_compile = self.is_compiled = False
        self.addresses = ()
        self.counts = [self._engine.record]

    def _compile(self, tables: Sequence[Array]) -> None:
        engine = self._engine
        try:
            rank = compiled_rank(self.rank or no_rank)
        except NotCompilable:
            if is_own(type(engine.eviction)):
                raise
            self._can_compile = False
            return
        messages = np.zeros(_MESSAGES if self._asks else 1, np.int64)
        ask = callback(engine.outside.answer, 4) if self._asks else _nobody()
        engine.state = core.State(*[*tables, messages, ask])
        self._step, self.rank, self.is_compiled = compiled(MODULES, "step"), rank, True
        self._unrouted = costs.nothing_routed()
        self.counts = np.zeros(1, COUNTS_TYPE)
        self.addresses = [table.ctypes.data for table in (*tables, self.counts)]

    def batch(
        self, num_tokens: int = 0, dense_s: float = 0.0, warm: Sequence[int] = ()
    ) -> core.PassBatch:
        """Return a batch of an event without keys."""
        if self.is_compiled:
            rows, seconds = np.array((0, num_tokens)), np.array((dense_s,))
            return _NO_EVENT._replace(rows=rows, dense_s=seconds, warm=np.array(warm, np.int64))
        return core.PassBatch(
            *(0, 0, (), (0, 0), (0, num_tokens), (), (), (dense_s,), (0.0,)),
            *((), (), (0, 0), (), warm),
        )

    def as_arrays(self, batch: core.PassBatch) -> core.PassBatch:
        """Return the batch in the form that the machine code takes."""
        arrays: list[Array] = [
            # One token's event leaves most fields empty.
            empty if len(values) == 0 else np.ascontiguousarray(values, empty.dtype)
            for values, empty in zip(batch[2:], _EMPTY, strict=True)
        ]
        return core.PassBatch(batch.first_pass, batch.num_passes, *arrays)

    def begin(self, record: PassRecord) -> None:
        """Count for this record from now on."""
        if self.is_compiled:
            self.counts[:] = 0
        else:
            self.counts = [record]

    def end(self, record: PassRecord) -> None:
        """Add what was counted to the record."""
        if self.is_compiled:
            [values] = self.counts.tolist()
            for name, value in zip(COUNTED, values, strict=False):
                if value:
                    setattr(record, name, getattr(record, name) + value)

    def step(
        self,
        what: int,
        batch: core.PassBatch,
        number: int = 0,
        layer: int = 0,
        demands: Sequence[Fetch] = (),
    ) -> int:
        """Do a step of an event (see `core.step`)."""
        keys: Any = ()
        levels: Any = ()
        if demands:
            keys, levels = zip(*demands, strict=True)
        state, counts = self._engine.state, self.counts
        if not self.is_compiled:
            event, demanded = (
                core.event_of(batch, 0, number, layer),
                core.Keys(keys, 0, len(keys)),
            )
            return core.act(state, self.rank, event, counts, what, demanded, levels)
        task = core.Task(what, number, layer, NO_KEYS, NOTHING)
        if demands:
            demanded = core.Keys(np.array(keys, np.int64), 0, len(keys))
            task = task._replace(demands=demanded, levels=np.array(levels, np.int64))
        absent = self._step(state, self.rank, batch, counts, task, NO_ROWS, *self._unrouted)
        if self._asks:
            self._engine.outside.end_machine_code()
        return absent

    def step_rows(
        self,
        batch: core.PassBatch,
        what: int,
        layer: int,
        rows: core.Rows,
        routed: tuple[costs.Routed, costs.Choice] | None = None,
        number: int = 0,
        counts: Any = None,
    ) -> int:
        """Serve a layer of several engines alike (see `core.serve_row`) or of a text (`core.text`),
        in machine code; return whether a cost has chosen others than the router."""
        task = core.Task(what, number, layer, NO_KEYS, NOTHING)
        counts = self.counts if counts is None else counts
        routed = self._unrouted if routed is None else routed
        return self._step(self._engine.state, self.rank, batch, counts, task, rows, *routed)

    def serve_passes(self, batch: core.PassBatch) -> Array:
        """Serve a batch of passes; return their counts, as records of `core.PassCounts`."""
        num_passes = batch.num_passes
        if self.is_compiled:
            counts: Any = np.zeros(num_passes, COUNTS_TYPE)
            task, arrays = core.Task(core.PASSES, 0, 0, NO_KEYS, NOTHING), self.as_arrays(batch)
            own = self._engine.state, self.rank, arrays, counts, task, NO_ROWS
            self._step(*own, *self._unrouted)
            if self._asks:
                self._engine.outside.end_machine_code()
            return counts
        objects = make_table(core.PassCounts, num_passes)
        lists = [*batch[:2], *(values.tolist() for values in batch[2:])]
        begin = time.thread_time()
        core.serve_passes(self._engine.state, self.rank, core.PassBatch(*lists), objects)
        # By time: a ranking that looks at every resident takes plain Python many times as long.
        UPGRADE.is_due(done=int((time.thread_time() - begin) / EVENT_S))
        return as_records(objects)

    def levels(self, keys: Sequence[int]) -> dict[int, int]:
        """Return the precision level at which each of these keys was last executed."""
        levels = read_some(self._engine.state.slots, keys, "executed_level")
        return dict(zip(keys, levels, strict=True))


def batch_of_tokens(size: int, top_k: int, **own: Array) -> core.PassBatch:
    """Return a batch of three events of each of so many tokens (see `core.Rows`)."""
    return core.PassBatch(
        first_pass=0,
        num_passes=1,
        keys=np.zeros(3 * size * top_k, np.int64),
        bounds=NOTHING,
        rows=np.arange(3 * size + 1),
        next_use=NOTHING,
        proposed=NOTHING,
        proposed_bounds=np.zeros(3 * size + 1, np.int64),
        proposed_levels=NOTHING,
        warm=NOTHING,
        **own,
    )


def joined(keys: Sequence[Sequence[int]]) -> tuple[Array, Array]:
    """Return all keys in one array, and the bounds of each sequence in it [sequences + 1]."""
    return np.array([*chain.from_iterable(keys)], np.int64), np.cumsum([0, *map(len, keys)])


def records_of(
    counts: Array, first: int, phases: Sequence[str], tokens: Sequence[int]
) -> list[PassRecord]:
    """Return the records of served passes, numbered from `first`, from their counts."""
    assert COUNTS is not None
    if len(counts) == 1:
        values = dict(zip(COUNTS, counts.tolist()[0], strict=True))
        return [PassRecord(index=first, phase=phases[0], num_tokens=tokens[0], **values)]
    served = zip(phases, tokens, counts["start_s"].tolist(), strict=True)
    records = [PassRecord(index, *fields) for index, fields in enumerate(served, first)]
    for name in COUNTS:
        # Most counts are 0 in most runs.
        if counts[name].any():
            for record, value in zip(records, counts[name].tolist(), strict=True):
                setattr(record, name, value)
    return records

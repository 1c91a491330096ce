"""Serves lossless passes in one loop over tables: the engine's figures to the digit, much faster.

`reason_against` lists what must go through the engine event by event: lossy algorithms, evictions
that are not rankings, several precision levels, host compute, drafts, scanned texts. One loop
serves all rules and is compiled once; runs shorter than the compilation stay in plain Python. A
replay feeds it a few thousand passes at a time, a live run one pass of router choices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import isfunction
from itertools import chain
from typing import Any

import numpy as np

from lm_eval_moecache.algorithms import features
from lm_eval_moecache.algorithms.ranked import RankedEviction, compiled_rank
from lm_eval_moecache.algorithms.registry import is_own
from lm_eval_moecache.engine import core
from lm_eval_moecache.engine.core import Count, Machine, Piece, Place, Slot, State
from lm_eval_moecache.engine.decide import Plan
from lm_eval_moecache.engine.engine import Engine, TokenPass, VirtualEngine
from lm_eval_moecache.engine.setting import Setting
from lm_eval_moecache.engine.virtual.link import attention_s
from lm_eval_moecache.records.arrays import FloatArray, IntArray
from lm_eval_moecache.records.event import NO_PREDICTIONS, PHASES, Event
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.jit import (
    Array,
    NotCompilable,
    Upgrade,
    as_records,
    column,
    compiled,
    dtype_of,
    is_kept,
    make_table,
)
from lm_eval_moecache.records.ledger import PassRecord
from lm_eval_moecache.records.predictor import target_of
from lm_eval_moecache.trace.future import Future
from lm_eval_moecache.trace.trace import Trace

_TYPES = (
    *(np.int32, np.int64, np.int64, np.int32, np.float32, np.float64, np.float64),
    *(np.int64, np.int32, np.int64, np.bool_, np.int64),
)
"""Dtypes of the arrays of a `Piece`, in order, for which the loop is compiled."""
_NOBODY, _NO_WEIGHTS = np.zeros(0, np.int64), np.zeros(0, np.float32)
NOTHING_PROPOSED = _NOBODY, np.zeros(1, np.int64)
_COLD, _GOES_ON = np.array([True]), np.array([False])
_COUNTS = dtype_of(Count).names
_MODULES = features, core
UPGRADE = Upgrade(_MODULES, "run", load=20_000, make=400_000)
"""Counts events, of which plain Python serves one in about 15 us; twice with a prefetcher."""


def reason_against(engine: Engine, scans: bool) -> str:
    """Return why the loop cannot serve an engine's passes, or an empty string where it can.

    `scans`: whether some of its texts are scanned.
    """
    rules, eviction = engine.rules, engine.pools[0].eviction
    if rules.may_change:
        return "a lossy algorithm decides by what is resident"
    if rules.ladder:
        return "the store has several levels of precision"
    if not isinstance(eviction, RankedEviction):
        return f"{type(eviction).__name__} keeps a state of its own and ranks nobody"
    if overridden := _overridden(type(eviction)):
        return f"{type(eviction).__name__} defines {overridden} of its own, not only a rank"
    if not engine.setting.is_one_server:
        return "the link has lanes, or experts are executed as they arrive"
    if rules.miss.host_rule:
        return "the host computes"
    if engine.draft_stage is not None:
        return "a draft model drafts"
    if rules.prefetch.foresees:
        return "a whole pass is foreseen before it begins"
    if scans:
        return "texts were scanned layer by layer"
    return ""


def _overridden(eviction: type[RankedEviction]) -> str:
    """Return a method by which an outside ranking does more than the loop's tables, or ""."""
    outside = [c for c in eviction.__mro__ if issubclass(c, RankedEviction) and not is_own(c)]
    for name in (name for c in outside for name, value in vars(c).items() if isfunction(value)):
        if not name.startswith("__") and name != "rank" and hasattr(RankedEviction, name):
            return name
    return ""


def is_compiled() -> bool:
    """Whether the loop's machine code is there, and numba can load it."""
    return is_kept(_MODULES, "run")


class PassLoop:
    """The loop's tables, filled from an engine before its first pass; `finish` writes them back."""

    def __init__(
        self, engine: VirtualEngine, future: Future | None = None, num_passes: int = 0
    ) -> None:
        self._engine, self._future = engine, future
        prefetches = engine.rules.prefetch.is_active
        self._work_per_pass = engine.geometry.num_layers * (2 if prefetches else 1)
        self._work_ahead = num_passes * self._work_per_pass
        geometry, pools, clock, link = engine.geometry, engine.pools, engine.clock, engine.link
        eviction, prefetch = pools[0].eviction, engine.rules.prefetch
        assert isinstance(eviction, RankedEviction)
        self._eviction = eviction
        self._layers, self._experts = geometry.num_layers, geometry.num_experts
        self._rank: Any = eviction.plain_rank
        self._loop: Callable[..., None] = core.run
        self._can_compile = True
        machine = Machine(
            now=clock.now,
            busy_until=link.busy_until,
            wait_overhead_s=clock.wait_overhead_s,
            expert_overhead_s=clock.expert_overhead_s,
            top_k=geometry.top_k,
            fifo=int(link.fifo),
            prefetches=int(prefetch.is_active),
            after_layer=int(prefetch.after_layer),
            cached_first=int(engine.rules.miss.cached_first),
            weighs=int(eviction.uses_weights),
            offline=int(eviction.is_offline),
        )
        rules = eviction.make_features(len(pools) > 1)
        slots = make_table(Slot, self._layers * self._experts)
        self._s = s = State(*rules, slots, make_table(Place, self._layers + 1), [machine])
        for layer, (place, sizes) in enumerate(zip(s.places, geometry.expert_bytes, strict=False)):
            place.nbytes, place.carry_s = sizes[0], link.duration_s(sizes[0])
            place.flop_s, place.read_s = clock.expert_parts_s(layer)
        partitions = engine.setting.capacity.partitions(self._layers)
        for place, pool, layers in zip(s.places, pools, partitions, strict=False):
            place.first_layer, place.end_layer = layers.start, layers.stop
            place.capacity, place.used = pool.capacity_bytes, pool.used_bytes
            place.peak, place.warmed = pool.peak_bytes, pool.warmed
        for key, slot in enumerate(s.slots):
            slot.home = key // self._experts
        if eviction.is_offline:
            assert future is not None, "an offline eviction without a future"
            for expert, first in zip(s.experts, future.first_use.tolist(), strict=True):
                expert.next_use = first
        self.warm = np.array([key for pool in pools for key in pool.resident], np.int64)
        for key in self.warm.tolist():
            features.note_load(s, key, key // self._experts, False)

    def compile(self) -> None:
        """Switch to machine code over arrays of records, unless numba cannot compile the rank."""
        try:
            rank = compiled_rank(self._rank)
        except NotCompilable:
            if is_own(type(self._eviction)):
                raise
            self._can_compile = False
            return
        self._s = State(*map(as_records, self._s))
        self._loop, self._rank = compiled(_MODULES, "run"), rank
        # An empty piece: loads or compiles the code now rather than in the first pass.
        self.run(Piece(0, *[_NOBODY] * len(_TYPES)), 0)

    def run(self, piece: Piece, num_passes: int) -> Array:
        """Serve a piece; return the counts of its passes, as records of `Count`."""
        is_plain, work = self._loop is core.run, num_passes * self._work_per_pass
        if is_plain and self._can_compile and UPGRADE.is_due(ahead=self._work_ahead):
            self.compile()
        self._work_ahead -= work
        if self._loop is not core.run:
            counts = np.zeros(num_passes, dtype_of(Count))
            arrays = [
                values
                if values.dtype == kind and values.flags.carray
                else np.require(values, kind, ["C", "W"])
                for values, kind in zip(piece[1:], _TYPES, strict=True)
            ]
            self._loop(*self._s, self._rank, Piece(piece.first_pass, *arrays), counts)
            return counts
        objects = make_table(Count, num_passes)
        lists = [piece.first_pass, *(values.tolist() for values in piece[1:])]
        self._loop(*self._s, self._rank, Piece(*lists), objects)
        UPGRADE.is_due(done=work)
        return as_records(objects)

    def seconds(self, tokens: int, phase: str) -> Array:
        """Return the seconds of each layer's dense part and of its predictions: [2, layers]."""
        engine, layers = self._engine, range(self._layers)
        ahead = [min(engine.depth, self._layers - 1 - layer) for layer in layers]
        if engine.depth and engine.rules.prefetch.uses_predictor:
            ahead = [int(target_of(layer, self._layers, phase) is not None) for layer in layers]
        dense_s = [engine.clock.dense_s(layer, tokens) for layer in layers]
        predict_s = [engine.predicting_s(layer, ahead[layer], tokens) for layer in layers]
        return np.array([dense_s, predict_s])

    def replay(
        self, part: Trace, first: int, last: int, proposed: tuple[Array, Array], cold: Array
    ) -> None:
        """Serve passes `first` to `last` (excluded) of a part; record them in the engine's ledger.

        `proposed` holds the prefetcher's keys and their bounds by event.
        """
        engine, columns = self._engine, part.columns
        start, stop = first * self._layers, last * self._layers
        bounds, rows = part.key_bounds[start : stop + 1], part.row_bounds[start : stop + 1]
        places, own_rows = slice(bounds[0], bounds[-1]), slice(rows[0], rows[-1])
        weights, next_use = _NO_WEIGHTS, _NOBODY
        if self._eviction.uses_weights and columns.weights is not None:
            weights = np.require(columns.weights[own_rows], np.float32, ["C", "W"]).ravel()
        if self._eviction.is_offline and self._future is not None:
            next_use = self._future.next_use[places]
        tokens = np.diff(rows).reshape(-1, self._layers)
        phases = columns.phase[rows[: -1 : self._layers]]
        # Computed once per number of tokens and phase. The layers of a pass can differ in tokens:
        # some models run the last layer for a prompt's last token only.
        kinds, place = np.unique(tokens * len(PHASES) + phases[:, np.newaxis], return_inverse=True)
        decoded_kinds = (divmod(int(kind), len(PHASES)) for kind in kinds)
        by_kind = np.array([self.seconds(count, PHASES[phase]) for count, phase in decoded_kinds])
        by_event = by_kind[place.reshape(tokens.shape), :, np.arange(self._layers)]
        dense_s, predict_s = by_event.reshape(-1, 2).T
        if engine.wants_positions:
            attention = self._attention_s(part, phases, first, last)
            dense_s = dense_s + np.repeat(attention, self._layers)
        piece = Piece(
            first_pass=part.first_pass + first,
            keys=part.keys[places],
            bounds=bounds - bounds[0],
            rows=rows - rows[0],
            experts=columns.experts[own_rows].ravel(),
            weights=weights,
            dense_s=dense_s,
            predict_s=predict_s,
            next_use=next_use,
            proposed=proposed[0],
            proposed_bounds=proposed[1],
            cold=cold,
            warm=self.warm,
        )
        counts = self.run(piece, last - first)
        requested = (tokens.sum(1) * engine.geometry.top_k).tolist()
        served = phases.tolist(), tokens[:, 0].tolist(), requested
        # By columns: twice as fast as the records' own list.
        columns_of_counts = [counts[name].tolist() for name in _COUNTS]
        passes = engine.ledger.passes
        for phase, num_tokens, requests, *values in zip(*served, *columns_of_counts, strict=True):
            passes.append(
                PassRecord(
                    index=len(passes),
                    phase=PHASES[phase],
                    num_tokens=num_tokens,
                    token_requests=requests,
                    **dict(zip(_COUNTS, values, strict=True)),
                )
            )

    def _attention_s(self, part: Trace, phases: Array, first: int, last: int) -> list[float]:
        """Return each pass's seconds of one layer's attention to the context."""
        setting, layers, seconds = self._engine.setting, self._layers, []
        assert setting.emulate is not None, "attention to the context of no known model"
        for number, phase in zip(range(first, last), phases.tolist(), strict=True):
            rows = slice(part.row_bounds[number * layers], part.row_bounds[number * layers + 1])
            positions = part.columns.token[rows].astype(np.int64)
            seconds.append(attention_s(setting.emulate, setting.hardware, PHASES[phase], positions))
        return seconds

    def finish(self) -> None:
        """Write the state back to caches, link and clock, whose integrity can then be checked."""
        s, link = self._s, self._engine.link
        value = {name: column(s.machine, name)[0].item() for name in dtype_of(Machine).names}
        self._engine.clock.now = value["now"]
        link.busy_until, link.busy_s = value["busy_until"], value["busy_s"]
        link.bytes_moved, link.transfers = value["moved"], value["transfers"]
        inflight = value["inflight"]
        link.inflight = None if inflight < 0 else inflight
        resident, loaded = column(s.experts, "resident"), column(s.experts, "loaded")
        unused, since = column(s.slots, "unused"), column(s.slots, "since")
        of_place = {name: column(s.places, name).tolist() for name in dtype_of(Place).names}
        for place, pool in enumerate(self._engine.pools):
            layers = range(of_place["first_layer"][place], of_place["end_layer"][place])
            keys = np.arange(layers.start * self._experts, layers.stop * self._experts)
            resident_keys = keys[resident[keys] > 0]
            resident_keys = resident_keys[loaded[resident_keys].argsort()]
            pool.take_over(
                dict(zip(resident_keys.tolist(), since[resident_keys].tolist(), strict=True))
            )
            pool.arriving = {inflight: 0} if inflight in keys else {}
            pool.unused_prefetches = set(keys[unused[keys] > 0].tolist())
            pool.used_bytes, pool.peak_bytes = of_place["used"][place], of_place["peak"][place]
            pool.loads, pool.evictions = of_place["loads"][place], of_place["evictions"][place]
            pool.lifetime_tokens, pool.tokens = of_place["lifetime"][place], value["tokens"]
            pool.warmed = of_place["warmed"][place]


def live_engine(geometry: Geometry, setting: Setting, scans: bool = False) -> Engine:
    """Return a virtual-time engine for a live run; `scans`: whether some texts are scanned.

    A compiled one where `reason_against` has no objection and the machine code is already on disk:
    a live run does not stand still to compile.
    """
    engine = VirtualEngine(geometry, setting)
    if reason_against(engine, scans) or not is_compiled():
        return engine
    return CompiledEngine(geometry, setting)


class CompiledEngine(VirtualEngine):
    """An engine that collects the events of a pass and serves them together at its end.

    The model's computation does not depend on them (`can_defer`). `settle` brings caches and link
    up to date, and thereby the totals of the run.
    """

    uncompiled = ""

    def __init__(self, geometry: Geometry, setting: Setting) -> None:
        super().__init__(geometry, setting)
        self._passes = PassLoop(self)
        self._passes.compile()
        self._events: list[Event] = []
        self._told: TokenPass | None = None
        self._is_cold = False
        self._weighs = self.pools[0].eviction.uses_weights
        layers, top_k = self.geometry.num_layers, self.geometry.top_k
        self._of_one_token = np.arange(layers + 1) * top_k, np.arange(layers + 1)
        self._seconds_of: dict[tuple[int, str], Array] = {}

    def begin_pass(
        self,
        phase: str,
        num_tokens: int,
        foreseen: Mapping[int, FloatArray] = NO_PREDICTIONS,
        positions: IntArray | None = None,
    ) -> PassRecord:
        record = self.ledger.begin_pass(phase, num_tokens, self.clock.now)
        self._follow(record, positions)
        self._is_open = True
        self._events, self._told = [], None
        return record

    def enter(self, layer: int, num_tokens: int) -> None:
        """Do nothing: events are served at the end of the pass."""

    def run(self, event: Event) -> Plan:
        """Collect an event; return a plan without demands."""
        self._events.append(event)
        return Plan(event, (), (), event)

    def serve(self, token_pass: TokenPass) -> None:
        self._told = token_pass
        if token_pass.proposed is None and self.rules.prefetch.is_active:
            self._events = token_pass.events()

    def end_pass(self) -> None:
        assert self._is_open, "end_pass without begin_pass"
        record = self.record
        piece = self._piece(record)
        [counts] = self._passes.run(piece, 1).tolist()
        for name, value in zip(_COUNTS, counts, strict=True):
            setattr(record, name, value)
        record.token_requests = self.geometry.top_k * int(piece.rows[-1])
        self.clock.now = record.end_s
        self._is_cold = self._is_open = False

    def _piece(self, record: PassRecord) -> Piece:
        """Return the pass in progress as a piece of one pass."""
        token_pass, events = self._told, self._events
        proposed = (
            NOTHING_PROPOSED if token_pass is None else token_pass.proposed or NOTHING_PROPOSED
        )
        if events and self.rules.prefetch.is_active:
            proposed = joined([self.rules.prefetch.propose(event) for event in events])
        bounds, rows = self._of_one_token
        if token_pass is not None:
            assert len(token_pass.keys) == len(rows) - 1, "a pass that lacks layers"
            keys, weights = token_pass.keys.ravel(), token_pass.weights
            experts = keys % self.geometry.num_experts if self._weighs else _NOBODY
        else:
            assert len(events) == len(rows) - 1, "a pass that lacks layers"
            keys, bounds = joined([event.keys for event in events])
            rows = np.cumsum([0, *[event.num_tokens for event in events]])
            experts = np.concatenate([event.experts.ravel() for event in events])
            weights = np.concatenate([event.weights.ravel() for event in events])
        kind = record.num_tokens, record.phase
        seconds = self._seconds_of.get(kind)
        if seconds is None or self.wants_positions:
            seconds = self._seconds_of[kind] = self._passes.seconds(*kind)
        return Piece(
            first_pass=record.index,
            keys=keys,
            bounds=bounds,
            rows=rows,
            experts=experts,
            weights=_NO_WEIGHTS if weights is None else weights.ravel(),
            dense_s=seconds[0],
            predict_s=seconds[1],
            next_use=_NOBODY,
            proposed=proposed[0],
            proposed_bounds=proposed[1],
            cold=_COLD if self._is_cold else _GOES_ON,
            warm=self._passes.warm,
        )

    def reset_cache(self) -> None:
        self._is_cold = True

    def settle(self) -> None:
        """Bring caches, link and clock up to date with the loop."""
        self._passes.finish()

    @property
    def peak_cache_bytes(self) -> int:
        self.settle()
        return super().peak_cache_bytes

    def check_integrity(self) -> None:
        self.settle()
        super().check_integrity()


def joined(keys: Sequence[Sequence[int]]) -> tuple[IntArray, IntArray]:
    """Return all keys in one array, and the bounds of each sequence in it [sequences + 1]."""
    return np.array([*chain.from_iterable(keys)], np.int64), np.cumsum([0, *map(len, keys)])

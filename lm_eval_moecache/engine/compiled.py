"""Lossless passes by one loop over tables: the same figures as the engine, much faster.

`reason_against` says what has to go through the engine event by event: lossy algorithms, evictions
that are no ranking, several levels of precision, the host, drafts, scanned texts. The loop is the
same for all rules, and compiled once; what is over sooner than that runs as plain Python. A replay
gives it some thousand passes at a time, a live run (`engine.live`) one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from lm_eval_moecache.algorithms import features
from lm_eval_moecache.algorithms.ranked import RankedEviction, compiled_rank
from lm_eval_moecache.engine import core
from lm_eval_moecache.engine.core import Count, Machine, Piece, Place, Slot, State
from lm_eval_moecache.engine.engine import Engine
from lm_eval_moecache.engine.virtual.attention import attention_s
from lm_eval_moecache.engine.virtual.executor import VirtualExecutor
from lm_eval_moecache.records.event import PHASES
from lm_eval_moecache.records.jit import (
    Array,
    as_records,
    column,
    compiled,
    dtype_of,
    has_numba,
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
"""Of the arrays of a piece, as they are compiled for."""
_NOTHING = np.zeros(0, np.int64)
_MODULES = features, core
_PATIENCE_S = 4.0
"""Seconds of plain Python, in all replays of a process, after which compiling is cheaper."""


def reason_against(engine: Engine, scans: bool) -> str:
    """Say why an engine's passes cannot be compiled; empty where they can.

    `scans`: some of its texts are scanned.
    """
    rules, executor, eviction = engine.rules, engine.executor, engine.pools[0].eviction
    if rules.may_change:
        return "a lossy algorithm decides by what is resident"
    if not isinstance(executor, VirtualExecutor) or rules.ladder:
        return "the store has several levels of precision"
    if not type(eviction).__module__.startswith("lm_eval_moecache.algorithms."):
        return f"{type(eviction).__name__} is no eviction of this package"
    if not isinstance(eviction, RankedEviction):
        return f"{type(eviction).__name__} keeps a state of its own and ranks nobody"
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


class _Patience:
    """Seconds that plain Python has taken in this process, or inf where all is compiled already."""

    def __init__(self) -> None:
        self.spent_s = float("inf") if is_kept(_MODULES, "run") else 0.0

    @property
    def is_over(self) -> bool:
        return has_numba() and self.spent_s > _PATIENCE_S


_patience = cache(_Patience)


def is_compiled() -> bool:
    """Whether the loop's machine code is on disk."""
    return is_kept(_MODULES, "run") and has_numba()


class PassLoop:
    """The loop's tables, filled from an engine that has served nothing; `finish` tells it all."""

    def __init__(self, engine: Engine, future: Future | None) -> None:
        self._engine, self._future = engine, future
        executor, geometry = engine.executor, engine.geometry
        assert isinstance(executor, VirtualExecutor)
        self._executor = executor
        self._layers, self._experts = geometry.num_layers, geometry.num_experts
        eviction, prefetch = engine.pools[0].eviction, engine.rules.prefetch
        assert isinstance(eviction, RankedEviction)
        self._eviction = eviction
        self._rank: Any = eviction.plain_rank
        self._loop: Callable[..., None] = core.run
        rules = eviction.make_features(len(engine.pools) > 1)
        machine = Machine(
            now=executor.clock.now,
            busy_until=executor.link.busy_until,
            wait_overhead_s=executor.clock.wait_overhead_s,
            expert_overhead_s=executor.clock.expert_overhead_s,
            top_k=geometry.top_k,
            fifo=int(executor.link.fifo),
            prefetches=int(prefetch.is_active),
            after_layer=int(prefetch.after_layer),
            cached_first=int(engine.rules.miss.cached_first),
            weighs=int(eviction.uses_weights),
            offline=int(eviction.is_offline),
        )
        slots = make_table(Slot, self._layers * self._experts)
        self._s = State(*rules, slots, make_table(Place, self._layers + 1), [machine])
        self._fill_in()

    def _fill_in(self) -> None:
        """Write down what layers and caches are like, and who is resident already."""
        s, link, clock = self._s, self._executor.link, self._executor.clock
        pools, capacity = self._engine.pools, self._engine.setting.capacity
        for layer, (place, sizes) in enumerate(
            zip(s.places, self._engine.geometry.expert_bytes, strict=False)
        ):
            place.nbytes, place.carry_s = sizes[0], link.duration_s(sizes[0])
            place.flop_s, place.read_s = clock.expert_parts_s(layer)
        for place, pool, layers in zip(
            s.places, pools, capacity.partitions(self._layers), strict=False
        ):
            place.capacity, place.used, place.peak = (
                pool.capacity_bytes,
                pool.used_bytes,
                pool.peak_bytes,
            )
            place.first_layer, place.end_layer = layers.start, layers.stop
            place.warmed = pool.warmed
        for key, slot in enumerate(s.slots):
            slot.home = key // self._experts
        if self._eviction.is_offline:
            assert self._future is not None, "an offline eviction without a future"
            for expert, first in zip(s.experts, self._future.first_use.tolist(), strict=True):
                expert.next_use = first
        self.warm = np.array([key for pool in pools for key in pool.resident], np.int64)
        for key in self.warm.tolist():
            features.note_load(s, key, key // self._experts, False)

    def compile(self) -> None:
        """From now on, let machine code work on records."""
        self._s = State(*map(as_records, self._s))
        self._loop, self._rank = compiled(_MODULES, "run"), compiled_rank(self._rank)
        # Nothing to serve: it is loaded, or compiled, before anybody waits for a pass.
        self.run(Piece(0, *[_NOTHING] * len(_TYPES)), 0)

    def run(self, piece: Piece, num_passes: int) -> Array:
        """Let the loop serve a piece; return what each pass counted, as records."""
        if self._loop is core.run and _patience().is_over:
            self.compile()
        if self._loop is not core.run:
            counts = np.zeros(num_passes, dtype_of(Count))
            arrays = [
                own if own.dtype == kind and own.flags.carray else np.require(own, kind, ["C", "W"])
                for own, kind in zip(piece[1:], _TYPES, strict=True)
            ]
            self._loop(*self._s, self._rank, Piece(piece.first_pass, *arrays), counts)
            return counts
        start_s = time.process_time()
        objects = make_table(Count, num_passes)
        lists = [piece.first_pass, *(own.tolist() for own in piece[1:])]
        self._loop(*self._s, self._rank, Piece(*lists), objects)
        _patience().spent_s += time.process_time() - start_s
        return as_records(objects)

    def dense_s(self, tokens: int, phase: int) -> list[float]:
        clock = self._executor.clock
        return [clock.dense_s(layer, tokens) for layer in range(self._layers)]

    def predicting_s(self, tokens: int, phase: int) -> list[float]:
        depth, last = self._engine.depth, self._layers - 1
        ahead = [min(depth, last - layer) for layer in range(self._layers)]
        if depth and self._engine.rules.prefetch.uses_predictor:
            ahead = [target_of(i, self._layers, PHASES[phase]) is not None for i in range(last + 1)]
        return [self._executor.predicting_s(i, int(n), tokens) for i, n in enumerate(ahead)]

    def finish(self) -> None:
        """Leave caches, link and clock as the engine would have: its laws can be checked."""
        s, link = self._s, self._executor.link
        value = {name: column(s.machine, name)[0].item() for name in dtype_of(Machine).names}
        self._executor.clock.now = value["now"]
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
            held = keys[resident[keys] > 0]
            held = held[loaded[held].argsort()]
            pool.take_over(dict(zip(held.tolist(), since[held].tolist(), strict=True)))
            pool.arriving = {inflight: 0} if inflight in keys else {}
            pool.unused_prefetches = set(keys[unused[keys] > 0].tolist())
            pool.used_bytes, pool.peak_bytes = of_place["used"][place], of_place["peak"][place]
            pool.loads, pool.evictions = of_place["loads"][place], of_place["evictions"][place]
            pool.lifetime_tokens, pool.tokens = of_place["lifetime"][place], value["tokens"]
            pool.warmed = of_place["warmed"][place]


class CompiledReplay(PassLoop):
    """Serves passes of a trace for an engine, and writes to its ledger what they counted."""

    def serve(
        self, part: Trace, first: int, last: int, proposed: tuple[Array, Array], cold: Array
    ) -> None:
        """Serve passes `first` to `last` of a part, with what is proposed at each event."""
        start, stop = first * self._layers, last * self._layers
        bounds, rows = part.key_bounds[start : stop + 1], part.row_bounds[start : stop + 1]
        columns, places = part.columns, slice(bounds[0], bounds[-1])
        own_rows = slice(rows[0], rows[-1])
        weights, next_use = np.zeros(0, np.float32), _NOTHING
        if self._eviction.uses_weights and columns.weights is not None:
            weights = np.require(columns.weights[own_rows], np.float32, ["C", "W"]).ravel()
        if self._eviction.is_offline and self._future is not None:
            next_use = self._future.next_use[places]
        tokens = np.diff(rows).reshape(-1, self._layers)
        phases = columns.phase[rows[: -1 : self._layers]]
        dense_s = self._by_event(tokens, phases, self.dense_s)
        if self._engine.wants_positions:
            dense_s += np.repeat(self._attention_s(part, phases, first, last), self._layers)
        piece = Piece(
            first_pass=part.first_pass + first,
            keys=part.keys[places],
            bounds=bounds - bounds[0],
            rows=rows - rows[0],
            experts=columns.experts[own_rows].ravel(),
            weights=weights,
            dense_s=dense_s,
            predict_s=self._by_event(tokens, phases, self.predicting_s),
            next_use=next_use,
            proposed=proposed[0],
            proposed_bounds=proposed[1],
            cold=cold,
            warm=self.warm,
        )
        counts = self.run(piece, last - first)
        self._enter(phases, tokens, counts)

    def _by_event(self, tokens: Array, phases: Array, of: Callable[..., list[float]]) -> Array:
        """Return what `of` says of each event, who is asked once per number of tokens and phase.

        The layers of one pass can differ in tokens: some models run the last one for the last token
        of a prompt alone.
        """
        kinds, place = np.unique(tokens * len(PHASES) + phases[:, np.newaxis], return_inverse=True)
        table = [of(*divmod(int(kind), len(PHASES))) for kind in kinds]
        by_kind = np.asarray(table, np.float64)
        return by_kind[place.reshape(tokens.shape), np.arange(self._layers)].ravel()

    def _attention_s(self, part: Trace, phases: Array, first: int, last: int) -> list[float]:
        """Return what a layer's attention to the context takes in each pass."""
        setting, layers, found = self._engine.setting, self._layers, []
        assert setting.emulate is not None, "attention to the context of no known model"
        for number, phase in zip(range(first, last), phases.tolist(), strict=True):
            rows = slice(part.row_bounds[number * layers], part.row_bounds[number * layers + 1])
            positions = part.columns.token[rows].astype(np.int64)
            found.append(attention_s(setting.emulate, setting.hardware, PHASES[phase], positions))
        return found

    def _enter(self, phases: Array, tokens: Array, counts: Array) -> None:
        """Write the passes to the ledger."""
        ledger, top_k = self._engine.ledger, self._engine.geometry.top_k
        names = counts.dtype.names
        own = [counts[name].tolist() for name in names]
        rest = phases.tolist(), tokens[:, 0].tolist(), (tokens.sum(1) * top_k).tolist()
        for phase, num_tokens, requests, *values in zip(*rest, *own, strict=True):
            record = PassRecord(
                index=len(ledger.passes),
                phase=PHASES[phase],
                num_tokens=num_tokens,
                token_requests=requests,
                **dict(zip(names, values, strict=True)),
            )
            ledger.passes.append(record)

"""The engine of the virtual clock: events are served by the loop over tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lm_eval_moecache.algorithms.learned.data_aware import cost_of
from lm_eval_moecache.algorithms.learned.predictor import FREE, PredictorCost, costs, target_of
from lm_eval_moecache.engine import core
from lm_eval_moecache.engine.decide import Plan
from lm_eval_moecache.engine.engine import Engine, TokenPass, as_lists
from lm_eval_moecache.engine.host import HostStage
from lm_eval_moecache.engine.setting import AS_THEY_ARRIVE, Setting
from lm_eval_moecache.engine.tables import HasState, read
from lm_eval_moecache.engine.virtual import scanning
from lm_eval_moecache.engine.virtual.costs import Costs, attention_s
from lm_eval_moecache.engine.virtual.loop import (
    COUNTS,
    NO_WEIGHTS,
    NOTHING,
    NOTHING_PROPOSED,
    Loop,
    joined,
    records_of,
)
from lm_eval_moecache.records.arrays import FloatArray, IntArray
from lm_eval_moecache.records.event import NO_PREDICTIONS, Event, Fetch
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.jit import Array, dtype_of
from lm_eval_moecache.records.ledger import COUNTED, PassRecord
from lm_eval_moecache.records.selection import Selection
from lm_eval_moecache.trace.future import Future

LIVE_PASSES = 1500
"""What a live run is expected to have: enough to load machine code, not to make it."""
ANSWER_PASSES = 32
"""What an answer is expected to have, before any is known."""


_RUN: Any = dtype_of(core.RunState).names
_TOTALS = [_RUN.index(name) for name in ("moved", "busy_s", "evictions", "lifetime")]
"""Where a record of the run has what `Engine._totals` returns."""
OF_EVENTS = frozenset(COUNTED) - {"bytes_moved", "link_busy_s", "evictions", "lifetime_tokens"}
"""Counts that events add to; the others are differences of totals (`Engine.end_pass`)."""


class VirtualClock:
    """The tables' time."""

    def __init__(self, engine: HasState) -> None:
        self._engine = engine

    @property
    def now(self) -> float:
        return float(read(self._engine.state.run, 0, "now"))

    def synchronize(self) -> None:
        """Do nothing: every step was charged when it was taken."""


class VirtualLink:
    """The tables' link: one transfer at a time; each takes latency + bytes / bandwidth seconds.

    With `fifo` everything moves in order of issue: prefetches are neither overtaken by demands nor
    withdrawn when their event is over. This is CommitMoE's premise of transfers that "cannot be
    canceled once initiated".

    Where the profile has several lanes, or experts are read by projections, an event's demands move
    together over the lanes. Prefetches go one at a time, at the rate of one request.
    """

    num_issued = 0
    """Prefetches that hold cache bytes but are not yet counted as transfers: none."""

    def __init__(self, engine: HasState) -> None:
        self._engine = engine

    def _read(self, name: str) -> Any:
        return read(self._engine.state.run, 0, name)

    @property
    def bytes_moved(self) -> int:
        return int(self._read("moved"))

    @property
    def transfers(self) -> int:
        return int(self._read("transfers"))

    @property
    def busy_s(self) -> float:
        return float(self._read("busy_s"))

    @property
    def busy_until(self) -> float:
        return float(self._read("busy_until"))

    @property
    def inflight(self) -> int | None:
        """Key of the prefetch in flight, which lands at `busy_until`."""
        key = int(self._read("inflight"))
        return None if key < 0 else key

    @property
    def active(self) -> bool:
        """Whether a prefetch is in flight or queued."""
        return self.inflight is not None or self._read("queued") > 0


class VirtualEngine(Engine):
    """Serves an event in virtual time: `run` goes from its lookup to the end of its last expert.

    Once there is much to do, the tables become arrays and the loop runs in machine code. Passes
    that need nothing from Python in between are then served at their end; caches, link and clock
    are up to date after each pass.
    """

    is_virtual = True

    def __init__(
        self,
        geometry: Geometry,
        setting: Setting,
        future: Future | None = None,
        like: VirtualEngine | None = None,
    ) -> None:
        charged, hardware = setting.charged(geometry), setting.hardware
        self.costs: Costs = Costs(hardware, charged) if like is None else like.costs
        if setting.execute == AS_THEY_ARRIVE and len(charged.precision) > 1:
            raise ValueError(
                f"execute={setting.execute!r} is for a store of one precision, and this one has "
                f"{':'.join(charged.precision)}. Allowed: execute='together'."
            )
        # Without a future in them, the first tables of all engines of a setting are alike.
        tables = like.loop.initial() if like is not None and future is None else ()
        super().__init__(geometry, setting, self.costs, future, like, tables)
        prefetch, miss = self.rules.prefetch, self.rules.miss
        if miss.host_rule:
            self.outside.host = HostStage(miss.host_rule, hardware, charged, self.costs)
            self.outside.uploads = miss.uploads
        self.clock, self.link = VirtualClock(self), VirtualLink(self)
        self._predictor: Sequence[PredictorCost] = ()
        if prefetch.uses_predictor:
            assert prefetch.artifact is not None, "a predictor without its artifact"
            self._predictor = costs(prefetch.artifact)
        self.attention_s = 0.0
        """Seconds of each layer's attention to the context, in the pass in progress."""
        if self.draft_stage is not None:
            self.draft_stage.plan(charged, setting.capacity.bytes_by_partition)
        self.loop: Loop = Loop(self)
        if like is not None:
            self.loop.follow(like.loop)
        self._entered = 0
        """What is still to do with the event in progress before it can be closed."""
        self._dense_s, self._num_tokens = 0.0, 0
        """The dense part of the layer entered, and its tokens."""
        self._rows = np.arange(charged.num_layers + 1)
        self._bounds = self._rows * charged.top_k
        self._seconds_of: dict[str, Array] = {}
        self._scans = False
        """Whether machine code serves the text in progress."""
        self._fill()
        self._before = self._totals()

    def fresh(self, future: Future | None = None) -> VirtualEngine:
        """Return an engine of the same setting as it was before its first pass.

        `future` replaces this engine's, which offline algorithms need.
        """
        return VirtualEngine(self.own_geometry, self.setting, future, self)

    def watch_waves(self, on_wave: Callable[[Sequence[int]], object]) -> None:
        """Call `on_wave` with the keys of each wave once all are there, or run on the host."""
        self.loop.leave()
        self.outside.on_wave = on_wave
        self.state.run[0].watched = 1

    def record_spans(self, add_span: Callable[[str, float, float, int, int], object]) -> None:
        """Call `add_span` with all that clock, link and host do (see `Outside.add_span`)."""
        self.loop.leave()
        self.outside.add_span = add_span
        self.state.run[0].recorded = 1

    @property
    def needs_python(self) -> bool:
        """Whether machine code cannot serve an event."""
        return self._flags("hosts", "lanes", "piecewise") or self._is_followed

    @property
    def needs_events(self) -> bool:
        """Whether what the loop calls in Python looks at events."""
        return self.rank is None or self._flags("hosts", "lanes", "piecewise")

    def _flags(self, *names: str) -> bool:
        """Whether the tables say any of this, which keeps them from machine code."""
        return not self.loop.is_compiled and any(getattr(self.state.run[0], n) for n in names)

    @property
    def decides(self) -> bool:
        """Whether Python decides between an event's lookup and its loads, or looks on."""
        rules = self.rules
        return bool(rules.is_lossy or rules.ladder or self.on_event is not None)

    @property
    def is_stepwise(self) -> bool:
        """Whether events are served one by one, as Python acts or looks on in between."""
        return self.decides or self._is_followed

    @property
    def _is_followed(self) -> bool:
        acts = self.draft_stage is not None or self.rules.prefetch.predicts_pass
        return acts or self._flags("watched", "recorded")

    def expect(self, num_passes: int) -> None:
        """Note how many passes are to come."""
        if not self.needs_python:
            self.loop.expect(num_passes)

    def begin_pass(
        self,
        phase: str,
        num_tokens: int,
        predicted: Mapping[int, FloatArray] = NO_PREDICTIONS,
        positions: IntArray | None = None,
    ) -> PassRecord:
        if not (self.loop.is_compiled or self._is_open or self.needs_python):
            self.loop.expect(0, done=1)
        return super().begin_pass(phase, num_tokens, predicted, positions)

    def _recover(self) -> None:
        if self._is_open and self.loop.is_compiled:
            self.loop.end(self.record)
            self.loop.leave()
        super()._recover()

    def _count_pass(self, index: int, num_tokens: int) -> None:
        self.loop.step(core.BEGIN, self.loop.batch(num_tokens=num_tokens), index)

    def _follow(self, record: PassRecord, positions: IntArray | None = None) -> None:
        super()._follow(record)
        self.loop.begin(record)
        setting = self.setting
        if positions is not None and setting.emulate is not None:
            seconds = attention_s(setting.emulate, setting.hardware, record.phase, positions)
            self.attention_s = seconds

    def _predict_pass(self, event: Event) -> None:
        # A third-party prefetcher without an artifact has no known cost.
        artifact = self.rules.prefetch.artifact
        cost = FREE if artifact is None else cost_of(artifact)
        ready_s = self.clock.now + self.costs.network_s(cost, event.num_tokens)
        self._submit(event, ready_s)
        # The predictor reads the tokens before the first layer's dense part can run.
        core.wait_until(self.state, ready_s)

    def enter(self, layer: int, num_tokens: int) -> None:
        self._dense_s = self.costs.dense_s(layer, num_tokens) + self.attention_s
        self._entered, self._num_tokens = core.ENTER, num_tokens

    def _enter(self, layer: int) -> None:
        """Charge the layer's dense part, if that is still to do."""
        if self._entered:
            batch = self.loop.batch(num_tokens=self._num_tokens, dense_s=self._dense_s)
            self.loop.step(self._entered, batch, layer=layer)
            self._entered = 0

    def _look_up(self, plan: Plan) -> None:
        self._entered |= core.LOOK_UP
        if self.on_event is not None or plan.event is not plan.looked_up:
            batch = self._batch_of(plan.looked_up, dense_s=self._dense_s)
            self.loop.step(self._entered, batch, layer=plan.event.layer)
            self._entered = 0

    def _residents(self, layer: int) -> dict[int, int]:
        if self.rules.prefetches:
            # Some may arrive, and evict others, before the layer's router has decided.
            self._enter(layer)
        if not self.loop.is_compiled:
            return super()._residents(layer)
        base = self.geometry.key(layer, 0)
        flags = self.state.experts["resident"][base : base + self.geometry.num_experts]
        keys: list[int] = (flags.nonzero()[0] + base).tolist()
        if not self.rules.ladder:
            return dict.fromkeys(keys, 0)
        return dict(zip(keys, self.state.slots["level"][keys].tolist(), strict=True))

    def _missed(self, absent: Sequence[int]) -> list[int]:
        if not self.loop.is_compiled:
            return super()._missed(absent)
        keys, slots = np.array(absent, np.int64), self.state.slots
        missed: list[int] = keys[(slots["arriving"][keys] == 0) & (slots["due"][keys] < 0)].tolist()
        return missed

    def _mark_demands(self, event: Event, demands: Sequence[Fetch]) -> None:
        """Do nothing: the demands are marked when the event is closed."""

    def run(self, event: Event) -> Plan:
        rules, layer = self.rules, event.layer
        number = event.pass_index * self.geometry.num_layers + layer
        if self.decides:
            plan = self._decide(event)
        else:
            # Served in one step: Python has nothing to decide.
            plan, self._entered = Plan(event, event), self._entered | core.LOOK_UP
            self.outside.begin(event)
        event, demands = plan.event, plan.demands
        proposed: tuple[Sequence[int], Sequence[int]] = (), ()
        if rules.prefetches and (self.answers is not None or not rules.prefetch.predicts_pass):
            proposed = self._propose(event)
        predict_s = self.predicting_s(layer, len(event.predicted), event.num_tokens)
        batch = self._batch_of(event, *proposed, predict_s, self._dense_s)
        what = self._entered | core.CLOSE | (0 if demands is None else core.DEMAND)
        self._entered = 0
        self.loop.step(what, batch, number, layer, demands or ())
        if rules.ladder:
            plan.levels = self.loop.levels(event.keys)
        return plan

    def _batch_of(
        self,
        event: Event,
        proposed: Sequence[int] = (),
        proposed_levels: Sequence[int] = (),
        predict_s: float = 0.0,
        dense_s: float = 0.0,
    ) -> core.PassBatch:
        batch = super()._batch_of(event, proposed, proposed_levels, predict_s, dense_s)
        return self.loop.as_arrays(batch) if self.loop.is_compiled else as_lists(batch)

    def serve(self, token_pass: TokenPass) -> None:
        if self.is_stepwise:
            super().serve(token_pass)
            return
        index = self.record.index
        events = token_pass.events(index) if self.needs_events else None
        batch = self._batch_of_passes([token_pass], index)
        [counts] = self.serve_passes(batch, events).tolist()
        for name, value in zip(COUNTS, counts, strict=True):
            if value and name in OF_EVENTS:
                setattr(self.record, name, value)

    def serve_decoded(self, token_passes: Sequence[TokenPass]) -> None:
        if self.is_stepwise or self.needs_events or self.wants_positions:
            super().serve_decoded(token_passes)
            return
        if not token_passes:
            return
        self._recover()
        if not self.needs_python:
            self.loop.expect(len(token_passes))
        ledger = self.ledger
        first, size = len(ledger.passes), len(token_passes)
        counts = self.serve_passes(self._batch_of_passes(token_passes, first))
        phases = [token_pass.phase for token_pass in token_passes]
        ledger.enter(records_of(counts, first, phases, [1] * size))
        self._before, self._is_open = self._totals(), False

    def end_pass(self) -> None:
        self.loop.end(self.record)
        super().end_pass()

    def _batch_of_passes(self, token_passes: Sequence[TokenPass], first: int) -> core.PassBatch:
        """Return passes of one token each as a batch; `first` is the number of the first one."""
        num_layers, num_passes = self.geometry.num_layers, len(token_passes)
        assert all(len(each.keys) == num_layers for each in token_passes), "a pass lacks layers"
        keys = token_passes[0].keys.ravel()
        if num_passes > 1:
            keys = np.concatenate([each.keys.ravel() for each in token_passes])
        experts: Array = NOTHING
        weights: Array = NO_WEIGHTS
        if self.eviction.uses_weights:
            experts = keys % self.geometry.num_experts
            given = [each.weights.ravel() for each in token_passes if each.weights is not None]
            weights = np.concatenate(given)
        seconds = [self.seconds_of(each.phase) for each in token_passes]
        dense_s, predict_s = seconds[0] if num_passes == 1 else np.concatenate(seconds, axis=1)
        if self.attention_s:
            dense_s = dense_s + self.attention_s
        rows, bounds = self._rows, self._bounds
        if num_passes > 1:
            rows = np.arange(num_passes * num_layers + 1)
            bounds = rows * self.geometry.top_k
        proposed = self._proposed_in(token_passes, first)
        return core.PassBatch(
            first_pass=first,
            keys=keys,
            bounds=bounds,
            rows=rows,
            experts=experts,
            weights=weights,
            dense_s=dense_s,
            predict_s=predict_s,
            next_use=NOTHING,
            proposed=proposed[0],
            proposed_bounds=proposed[1],
            proposed_levels=NOTHING,
            num_passes=num_passes,
            warm=NOTHING,
        )

    def _proposed_in(self, token_passes: Sequence[TokenPass], first: int) -> tuple[Array, Array]:
        """Return the proposals at the events of some passes: keys, and their bounds by event."""
        prefetch = self.rules.prefetch
        if not prefetch.is_active:
            return NOTHING_PROPOSED
        merged = token_passes[0]
        if merged.predicted is not None:
            # Passes of one batch predict the same layers at each of theirs.
            if len(token_passes) > 1:
                merged = merged._replace(
                    targets=[layer for one in token_passes for layer in one.targets],
                    predicted=np.concatenate([one.predicted for one in token_passes]),
                )
            found = self._proposed_at(merged)
            if found is not None:
                return found
        proposals: list[Sequence[int]] = []
        for index, token_pass in enumerate(token_passes, first):
            # The pass in progress has begun already.
            if not self._is_open:
                prefetch.on_pass(index)
            proposals += [prefetch.propose(event) for event in token_pass.events(index)]
        return joined(proposals)

    def serve_passes(self, batch: core.PassBatch, events: Iterator[Event] | None = None) -> Array:
        """Serve a batch of passes; return their counts, as records of `core.PassCounts`.

        `events` are those of the passes, if the engine `needs_events`.
        """
        self.outside.events = events
        return self.loop.serve_passes(batch)

    def seconds_of(self, phase: str) -> Array:
        """Return `seconds` of a pass of one token."""
        if phase not in self._seconds_of:
            self._seconds_of[phase] = self.seconds(1, phase)
        return self._seconds_of[phase]

    def seconds(self, tokens: int, phase: str) -> Array:
        """Return the seconds of each layer's dense part and of its predictions: [2, layers]."""
        num_layers, prefetch = self.geometry.num_layers, self.rules.prefetch
        layers = range(num_layers)
        ahead = [min(self.depth, num_layers - 1 - layer) for layer in layers]
        if self.depth and prefetch.uses_predictor:
            ahead = [int(target_of(layer, num_layers, phase) is not None) for layer in layers]
        dense_s = [self.costs.dense_s(layer, tokens) for layer in layers]
        predict_s = [self.predicting_s(layer, ahead[layer], tokens) for layer in layers]
        return np.array([dense_s, predict_s])

    def predicting_s(self, layer: int, num_predicted: int, num_tokens: int) -> float:
        """Return the seconds of a layer's predictions, by gates or by a trained predictor."""
        if not self._predictor or not num_predicted:
            return self.costs.gates_s(num_predicted)
        return self.costs.network_s(self._predictor[layer], num_tokens)

    def waves(self) -> Iterator[tuple[Mapping[int, int], bool]]:
        """Yield nothing: `run` has executed the whole event."""
        return iter(())

    def time_load(self, count: int) -> float:
        latency_s, move_s = (
            read(self.state.run, 0, "latency_s"),
            read(self.state.levels, 0, "move_s"),
        )
        return float(count * (move_s + latency_s))

    def begin_scan(self, num_tokens: int) -> None:
        self._scans = scanning.can_scan(self, num_tokens)
        if not self._scans:
            self.loop.leave()
        super().begin_scan(num_tokens)

    def scan(self, event: Event) -> Selection | None:
        if self._scans:
            return scanning.scan(self, event, self._scanned, self._tokens_before)
        return super().scan(event)

    def _totals(self) -> tuple[float, ...]:
        if not self.loop.is_compiled:
            return super()._totals()
        values = self.state.run.item()  # one read of all takes as long as that of one
        return tuple([values[place] for place in _TOTALS])

    def _empty(self, warm: Sequence[int]) -> None:
        self.loop.step(core.RESET, self.loop.batch(warm=warm))

    def _fill(self) -> None:
        if self.warm:
            self._empty(self.warm)

    def flush(self) -> None:
        self.loop.step(core.SETTLE, self.loop.batch())

    def advance(self, seconds: float) -> None:
        core.wait_until(self.state, self.clock.now + seconds)
        core.drain(self.state, self.rank, self.clock.now, -1, 0)

    def await_prefetches(self) -> float:
        if not self.link.active:
            return 0.0
        core.drain(self.state, self.rank, math.inf, -1, 0)
        return core.wait_until(self.state, self.link.busy_until)

"""Live passes through the compiled loop: what the routers said, served when the pass is over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np

from lm_eval_moecache.engine.compiled import PassLoop, is_compiled, reason_against
from lm_eval_moecache.engine.core import Count, Piece
from lm_eval_moecache.engine.decide import Plan
from lm_eval_moecache.engine.engine import Engine, TokenPass
from lm_eval_moecache.engine.setting import Setting
from lm_eval_moecache.engine.virtual.clock import VirtualClock
from lm_eval_moecache.records.arrays import FloatArray, IntArray
from lm_eval_moecache.records.event import NO_PREDICTIONS, PHASES, Event
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.jit import Array, dtype_of
from lm_eval_moecache.records.ledger import PassRecord

_COUNTS = dtype_of(Count).names
_NOBODY, _NONE, _NO_WEIGHTS = np.zeros(0, np.int64), np.zeros(1, np.int64), np.zeros(0, np.float32)
_COLD, _GOES_ON = np.array([True]), np.array([False])


def live_engine(geometry: Geometry, setting: Setting, scans: bool = False) -> Engine:
    """Return an engine in virtual time for a live run, `scans` if some of its texts are scanned.

    A compiled one where a lossless policy lets it be, and nothing has to be compiled first: a run
    would stand still for that.
    """
    engine = Engine(geometry, setting)
    if reason_against(engine, scans) or not is_compiled():
        return engine
    return CompiledEngine(geometry, setting)


class CompiledEngine(Engine):
    """An engine that keeps the events of a pass, and serves them together at its end.

    Nothing that is computed depends on them (`only_counts`). Caches and link are brought up to date
    by `settle`, and with them what is asked of the whole run.
    """

    uncompiled = ""
    clock: VirtualClock

    def __init__(self, geometry: Geometry, setting: Setting) -> None:
        super().__init__(geometry, setting)
        self._passes = PassLoop(self, None)
        self._passes.compile()
        self._events: list[Event] = []
        self._told: TokenPass | None = None
        self._is_cold = False
        self._weighs = self.pools[0].eviction.uses_weights
        layers, top_k = self.geometry.num_layers, self.geometry.top_k
        self._of_one_token = np.arange(layers + 1) * top_k, np.arange(layers + 1)
        self._seconds_of: dict[str, tuple[Array, Array]] = {}
        self.enter, self.run = self._enter, self._keep

    def begin_pass(
        self,
        phase: str,
        num_tokens: int,
        foreseen: Mapping[int, FloatArray] = NO_PREDICTIONS,
        positions: IntArray | None = None,
    ) -> PassRecord:
        self.record = record = self.ledger.begin_pass(phase, num_tokens, self.clock.now)
        self.executor.begin_pass(record)
        if positions is not None:
            self.executor.attend(positions)
        self._events, self._told = [], None
        return record

    def _enter(self, layer: int, num_tokens: int) -> None:
        """Nothing happens before the end of the pass."""

    def _keep(self, event: Event) -> Plan:
        self._events.append(event)
        return Plan(event, (), (), event)

    def serve(self, told: TokenPass) -> None:
        self._told = told
        if told.proposed is None and self.rules.prefetch.is_active:
            self._events = told.events()

    def end_pass(self) -> None:
        record = self.record
        assert record is not None, "end_pass without begin_pass"
        piece = self._piece(record)
        [counted] = self._passes.run(piece, 1).tolist()
        for name, value in zip(_COUNTS, counted, strict=True):
            setattr(record, name, value)
        record.token_requests = self.geometry.top_k * int(piece.rows[-1])
        self.clock.now = record.end_s
        self._is_cold, self.record = False, None

    def _piece(self, record: PassRecord) -> Piece:
        """Return the pass as the loop takes it."""
        told, events = self._told, self._events
        proposed = (_NOBODY, _NONE) if told is None else told.proposed or (_NOBODY, _NONE)
        if events and self.rules.prefetch.is_active:
            proposed = _joined([self.rules.prefetch.propose(event) for event in events])
        bounds, rows = self._of_one_token
        if told is not None:
            assert len(told.keys) == len(rows) - 1, "a pass that lacks layers"
            keys, weights = told.keys.ravel(), told.weights
            experts = keys % self.geometry.num_experts if self._weighs else _NOBODY
        else:
            assert len(events) == len(rows) - 1, "a pass that lacks layers"
            keys, bounds = _joined([event.keys for event in events])
            rows = np.cumsum([0, *[event.num_tokens for event in events]])
            experts = np.concatenate([event.experts.ravel() for event in events])
            weights = np.concatenate([event.weights.ravel() for event in events])
        dense_s, predict_s = self._seconds(record)
        return Piece(
            first_pass=record.index,
            keys=keys,
            bounds=bounds,
            rows=rows,
            experts=experts,
            weights=_NO_WEIGHTS if weights is None else weights.ravel(),
            dense_s=dense_s,
            predict_s=predict_s,
            next_use=_NOBODY,
            proposed=proposed[0],
            proposed_bounds=proposed[1],
            cold=_COLD if self._is_cold else _GOES_ON,
            warm=self._passes.warm,
        )

    def _seconds(self, record: PassRecord) -> tuple[Array, Array]:
        """Return what the layers' dense parts take, and predicting from their inputs."""
        known = self._seconds_of.get(record.phase)
        if known is None or record.num_tokens > 1 or self.wants_positions:
            tokens, phase = record.num_tokens, PHASES.index(record.phase)
            dense_s = np.array(self._passes.dense_s(tokens, phase))
            known = dense_s, np.array(self._passes.predicting_s(tokens, phase))
            if tokens == 1:
                self._seconds_of[record.phase] = known
        return known

    def reset_cache(self) -> None:
        self._is_cold = True

    def settle(self) -> None:
        """Bring caches, link and clock up to date."""
        self._passes.finish()

    @property
    def peak_cache_bytes(self) -> int:
        self.settle()
        return super().peak_cache_bytes

    def check_integrity(self) -> None:
        self.settle()
        super().check_integrity()


def _joined(keys: Sequence[Sequence[int]]) -> tuple[IntArray, IntArray]:
    """Return keys in one array, and where each sequence of them begins and the last one ends."""
    return np.array([*chain.from_iterable(keys)], np.int64), np.cumsum([0, *map(len, keys)])

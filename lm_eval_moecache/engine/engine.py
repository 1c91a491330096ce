"""The engine of the virtual clock: one run's memory, ledger and algorithms, served pass by pass.

All that costs time, moves or evicts is in `engine.kernel`, entered by one door. Passes in which no
rule changes what the model computes are served whole, many at a time; in others each layer is
(`rows.Rows`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from lm_eval_moecache.algorithms.eviction.base import EvictionAlgorithm
from lm_eval_moecache.algorithms.learned.data_aware import cost_of
from lm_eval_moecache.algorithms.learned.predictor import PredictorCost, digest_of
from lm_eval_moecache.algorithms.prefetch.base import PrefetchAlgorithm
from lm_eval_moecache.engine.callbacks import Callbacks
from lm_eval_moecache.engine.costs import Costs, attention_s
from lm_eval_moecache.engine.draft_stage import DraftStage
from lm_eval_moecache.engine.kernel.serve import ADVANCE, FILL, HINT, SETTLE
from lm_eval_moecache.engine.kernel.state import COUNTS, Call
from lm_eval_moecache.engine.memory import Cache, door, make_memory
from lm_eval_moecache.engine.rows import Proposed, Rows, records_of
from lm_eval_moecache.engine.rules import Rules, make_evictions
from lm_eval_moecache.engine.setting import (
    AS_THEY_ARRIVE,
    CONTEXT,
    Setting,
    no_draft_error,
    offline_error,
)
from lm_eval_moecache.records.arrays import FloatArray, IntArray, Weigh, softmax_weights
from lm_eval_moecache.records.batch import Batch
from lm_eval_moecache.records.event import (
    DECODE,
    NO_PREDICTIONS,
    PASS_START,
    Event,
)
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.ledger import Ledger, PassRecord, RequestRecord
from lm_eval_moecache.records.memory import address_of, make_record
from lm_eval_moecache.records.selection import Selection
from lm_eval_moecache.trace.future import Future


class Engine:
    """Serves the passes of a run in virtual time.

    `future` holds a replay's events to come, which offline algorithms need.
    """

    is_virtual: ClassVar[bool] = True
    """Whether time is computed."""

    def __init__(
        self,
        geometry: Geometry,
        setting: Setting,
        future: Future | None = None,
        like: Engine | None = None,
    ) -> None:
        """`like` is an engine of the same setting, whose artifacts and costs are shared."""
        # The model's own sizes, and those it is charged by, which differ under `emulate`.
        self.setting, self.own_geometry = setting, geometry
        self.geometry = geometry = setting.charged(geometry)
        if setting.execute == AS_THEY_ARRIVE and len(geometry.precision) > 1:
            raise ValueError(
                f"execute={setting.execute!r} is for a store of one precision, and this one has "
                f"{':'.join(geometry.precision)}. Allowed: execute='together'."
            )
        self.ledger = Ledger()
        known = None if like is None else like.rules
        self.rules: Rules = Rules(geometry, setting.policy, setting.seed, known)
        evictions = make_evictions(geometry, setting)
        self.future, self.eviction = future, evictions[0]
        self._check_algorithms(evictions)
        self._make(evictions, like)
        self.pools: Sequence[Any]
        shared = len(self.pools) == 1
        self.caches: Sequence[Cache] = [*self.pools] * (geometry.num_layers if shared else 1)
        """Layer -> its cache: one shared by all layers, or one each."""
        self.draft_stage: DraftStage | None = None
        self._num_batches = 0
        if setting.draft is not None:
            stage = self.rules.prefetch.draft_stage
            self.draft_stage = DraftStage(setting.draft, setting.hardware, self, stage)
            if self.is_virtual:
                self.draft_stage.plan(geometry, setting.capacity.bytes_by_partition)
        self.num_adopted = 0
        """How many of its passes another engine has adopted."""
        self._adopted_peak, self._adopted_bytes = 0, 0
        self._warm = self._warm_keys()
        if self._warm:
            self._fill()

    def _make(self, evictions: Sequence[EvictionAlgorithm], like: Engine | None) -> None:
        """Make what serves: memory and caches, and rows of this engine alone."""
        geometry, setting = self.geometry, self.setting
        self.costs: Costs = Costs(setting.hardware, geometry) if like is None else like.costs
        if like is None:
            given = geometry, setting, self.rules, evictions, self.costs, self.depth
            self._first_memory = make_memory(*given)
        else:
            self._first_memory = like._first_memory
        self.memory = self._first_memory.copy()
        self.callbacks = Callbacks(self.memory, evictions, self.rules)
        if self.eviction.is_offline and self.future is not None:
            self.memory.experts["next_use"] = self.future.first_use
        self.pools = [Cache(self.memory, index) for index in range(len(evictions))]
        # A reference back would keep the engine, and a device's memory.
        self.alone = Rows([weakref.proxy(self)])
        """Serves passes of this engine layer by layer."""

    def _fill(self) -> None:
        """Fill the empty caches with the most used experts; no pass is charged for them."""
        self._settle(FILL, keys=np.array(self._warm, np.int64))

    def _check_algorithms(self, evictions: Sequence[EvictionAlgorithm]) -> None:
        """Refuse algorithms that lack what they need, and hand over the future."""
        prefetch = self.rules.prefetch
        seers: list[PrefetchAlgorithm | EvictionAlgorithm] = [prefetch, *evictions]
        for algorithm in seers:
            if algorithm.is_offline and self.future is None:
                raise offline_error(algorithm)
            if self.future is not None:
                algorithm.prepare(self.future)
        if self.setting.draft is None and prefetch.needs_draft:
            raise no_draft_error(prefetch)

    def _warm_keys(self) -> list[int]:
        """Return what a reset cache starts with, in order of loading."""
        profile = self.setting.warm
        if profile is None:
            return []
        profile.check(self.own_geometry)
        return [key for pool in self.pools for key in pool.warm_keys(profile.hottest)]

    def fresh(self, future: Future | None = None) -> Engine:
        """Return an engine of the same setting as it was before its first pass.

        `future` replaces this engine's, which offline algorithms need.
        """
        return Engine(self.own_geometry, self.setting, future, self)

    def close(self) -> None:
        """Do nothing: there is no thread to end."""

    def waves(self) -> Iterator[tuple[Mapping[int, int], bool]]:
        """Yield nothing: experts are executed where they are."""
        yield from ()

    @property
    def now(self) -> float:
        """Seconds since the run began."""
        return float(self.memory.run.now)

    @property
    def num_passes(self) -> int:
        """Number of passes served so far, and of the next one."""
        return len(self.ledger.passes)

    @property
    def can_defer(self) -> bool:
        """Whether passes may be served whole, once the model has computed them.

        That requires decisions that do not affect the model's computation: lossless algorithms and
        a single precision.
        """
        return not (self.rules.is_lossy or self.rules.ladder)

    @property
    def wants_weights(self) -> bool:
        """Whether events need the router's weights."""
        rules, eviction = self.rules, self.eviction
        looks = any(a.uses_weights for a in (rules.routing, rules.miss, eviction))
        return looks or any(a.uses_logits for a in (rules.prefetch, rules.miss, eviction))

    @property
    def wants_logits(self) -> bool:
        """Whether events need `logits` as well."""
        return self.weighs_changes or self.rules.prefetch.uses_logits

    @property
    def weighs_changes(self) -> bool:
        """Whether events of changed selections need the gate scores of their new experts.

        An eviction that uses weights needs them, whatever the other algorithms use.
        """
        rules, eviction = self.rules, self.eviction
        use_logits = any(a.uses_logits for a in (rules.routing, rules.miss, eviction))
        return use_logits or (eviction.uses_weights and rules.is_lossy)

    @property
    def wants_positions(self) -> bool:
        """Whether passes are charged by their tokens' positions in their sequences."""
        return self.setting.attention == CONTEXT

    @property
    def depth(self) -> int:
        """How many layers ahead the gates have to predict at each event."""
        return int(max(self.rules.routing.depth, self.rules.prefetch.depth))

    @property
    def predictor_digest(self) -> str:
        """Digest of the trained predictor behind predictions; empty for the model's gates."""
        return self.prefetch_digest if self.rules.prefetch.uses_predictor else ""

    @property
    def prefetch_digest(self) -> str:
        """Digest of the prefetcher's trained artifact; empty where it has none."""
        artifact = self.rules.prefetch.artifact
        return "" if artifact is None else digest_of(artifact)

    @property
    def peak_cache_bytes(self) -> int:
        """Peak bytes held (summed over layers where each has its own cache)."""
        return int(max(self._adopted_peak, sum(pool["peak"] for pool in self.pools)))

    def merge(self, other: Engine, requests: Sequence[RequestRecord] = ()) -> None:
        """Enter what another engine of this setting has served, as passes of these requests."""
        passes = other.ledger.passes[other.num_adopted :]
        other.num_adopted += len(passes)
        self.ledger.merge(passes, requests)
        self._adopted_peak = max(self._adopted_peak, other.peak_cache_bytes)
        self._adopted_bytes += sum(record.bytes_moved for record in passes)

    # Whole passes.

    def serve(
        self,
        batch: Batch,
        proposed: Proposed | None = None,
        next_use: IntArray | None = None,
        predicted: Mapping[int, FloatArray] = NO_PREDICTIONS,
        ahead: IntArray | None = None,
    ) -> None:
        """Serve passes; each becomes one of the ledger.

        `proposed` is what is prefetched at their events, where that is known already; `next_use`,
        for offline rules, when each event's keys are needed next; `predicted` are the logits of all
        layers, for prefetchers that predict passes, and `ahead` is what one has proposed.
        """
        rows, step = self.alone, batch.num_layers
        is_drafted = self.draft_stage is not None and self.draft_stage.is_open
        if rows.by_loop and not (is_drafted or self.rules.prefetch.predicts_pass):
            first, counts = self.num_passes, rows.serve(batch, proposed, next_use)
            self.ledger.enter(records_of(counts[0], first, batch.phase, batch.tokens_of_passes))
            return
        for index, num_tokens in enumerate(batch.tokens_of_passes):
            positions = None if batch.positions is None else batch.positions[index]
            self.begin_pass(batch.phase, num_tokens, predicted, positions, ahead)
            for number in range(index * step, (index + 1) * step):
                known = None
                if proposed is not None:
                    known = proposed[0][slice(*proposed[1][number : number + 2].tolist())]
                rows.choose(batch.at(number), proposed=known)
            self.end_pass()

    # Passes layer by layer.

    def begin_pass(
        self,
        phase: str,
        num_tokens: int,
        predicted: Mapping[int, FloatArray] = NO_PREDICTIONS,
        positions: IntArray | None = None,
        proposed: IntArray | None = None,
    ) -> None:
        """Begin a pass; `predicted` are its layers' logits, for prefetchers that predict passes.

        `positions` are those of its tokens [tokens], if `wants_positions`; `proposed` is what such
        a prefetcher proposes, where that is known already.
        """
        stage, rows = self.draft_stage, self.alone
        seconds = None if positions is None else [self.attention_s(phase, positions)]
        is_drafted = stage is not None and stage.is_open
        rows.begin(phase, [num_tokens], seconds, is_noted=is_drafted)
        if stage is not None and is_drafted:
            count = rows.counts[0]
            count["start_s"], count["stall_s"] = stage.start_s, stage.stall_s
            count["draft_s"] = self.now - stage.start_s
            stage.is_open = False
        self._num_tokens = num_tokens
        if self.rules.prefetch.predicts_pass:
            self._predict_pass(phase, num_tokens, predicted, proposed)

    def _predict_pass(
        self,
        phase: str,
        num_tokens: int,
        predicted: Mapping[int, FloatArray],
        proposed: IntArray | None,
    ) -> None:
        """Prefetch by the predictions of the whole pass: an event of layer `PASS_START`."""
        artifact = self.rules.prefetch.artifact
        # A third-party prefetcher without an artifact has no known cost.
        cost, seconds = PredictorCost() if artifact is None else cost_of(artifact), 0.0
        if self.is_virtual:
            seconds = self.costs.network_s(cost, num_tokens)
        keys = proposed
        if keys is None:
            nothing = np.zeros((num_tokens, 0), np.int64)
            given = PASS_START, phase, [self.num_passes], self.geometry.num_experts, nothing
            event = Event(*given, predicted=predicted)
            keys = self.rules.propose(self.rules.prefetch, event)
        number = self.num_passes * self.geometry.num_layers
        self._settle(HINT, keys=keys, number=number, seconds=seconds)

    def end_pass(self) -> PassRecord:
        """End the pass, and enter it into the ledger."""
        self.alone.finish([self._num_tokens])
        return self.ledger.passes[-1]

    def attention_s(self, phase: str, positions: IntArray) -> float:
        """Return the seconds of each layer's attention to the context in a pass."""
        setting = self.setting
        assert setting.emulate is not None, "attention to the context of no known model"
        return attention_s(setting.emulate, setting.hardware, phase, positions)

    def next_uses(self, events: Iterable[Event]) -> IntArray:
        """Return when the keys of events are needed next, in order of need."""
        assert self.future is not None, "an offline rule without a future"
        needs = list[int]()
        for event in events:
            after = event.pass_index * self.geometry.num_layers + event.layer + 1
            needs += [self.future.rank_from(key, after) for key in event.keys]
        return np.array(needs, np.int64)

    # Texts whose tokens are routed one after another.

    def begin_scan(self, num_tokens: int) -> None:
        """Begin a text whose tokens are routed one after another, as if decoded."""
        assert len(self.pools) == self.geometry.num_layers, "scanning without a cache per layer"
        self._scanned = np.zeros(num_tokens, COUNTS)  # type: ignore[call-overload]
        self._scanned["start_s"] = self._scanned["end_s"] = self.now
        self._tokens_before = self.memory.run.tokens

    def scan(self, batch: Batch, weigh: Weigh = softmax_weights) -> Selection | None:
        """Serve one layer for all tokens of the text, each as an event of its own.

        A layer's cache sees its tokens in order whether layers or tokens go first, so with one
        cache per layer and no prefetching every count equals that of decoding the text. So do the
        times: each token's pass gets the seconds of its own events.
        """
        self.memory.run.tokens = self._tokens_before
        text, rows = replace(batch, phase=DECODE, bounds=None), self.alone
        self.callbacks.scanned_layer = text.first_layer
        try:
            if rows.by_loop:
                rows.serve(text, scanned=self._scanned)
                return rows.changed(text.experts)
            choices: list[tuple[int, Selection | None]] = []
            for token in range(text.num_events):
                rows.begin_token(self.num_passes + token, self._scanned[token : token + 1])
                choices.append((1, rows.choose(text.at(token), weigh)))
                rows.end_token()
            return Selection.join(text.experts, choices)
        finally:
            self.callbacks.scanned_layer = None

    def end_scan(self) -> None:
        """End the text: all layers of its tokens have been executed."""
        counts, first = self._scanned, self.num_passes
        self.ledger.enter(records_of(counts, first, DECODE, [1] * len(counts)))

    # Between passes.

    def begin_draft(self) -> DraftStage:
        """Begin drafting; its time and evictions are attributed to the next pass."""
        assert self.draft_stage is not None, "drafting without a draft"
        self.draft_stage.begin(self.num_passes)
        self.alone.begin(DECODE, [0])
        return self.draft_stage

    def submit_draft(self, keys: IntArray, pass_index: int, batched: bool) -> None:
        """Queue one layer's keys, proposed while drafting for a pass that has not yet begun."""
        self._num_batches += 1
        number, batch = pass_index * self.geometry.num_layers, -1
        if batched:
            batch = self._num_batches
        self._settle(HINT, keys=keys, number=number, batch=batch)

    def settle_drafts(self, drafted: int, accepted: int) -> None:
        """Record how many drafted tokens the last pass verified, and how many it accepted."""
        record = self.ledger.passes[-1]
        record.drafted, record.accepted = drafted, accepted

    def advance(self, seconds: float) -> None:
        """Advance by the draft's compute time, while the link works on."""
        self._settle(ADVANCE, seconds=seconds)

    def await_prefetches(self) -> float:
        """Wait until all prefetches have arrived; return the seconds waited."""
        return self._settle(SETTLE)

    def time_load(self, count: int) -> float:
        """Return the seconds that loading `count` experts of the first layer takes."""
        move_s = float(self.memory.levels["move_s"][0])
        return float(count * (move_s + self.memory.run.latency_s))

    def _settle(
        self,
        what: int,
        keys: IntArray | None = None,
        number: int = 0,
        batch: int = -1,
        seconds: float = 0.0,
    ) -> float:
        rows = np.array([self.memory.run.address])
        call = make_record(Call, what=what, rows=address_of(rows), number=number, batch=batch)
        call.seconds = seconds
        if keys is not None:
            call.keys, call.num_keys = address_of(keys), len(keys)
        door()(address_of(call))
        self.callbacks.finish()
        return float(call.seconds) if what == SETTLE else 0.0

    def check_integrity(self) -> None:
        """Assert the conservation laws of caches, link and ledger."""
        for pool in self.pools:
            pool.check_integrity()
        run = self.memory.run
        counted = sum(record.bytes_moved for record in self.ledger.passes)
        moved = run.moved_before + self._adopted_bytes
        assert counted == moved, f"ledger has {counted} bytes, link {moved}"
        loads = sum(pool["loads"] for pool in self.pools)
        assert loads == run.transfers, f"{loads} loads, {run.transfers} transfers"

"""The engine: one run's caches, link, clock, ledger and algorithms, driven pass by pass.

What both clocks share is here: `VirtualEngine` is in `engine.virtual.engine`, `WallEngine` in
`engine.wall.engine`.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice, pairwise
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from lm_eval_moecache.algorithms.eviction.base import EvictionAlgorithm
from lm_eval_moecache.algorithms.learned.predictor import digest_of
from lm_eval_moecache.algorithms.prefetch.base import PrefetchAlgorithm
from lm_eval_moecache.engine import core
from lm_eval_moecache.engine.decide import Plan, Rules, copy_state, resolve, route
from lm_eval_moecache.engine.draft_stage import DraftStage
from lm_eval_moecache.engine.outside import Outside
from lm_eval_moecache.engine.setting import CONTEXT, Setting, no_draft_error, offline_error
from lm_eval_moecache.engine.tables import ExpertCache, is_ranked, make_evictions, make_state, read
from lm_eval_moecache.engine.virtual.costs import Costs
from lm_eval_moecache.records.arrays import FloatArray, IntArray
from lm_eval_moecache.records.event import (
    DECODE,
    DROPPED,
    NO_PREDICTIONS,
    PASS_START,
    PREFILL,
    Event,
    Fetch,
)
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.jit import Table, compile_midway
from lm_eval_moecache.records.ledger import Ledger, PassRecord, RequestRecord
from lm_eval_moecache.records.selection import Selection
from lm_eval_moecache.trace.future import Future

_TOTALS = ("bytes_moved", "link_busy_s", "evictions", "lifetime_tokens")
"""What a pass counts as the difference of totals before and after it (ints, seconds as floats)."""


class TokenPass(NamedTuple):
    """The router choices of a pass of one token, whose events are served together at its end."""

    phase: str
    keys: IntArray
    """Chosen experts, [layers, top_k] in router order."""
    experts: IntArray | None = None
    """The same within their layers, where algorithms look at weights; else None."""
    weights: FloatArray | None = None
    """Their weights, [layers, top_k]; None where no algorithm uses them."""
    logits: FloatArray | None = None
    """[layers, experts]; None where no algorithm uses them."""
    targets: Sequence[Sequence[int]] = ()
    """By layer, the layers that it predicts; empty where it predicts none."""
    predicted: FloatArray | None = None
    """The predictions of all layers in turn, [predictions, experts]."""
    position: int = 0
    """The token's position in its sequence, where passes are charged by it."""

    def events(self, index: int) -> Iterator[Event]:
        """Yield the events of the pass with this number, one per layer."""
        predictions = iter(() if self.predicted is None else self.predicted[:, None])
        for layer, keys in enumerate(self.keys.tolist()):
            fields: dict[str, Any] = {}
            if self.experts is not None and self.weights is not None:
                fields["experts"] = self.experts[layer : layer + 1]
                fields["weights"] = self.weights[layer : layer + 1]
            if self.logits is not None:
                fields["logits"] = self.logits[layer : layer + 1]
            if self.targets:
                targets = self.targets[layer]
                fields["predicted"] = dict(
                    zip(targets, islice(predictions, len(targets)), strict=True)
                )
            yield Event(index, layer, self.phase, 1, keys, **fields)


class Clock(Protocol):
    """The time of a run in seconds, monotonic."""

    @property
    def now(self) -> float: ...

    def synchronize(self) -> None:
        """Return once all work that the pass has launched is done, so that `now` includes it."""


class Engine(ABC):
    """Serves passes: `begin_pass`, then for each layer `enter`, `run` and the `waves`, `end_pass`.

    It calls the tables' functions (`engine.core`), the link and the algorithms; none of them calls
    back. `future` holds a replay's events to come, which offline algorithms need.
    """

    is_virtual: ClassVar[bool] = False
    """Whether time is computed: events take machine time for bookkeeping only."""
    clock: Clock
    link: Any
    """What both clocks' links report: `busy_s`, `bytes_moved`, `transfers`, `num_issued`."""

    def __init__(
        self,
        geometry: Geometry,
        setting: Setting,
        costs: Costs | None = None,
        future: Future | None = None,
        like: Engine | None = None,
        tables: Sequence[Table] = (),
    ) -> None:
        """`tables` are those of a state before the first pass, if there are any already."""
        # The model's own sizes, and those it is charged by, which differ under `emulate`.
        self.setting, self.own_geometry = setting, geometry
        self.geometry = geometry = setting.charged(geometry)
        self.ledger = Ledger()
        known = None if like is None else like.rules
        self.rules: Rules = Rules(geometry, setting.policy, setting.seed, known)
        rules = self.rules
        if not self.is_virtual:
            compile_midway(True)
            rules.get_ready()
        compile_midway(self.is_virtual)
        evictions = make_evictions(geometry, setting)
        seers: list[PrefetchAlgorithm | EvictionAlgorithm] = [rules.prefetch, *evictions]
        for algorithm in seers:
            if algorithm.is_offline and future is None:
                raise offline_error(algorithm)
            if future is not None:
                algorithm.prepare(future)
        if setting.draft is None and rules.prefetch.needs_draft:
            raise no_draft_error(rules.prefetch)
        self.future, self.eviction = future, evictions[0]
        rules.reads_changed_weights = any(
            a.uses_weights for a in (rules.miss, self.eviction)
        ) or any(a.uses_logits for a in (rules.prefetch, rules.miss, self.eviction))
        # A reference back would keep the engine and a wall clock's slots alive.
        engine = weakref.proxy(self)
        self.outside = Outside(setting, evictions, geometry, lambda: engine.state)
        self.state = (
            core.State(*[*tables, (), self.outside])
            if tables
            else make_state(geometry, setting, rules, evictions, costs, self.outside)
        )
        self.rank: Any = None
        """The rank of the residents; None where the evictions keep a state of their own."""
        if is_ranked(self.eviction):
            self.rank = self.eviction.plain_rank  # type: ignore[attr-defined]
            if self.eviction.is_offline and future is not None:
                first_use = future.first_use.tolist()
                for expert, first in zip(self.state.experts, first_use, strict=True):
                    expert.next_use = first
        self.pools: Sequence[ExpertCache] = self._make_pools()
        shared = len(self.pools) == 1
        self.caches: Sequence[ExpertCache] = [*self.pools] * (geometry.num_layers if shared else 1)
        """Layer -> its cache: one shared by all layers, or one each."""
        self.warm = self._warm_keys()
        """What a reset cache starts with, in order of loading."""
        self.answers: Iterator[Sequence[int]] | None = None
        """The proposals of the coming events where they are known already; None: ask."""
        self._num_batches = 0
        self.draft_stage: DraftStage | None = None
        if setting.draft is not None:
            stage = rules.prefetch.draft_stage
            self.draft_stage = DraftStage(setting.draft, setting.hardware, self, stage)
        self.record = PassRecord(-1, PREFILL, 0, 0.0)
        """The record of the current or last pass."""
        self.on_event: Callable[[Event], None] | None = None
        """Called with each event once its experts are known, before anything moves."""
        self._is_open = False
        self.num_adopted = 0
        """How many of its passes another engine has adopted."""
        self._adopted_peak, self._adopted_bytes = 0, 0
        self._scanned: list[PassRecord] = []
        self._before: tuple[float, ...] = ()

    def _make_pools(self) -> Sequence[ExpertCache]:
        evictions = self.outside.evictions
        return [ExpertCache(self, index, rule) for index, rule in enumerate(evictions)]

    def _warm_keys(self) -> list[int]:
        profile = self.setting.warm
        if profile is None:
            return []
        profile.check(self.own_geometry)
        return [key for pool in self.pools for key in pool.warm_keys(profile.hottest)]

    def fresh(self) -> Engine:
        """Return an engine of the same setting as it was before its first pass."""
        raise AssertionError("an engine on the wall clock is the only one of its device")

    def close(self) -> None:
        """End background threads (the wall clock's worker). Safe to call twice."""
        return

    @property
    def wants_weights(self) -> bool:
        """Whether events need `experts` and `weights` even where a pass has one token."""
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
    def can_defer(self) -> bool:
        """Whether the events of a pass may be served together at its end.

        That requires decisions that do not affect the model's computation and no clock running
        meanwhile: lossless algorithms and a single precision, in virtual time. The model's hooks
        then only record the router choices (one copy to the host for all layers) for `serve`.
        """
        return self.is_virtual and not (self.rules.is_lossy or self.rules.ladder)

    @property
    def depth(self) -> int:
        """How many layers ahead the gates have to predict at each event."""
        return max(self.rules.routing.depth, self.rules.prefetch.depth)

    @property
    def predictor_digest(self) -> str:
        """Digest of the trained predictor behind `Event.predicted`; empty for the model's gates."""
        return self.prefetch_digest if self.rules.prefetch.uses_predictor else ""

    @property
    def prefetch_digest(self) -> str:
        """Digest of the prefetcher's trained artifact; empty where it has none."""
        artifact = self.rules.prefetch.artifact
        return "" if artifact is None else digest_of(artifact)

    @property
    def peak_cache_bytes(self) -> int:
        """Peak bytes held (summed over layers where each has its own cache)."""
        return max(self._adopted_peak, sum(pool.peak_bytes for pool in self.pools))

    def merge(self, other: Engine, requests: Sequence[RequestRecord] = ()) -> None:
        """Enter what another engine of this setting has served, as passes of these requests."""
        passes = other.ledger.passes[other.num_adopted :]
        other.num_adopted += len(passes)
        self.ledger.merge(passes, requests)
        self._adopted_peak = max(self._adopted_peak, other.peak_cache_bytes)
        self._adopted_bytes += sum(record.bytes_moved for record in passes)

    def begin_draft(self) -> DraftStage:
        """Begin drafting; its time and evictions are attributed to the next pass."""
        assert self.draft_stage is not None, "drafting without a draft"
        index = len(self.ledger.passes)
        self.draft_stage.begin(index)
        core.begin_pass(self.state, index, 0)
        return self.draft_stage

    def submit_draft(self, keys: Sequence[int], pass_index: int, batched: bool) -> None:
        """Queue one layer's keys, proposed while drafting for a pass that has not yet begun."""
        self._num_batches += 1
        proposed, first = core.Keys(keys, 0, len(keys)), pass_index * self.geometry.num_layers
        now, batch = self.clock.now, self._num_batches if batched else -1
        core.submit_keys(self.state, proposed, [0] * len(keys), first, PASS_START, now, batch)

    @abstractmethod
    def advance(self, seconds: float) -> None:
        """Advance by the draft's compute time, while the link works on."""

    @abstractmethod
    def await_prefetches(self) -> float:
        """Wait until all prefetches have arrived; return the seconds waited."""

    def begin_pass(
        self,
        phase: str,
        num_tokens: int,
        predicted: Mapping[int, FloatArray] = NO_PREDICTIONS,
        positions: IntArray | None = None,
    ) -> PassRecord:
        """Begin a pass; `predicted` are its layers' logits, for prefetchers that predict passes.

        `positions` are those of its tokens [tokens], if `wants_positions`.
        """
        self._recover()
        stage = self.draft_stage
        if stage is not None and stage.is_open:
            record = self.ledger.begin_pass(phase, num_tokens, stage.start_s)
            record.draft_s = self.clock.now - stage.start_s
            record.stall_s = stage.stall_s
            self.state.run[0].tokens += num_tokens
            stage.is_open = False
        else:
            record = self.ledger.begin_pass(phase, num_tokens, self.clock.now)
            self._count_pass(record.index, num_tokens)
        self._follow(record, positions)
        self._is_open = True
        if self.rules.prefetch.predicts_pass:
            self._predict_pass(
                Event(record.index, PASS_START, phase, num_tokens, (), predicted=predicted)
            )
        return record

    def _count_pass(self, index: int, num_tokens: int) -> None:
        core.begin_pass(self.state, index, num_tokens)

    def _follow(self, record: PassRecord, positions: IntArray | None = None) -> None:
        """Attribute what follows to this pass, whose tokens have these positions."""
        self.record = record
        self.rules.routing.on_pass(record.index)
        self.rules.prefetch.on_pass(record.index)

    def _predict_pass(self, event: Event) -> None:
        """Prefetch by the predictions of the whole pass: an event of layer `PASS_START`."""
        self._submit(event, self.clock.now)

    def _submit(self, event: Event, ready_s: float) -> None:
        """Queue the prefetcher's proposals at an event, which are ready at `ready_s`."""
        keys, levels = self._propose(event)
        first_event = event.pass_index * self.geometry.num_layers
        proposed = core.Keys(keys, 0, len(keys))
        core.submit_keys(self.state, proposed, levels, first_event, event.layer, ready_s, -1)

    def _propose(self, event: Event) -> tuple[Sequence[int], Sequence[int]]:
        """Return the prefetcher's proposals, and their precision levels if not all are the best.

        With a precision ladder the miss algorithm chooses the levels; resident and pending experts
        keep theirs.
        """
        answers, rules = self.answers, self.rules
        keys = rules.prefetch.propose(event) if answers is None else next(answers)
        miss = rules.lossy_miss(event) if rules.ladder else None
        if miss is None:
            return keys, [0] * len(keys)
        by_layer: dict[int, list[int]] = {}
        for key in keys:
            by_layer.setdefault(key // self.geometry.num_experts, []).append(key)
        levels: dict[int, int] = {}
        for layer, layer_keys in by_layer.items():
            chosen = miss.prefetch_levels(event, layer, layer_keys)
            levels.update(zip(layer_keys, chosen, strict=True))
        return keys, [levels[key] for key in keys]

    def _recover(self) -> None:
        """Clean up after a pass that broke off, if any, before the next one begins."""
        if self._is_open:
            # Nobody cancels what was due at the events that the pass did not reach.
            core.cancel_due(self.state, len(self.ledger.passes) * self.geometry.num_layers - 1)

    @abstractmethod
    def enter(self, layer: int, num_tokens: int) -> None:
        """Note that the layer's router has just decided."""

    @abstractmethod
    def run(self, event: Event) -> Plan:
        """Decide an event and begin its transfers; call `enter` first."""

    @abstractmethod
    def waves(self) -> Iterator[tuple[Mapping[int, int], bool]]:
        """Yield, as they arrive, the keys that the event of the last `run` has still to execute.

        Each key comes with its slot, which holds its weights until the next wave is requested. The
        flag is True where the wave is the whole event. The iterator must be exhausted.
        """

    @abstractmethod
    def time_load(self, count: int) -> float:
        """Return the seconds that loading `count` experts of the first layer takes.

        Measured on the wall clock, before the first pass; no pass counts it, and caches keep their
        contents.
        """

    @abstractmethod
    def flush(self) -> None:
        """Empty the link: drop queued prefetches and land those in flight."""

    def _decide(self, event: Event) -> Plan:
        """Decide an event and record its lookups in the ledger, before anything moves."""
        rules, plan = self.rules, Plan(event, event)
        if rules.is_lossy:
            original, resident = event.spelled_out(rules.num_experts), self._residents(event.layer)
            plan = Plan(original, original)
            if rules.applies(rules.routing, original):
                plan = route(original, rules, resident)
            absent = [key for key in plan.looked_up.keys if key not in resident]
            missed = absent
            if rules.prefetches:
                missed = self._missed(absent)
            resolve(plan, original, rules, absent, missed, resident, self.record)
        self._look_up(plan)
        if self.on_event is not None:
            self.on_event(plan.looked_up)
        self.outside.begin(plan.event)
        if plan.demands is not None:
            self._mark_demands(plan.event, plan.demands)
        return plan

    def _mark_demands(self, event: Event, demands: Sequence[Fetch]) -> None:
        """Demand these experts instead of those that were looked up and are absent."""
        keys, levels = [key for key, _ in demands], [level for _, level in demands]
        executed, demanded = (
            core.Keys(event.keys, 0, len(event.keys)),
            core.Keys(keys, 0, len(keys)),
        )
        core.demand(self.state, executed, event.layer, demanded, levels)

    def _missed(self, absent: Sequence[int]) -> list[int]:
        """Return those of these keys of which no prefetch is in flight or queued."""
        slots = self.state.slots
        return [key for key in absent if not slots[key].arriving and slots[key].due < 0]

    def _residents(self, layer: int) -> dict[int, int]:
        """Return the layer's resident keys with their precision levels."""
        experts, slots, base = self.state.experts, self.state.slots, self.geometry.key(layer, 0)
        held = range(base, base + self.state.layers[layer].held)
        return {key: slots[key].level for key in (experts[place].member for place in held)}

    def _look_up(self, plan: Plan) -> None:
        """Look up the keys of a decided event."""
        looked_up = self._event_of(plan.looked_up)
        self.state.run[0].absent = core.look_up(self.state, looked_up, self.record)

    def _event_of(self, event: Event) -> core.BatchEvent:
        """Return an event as the only one of a batch, in plain Python."""
        number = event.pass_index * self.geometry.num_layers + event.layer
        return core.event_of(as_lists(self._batch_of(event)), 0, number, event.layer)

    def _batch_of(
        self,
        event: Event,
        proposed: Sequence[int] = (),
        proposed_levels: Sequence[int] = (),
        predict_s: float = 0.0,
        dense_s: float = 0.0,
    ) -> core.PassBatch:
        """Return a batch of one event; its experts and weights may be arrays."""
        next_use: Sequence[int] = ()
        if self.eviction.is_offline and self.future is not None:
            after = event.pass_index * self.geometry.num_layers + event.layer + 1
            next_use = [self.future.rank_from(key, after) for key in event.keys]
        experts: Any = ()
        if event.num_tokens > 1 or self.rules.is_lossy or self.eviction.uses_weights:
            base = self.geometry.key(event.layer, 0)
            experts = event.experts.ravel()
            if len(experts) != event.num_tokens * self.rules.top_k:
                experts = experts.tolist() or [key - base for key in event.keys]
                experts += [DROPPED] * (event.num_tokens * self.rules.top_k - len(experts))
        return core.PassBatch(
            first_pass=event.pass_index,
            keys=event.keys,
            bounds=(0, len(event.keys)),
            rows=(0, event.num_tokens),
            experts=experts,
            weights=event.weights.ravel() if self.eviction.uses_weights else (),
            dense_s=(dense_s,),
            predict_s=(predict_s,),
            next_use=next_use,
            proposed=proposed,
            proposed_bounds=(0, len(proposed)),
            proposed_levels=proposed_levels,
            num_passes=1,
            warm=(),
        )

    def serve(self, token_pass: TokenPass) -> None:
        """Serve the deferred events of a pass of one token."""
        proposed = self._proposed_at(token_pass)
        if proposed is not None:
            self.answers = proposals_by_event(*proposed)
        try:
            for event in token_pass.events(self.record.index):
                self.enter(event.layer, event.num_tokens)
                self.run(event)
        finally:
            self.answers = None

    def _proposed_at(self, token_pass: TokenPass) -> tuple[IntArray, IntArray] | None:
        """Return all keys that the prefetcher proposes in a pass, and their bounds by layer.

        None where it must be asked at every event. A layer proposes nothing where it predicts none.
        """
        if token_pass.predicted is None:
            return None
        targets = [target for layer in token_pass.targets for target in layer]
        found = self.rules.prefetch.propose_arrays(targets, token_pass.predicted)
        if found is None:
            return None
        keys, counts = found
        ends = np.append(0, np.cumsum(counts))
        bounds = np.cumsum([0, *map(len, token_pass.targets)])
        return keys, ends[bounds]

    def serve_decoded(self, token_passes: Sequence[TokenPass]) -> None:
        """Serve passes of one token each, in order; each becomes a pass of the ledger."""
        for token_pass in token_passes:
            positions = np.array([token_pass.position]) if self.wants_positions else None
            self.begin_pass(token_pass.phase, 1, positions=positions)
            self.serve(token_pass)
            self.end_pass()

    def end_pass(self) -> None:
        """End the pass: record its time, and what link and caches counted since the last one."""
        assert self._is_open, "end_pass without begin_pass"
        self.clock.synchronize()
        record, after = self.record, self._totals()
        record.end_s = self.clock.now
        _count(record, self._before, after)
        self._before, self._is_open = after, False

    def settle_drafts(self, drafted: int, accepted: int) -> None:
        """Record how many drafted tokens the last pass verified, and how many it accepted."""
        record = self.ledger.passes[-1]
        record.drafted, record.accepted = drafted, accepted

    def begin_scan(self, num_tokens: int) -> None:
        """Begin a text whose tokens are routed one after another, as if decoded."""
        self._recover()
        now = self.clock.now
        self._scanned = [self.ledger.begin_pass(DECODE, 1, now) for _ in range(num_tokens)]
        self._tokens_before = int(read(self.state.run, 0, "tokens"))
        for record in self._scanned:
            record.end_s = now

    def scan(self, event: Event) -> Selection | None:
        """Serve one layer for all tokens of the text, each as an event of its own.

        A layer's cache sees its tokens in order whether layers or tokens go first, so with one
        cache per layer and no prefetching every count equals that of decoding the text. So do the
        times: each token's pass gets the seconds of its own events.
        """
        assert len(self.pools) == self.geometry.num_layers, "scanning without a cache per layer"
        base, run = event.layer * self.geometry.num_experts, self.state.run[0]
        choices: list[tuple[int, Selection | None]] = []
        for token, record in enumerate(self._scanned):
            run.tokens = self._tokens_before + token
            core.begin_token(self.state, record.index, event.layer)
            self._follow(record)
            start_s, before = self.clock.now, self._totals()
            self.enter(event.layer, 1)
            choices.append((1, self.run(event.of_token(token, record.index, base)).selection))
            record.end_s += self.clock.now - start_s
            _count(record, before, self._totals())
        return Selection.join(event.experts, choices)

    def end_scan(self) -> None:
        """End the text: all layers of its tokens have been executed."""
        self._scanned = []
        self._before = self._totals()

    def restart(self) -> None:
        """Start anew for another request: cache, link and the state of every rule.

        What `fresh` does with another engine, for the one that holds a device's memory.
        """
        self.reset_cache(warm=False)
        setting, geometry = self.setting, self.geometry
        evictions = make_evictions(geometry, setting)
        self.rules.restart(setting.policy, setting.seed)
        for eviction, new in zip(self.outside.evictions, evictions, strict=True):
            copy_state(eviction, new)
        initial = make_state(geometry, setting, self.rules, evictions, None, self.outside)
        for table, values in zip(self.state[:4], initial[:4], strict=True):
            for entry, value in zip(table, values, strict=True):
                for name in entry.__slots__:
                    setattr(entry, name, getattr(value, name))
        self._fill()

    def reset_cache(self, warm: bool = True) -> None:
        """Empty the link and restore the initial caches: as `warm` says, or empty."""
        self.flush()
        before = self._totals()
        self._empty(self.warm if warm else ())
        # A reset's evictions are not the policy's.
        after = self._totals()
        self._before = tuple(
            b + (a - o) for b, a, o in zip(self._before, after, before, strict=True)
        )

    def _empty(self, warm: Sequence[int]) -> None:
        """Restore the initial caches; the link is empty."""
        core.reset(self.state, ())
        if warm:
            self._fill()

    def _fill(self) -> None:
        """Fill the caches with the most used experts; no pass is charged the time or the bytes."""
        core.fill(self.state, self.warm)

    def check_integrity(self) -> None:
        """Assert the conservation laws of caches, link and ledger."""
        for pool in self.pools:
            pool.check_integrity()
        counted = sum(record.bytes_moved for record in self.ledger.passes)
        is_open = self._is_open or (self.draft_stage is not None and self.draft_stage.is_open)
        moved = self.link.bytes_moved + self._adopted_bytes
        assert is_open or counted == moved, f"ledger has {counted} bytes, link {moved}"
        loads = sum(pool.loads for pool in self.pools)
        transfers = self.link.transfers + self.link.num_issued
        assert loads == transfers, f"{loads} loads, {transfers} transfers"

    def _totals(self) -> tuple[float, ...]:
        """Return the link's and the caches' totals, as in `_TOTALS`."""
        run, link = self.state.run, self.link
        evictions, lifetime = read(run, 0, "evictions"), read(run, 0, "lifetime")
        return link.bytes_moved, link.busy_s, evictions, lifetime


def as_lists(batch: core.PassBatch) -> core.PassBatch:
    """Return a batch of one event in the form that plain Python is fastest on."""
    experts, weights = batch.experts, batch.weights
    if len(experts) and not isinstance(experts, list):
        batch = batch._replace(experts=experts.tolist())
    return batch._replace(weights=weights.tolist()) if len(weights) else batch


def proposals_by_event(keys: IntArray, bounds: IntArray) -> Iterator[Sequence[int]]:
    """Return the proposals of each event in turn, given all of them and their bounds by event."""
    values, ends = keys.tolist(), bounds.tolist()
    return (values[start:stop] for start, stop in pairwise(ends))


def _count(record: PassRecord, before: Sequence[float], after: Sequence[float]) -> None:
    """Add the differences of two totals to a pass's record."""
    for name, old, new in zip(_TOTALS, before, after, strict=True):
        if new != old:
            setattr(record, name, getattr(record, name) + (new - old))

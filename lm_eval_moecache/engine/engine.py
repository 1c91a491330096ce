"""The engine: one run's cache, link, clock, ledger and algorithms, driven pass by pass.

`VirtualEngine` is here, `WallEngine` in `engine.wall.engine`: each has its own clock and link.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from itertools import pairwise
from typing import ClassVar, NamedTuple

from lm_eval_moecache.algorithms.eviction.base import EvictionAlgorithm
from lm_eval_moecache.algorithms.prefetch.base import PrefetchAlgorithm
from lm_eval_moecache.engine.cache import Clock, ExpertCache, Link
from lm_eval_moecache.engine.decide import Plan, Prefetches, Rules, decide
from lm_eval_moecache.engine.draft_stage import DraftStage
from lm_eval_moecache.engine.host import HostStage
from lm_eval_moecache.engine.setting import (
    AS_THEY_ARRIVE,
    CONTEXT,
    FIFO,
    Setting,
    offline,
    without_draft,
)
from lm_eval_moecache.engine.virtual.link import (
    VirtualClock,
    VirtualLink,
    attention_s,
    read_shares,
)
from lm_eval_moecache.records.arrays import FloatArray, IntArray
from lm_eval_moecache.records.data_aware import cost_of
from lm_eval_moecache.records.event import (
    DECODE,
    NO_PREDICTIONS,
    PASS_START,
    PREFILL,
    Event,
    Fetch,
    num_assignments,
)
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.jit import compile_midway
from lm_eval_moecache.records.ledger import Ledger, PassRecord
from lm_eval_moecache.records.predictor import FREE, PredictorCost, costs, digest_of
from lm_eval_moecache.records.selection import Selection
from lm_eval_moecache.trace.future import Future

_NOTHING: frozenset[int] = frozenset()
_TOTALS = ("bytes_moved", "link_busy_s", "evictions", "lifetime_tokens")
"""What a pass counts as the difference of totals before and after it (ints, seconds as floats)."""


class TokenPass(NamedTuple):
    """The router choices of a pass of one token, whose events are served together at its end."""

    keys: IntArray
    """Chosen experts, [layers, top_k] in router order."""
    weights: FloatArray | None
    """Their weights, [layers, top_k]; None where no algorithm uses them."""
    proposed: tuple[IntArray, IntArray] | None
    """All keys that the prefetcher proposes, and their bounds by layer [layers + 1]; None where it
    must be asked at every event."""
    events: Callable[[], list[Event]]
    """Builds the events of the pass, one per layer."""


class Engine(ABC):
    """Serves passes: `begin_pass`, then for each layer `enter`, `run` and the `waves`, `end_pass`.

    It calls the caches, the link and the algorithms; none of them calls back. `future` holds a
    replay's events to come, which offline algorithms need.
    """

    is_virtual: ClassVar[bool] = False
    """Whether time is computed: events take machine time for bookkeeping only."""
    uncompiled: str = "a live run"
    """Why passes are served event by event; empty where a compiled loop serves them."""

    def __init__(
        self,
        geometry: Geometry,
        setting: Setting,
        pools: Sequence[ExpertCache],
        link: Link,
        clock: Clock,
        future: Future | None = None,
    ) -> None:
        # The model's own sizes, and those it is charged by, which differ under `emulate`.
        self.setting, self.own_geometry = setting, geometry
        self.geometry = geometry = setting.charged(geometry)
        self.pools, self.link, self.clock = pools, link, clock
        self.caches: Sequence[ExpertCache] = (
            [*pools] if len(pools) > 1 else [*pools] * geometry.num_layers
        )
        """Layer -> its cache: one shared by all layers, or one each."""
        self.ledger = Ledger()
        self.rules = rules = Rules(geometry, setting.policy, setting.seed)
        compile_midway(self.is_virtual)
        seers: list[PrefetchAlgorithm | EvictionAlgorithm] = [pool.eviction for pool in pools]
        for algorithm in [rules.prefetch, *seers]:
            if algorithm.is_offline and future is None:
                raise offline(algorithm)
            if future is not None:
                algorithm.prepare(future)
        if setting.draft is None and rules.prefetch.needs_draft:
            raise without_draft(rules.prefetch)
        self.prefetches = Prefetches(geometry, self.caches, link, rules)
        self.draft_stage: DraftStage | None = None
        if setting.draft is not None:
            self.draft_stage = DraftStage(
                setting.draft,
                setting.hardware,
                clock,
                self.prefetches,
                rules.prefetch.draft_stage,
                self._advance,
                self._await_prefetches,
            )
        self.record = PassRecord(-1, PREFILL, 0, 0.0)
        """The record of the current or last pass."""
        self.on_event: Callable[[Event], None] | None = None
        """Called with each event once its experts are known, before anything moves."""
        self._is_open = False
        self._scanned: list[PassRecord] = []
        self._warm()
        self._before: tuple[float, ...] = self._totals()

    def _warm(self) -> None:
        """Fill the caches with the most used experts; no pass is charged the time or the bytes."""
        profile = self.setting.warm
        if profile is None:
            return
        profile.check(self.own_geometry)
        caches, num_experts = self.caches, self.geometry.num_experts
        for pool in self.pools:
            pool.warm(key for key in profile.hottest if caches[key // num_experts] is pool)

    def close(self) -> None:
        """End background threads (the wall clock's worker). Safe to call twice."""
        return

    @property
    def wants_weights(self) -> bool:
        """Whether events need `experts` and `weights` even where a pass has one token."""
        rules, eviction = self.rules, self.pools[0].eviction
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
        rules, eviction = self.rules, self.pools[0].eviction
        use_logits = any(a.uses_logits for a in (rules.routing, rules.miss, eviction))
        return use_logits or (eviction.uses_weights and rules.may_change)

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
        return self.is_virtual and not (self.rules.may_change or self.rules.ladder)

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
        return sum(pool.peak_bytes for pool in self.pools)

    def begin_draft(self) -> DraftStage:
        """Begin drafting; its time and evictions are attributed to the next pass."""
        assert self.draft_stage is not None, "drafting without a draft"
        index = len(self.ledger.passes)
        self.draft_stage.begin(index)
        for pool in self.pools:
            pool.begin_pass(index, 0)
        return self.draft_stage

    def begin_pass(
        self,
        phase: str,
        num_tokens: int,
        foreseen: Mapping[int, FloatArray] = NO_PREDICTIONS,
        positions: IntArray | None = None,
    ) -> PassRecord:
        """Begin a pass; `foreseen` are its layers' predicted logits, for prefetchers that use them.

        `positions` are those of its tokens [tokens], if `wants_positions`.
        """
        self._recover()
        stage = self.draft_stage
        if stage is not None and stage.is_open:
            record = self.ledger.begin_pass(phase, num_tokens, stage.start_s)
            record.draft_s = self.clock.now - stage.start_s
            record.stall_s = stage.stall_s
            for pool in self.pools:
                pool.tokens += num_tokens
            stage.is_open = False
        else:
            record = self.ledger.begin_pass(phase, num_tokens, self.clock.now)
            for pool in self.pools:
                pool.begin_pass(record.index, num_tokens)
        self._follow(record, positions)
        self._is_open = True
        if self.rules.prefetch.foresees:
            self._foresee(
                Event(record.index, PASS_START, phase, num_tokens, (), predicted=foreseen)
            )
        return record

    def _follow(self, record: PassRecord, positions: IntArray | None = None) -> None:
        """Attribute what follows to this pass, whose tokens have these positions."""
        self.record = record
        self.rules.routing.on_pass(record.index)
        self.rules.prefetch.on_pass(record.index)

    def _foresee(self, event: Event) -> None:
        """Prefetch by the predictions of the whole pass: an event of layer `PASS_START`."""
        self.prefetches.submit(event, self.clock.now)

    def _recover(self) -> None:
        """Clean up after a pass that broke off, if any, before the next one begins."""
        return

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
    def settle(self) -> None:
        """Empty the link: drop queued prefetches and land those in flight."""

    @abstractmethod
    def _advance(self, seconds: float) -> None:
        """Advance by the draft's compute time, while the link works on."""

    @abstractmethod
    def _await_prefetches(self) -> float:
        """Wait until all prefetches have arrived; return the seconds waited."""

    def _look_up(self, event: Event, cache: ExpertCache) -> Plan:
        """Decide an event and record its lookups in the ledger, before anything moves."""
        plan = decide(event, self.rules, cache, self.link)
        record = self.record
        record.requests += len(plan.looked_up.keys)
        record.token_requests += event.num_tokens * self.rules.top_k
        if plan.absent or plan.selection is not None:
            plan.write_to(record)
        if self.rules.prefetches:
            if cache.unused_prefetches:
                record.prefetch_hits += cache.use_prefetched(plan.looked_up.keys)
            self.prefetches.judge(plan.looked_up, record)
        if self.on_event is not None:
            self.on_event(plan.looked_up)
        return plan

    def serve(self, token_pass: TokenPass) -> None:
        """Serve the deferred events of a pass of one token."""
        prefetches = self.prefetches
        if token_pass.proposed is not None:
            keys, bounds = (array.tolist() for array in token_pass.proposed)
            prefetches.answers = (keys[start:stop] for start, stop in pairwise(bounds))
        try:
            for event in token_pass.events():
                self.enter(event.layer, event.num_tokens)
                self.run(event)
        finally:
            prefetches.answers = None

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
        for record in self._scanned:
            record.end_s = now

    def scan(self, event: Event) -> Selection | None:
        """Serve one layer for all tokens of the text, each as an event of its own.

        A layer's cache sees its tokens in order whether layers or tokens go first, so with one
        cache per layer and no prefetching every count equals that of decoding the text. So do the
        times: each token's pass gets the seconds of its own events.
        """
        assert len(self.pools) == self.geometry.num_layers, "scanning without a cache per layer"
        pool, base = self.pools[event.layer], event.layer * self.geometry.num_experts
        choices: list[Selection | None] = []
        for token, record in enumerate(self._scanned):
            pool.begin_pass(record.index, 1)
            self._follow(record)
            start_s, before = self.clock.now, self._totals(pool)
            self.enter(event.layer, 1)
            choices.append(self.run(event.of_token(token, record.index, base)).selection)
            record.end_s += self.clock.now - start_s
            _count(record, before, self._totals(pool))
        return Selection.join(event.experts, choices)

    def end_scan(self) -> None:
        """End the text: all layers of its tokens have been executed."""
        self._scanned = []
        self._before = self._totals()

    def reset_cache(self) -> None:
        """Empty the link and restore the initial caches, cold or warm (`cache_reset`)."""
        self.settle()
        before = self._totals()
        for pool in self.pools:
            pool.clear()
        self._warm()
        # A reset's evictions are not the policy's.
        after = self._totals()
        self._before = tuple(
            b + (a - o) for b, a, o in zip(self._before, after, before, strict=True)
        )

    def check_integrity(self) -> None:
        """Assert the conservation laws of caches, link and ledger."""
        for pool in self.pools:
            pool.check_integrity()
        counted = sum(record.bytes_moved for record in self.ledger.passes)
        is_open = self._is_open or (self.draft_stage is not None and self.draft_stage.is_open)
        assert is_open or counted == self.link.bytes_moved, (
            f"ledger has {counted} bytes, link {self.link.bytes_moved}"
        )
        loads = sum(pool.loads for pool in self.pools)
        transfers = self.link.transfers + self.link.num_issued
        assert loads == transfers, f"{loads} loads, {transfers} transfers"

    def _totals(self, *pools: ExpertCache) -> tuple[float, ...]:
        """Return the link's and these caches' (by default all caches') totals, as in `_TOTALS`."""
        counted_pools = pools or self.pools
        return (
            self.link.bytes_moved,
            self.link.busy_s,
            sum([pool.evictions for pool in counted_pools]),
            sum([pool.lifetime_tokens for pool in counted_pools]),
        )


def _count(record: PassRecord, before: Sequence[float], after: Sequence[float]) -> None:
    """Add the differences of two totals to a pass's record."""
    for name, old, new in zip(_TOTALS, before, after, strict=True):
        if new != old:
            setattr(record, name, getattr(record, name) + (new - old))


class VirtualEngine(Engine):
    """Serves an event in virtual time: `run` goes from its lookup to the end of its last expert."""

    is_virtual = True
    clock: VirtualClock
    link: VirtualLink

    def __init__(self, geometry: Geometry, setting: Setting, future: Future | None = None) -> None:
        charged, hardware = setting.charged(geometry), setting.hardware
        pools = [
            ExpertCache(size, setting.policy.eviction.build(charged, setting.seed), charged)
            for size in setting.capacity.bytes_by_partition
        ]
        link = VirtualLink(hardware, setting.link == FIFO, setting.reads_per_expert)
        super().__init__(geometry, setting, pools, link, VirtualClock(hardware, charged), future)
        rules, prefetch = self.rules, self.rules.prefetch
        self._as_they_arrive = setting.execute == AS_THEY_ARRIVE
        if self._as_they_arrive and rules.ladder:
            raise ValueError(
                f"execute={setting.execute!r} is for a store of one precision, and this one has "
                f"{':'.join(charged.precision)}. Allowed: execute='together'."
            )
        self._in_batches = not setting.is_one_server
        self._shares = read_shares(setting.reads_per_expert)
        self._arrivals: dict[int, Sequence[float]] = {}
        """Key demanded by the event in progress -> arrival times of its reads."""
        self._prefetching, self._ladder = rules.prefetches, rules.ladder
        self._num_layers, self._num_experts = charged.num_layers, charged.num_experts
        self._after_layer = rules.prefetches and prefetch.after_layer
        self._predictor: Sequence[PredictorCost] = ()
        if prefetch.uses_predictor:
            assert prefetch.artifact is not None, "a predictor without its artifact"
            self._predictor = costs(prefetch.artifact)
        self._host: HostStage | None = None
        if rule := rules.miss.host_rule:
            self._host = HostStage(rule, hardware, charged, link, self.clock)
        if self.draft_stage is not None:
            self.draft_stage.plan(charged, setting.capacity.bytes_by_partition)
        self._uploading: dict[int, float] = {}
        """Key resident by an upload not yet waited for -> its arrival time."""
        self._loaded_bytes = 0
        """Loaded, with the compute's overhead (`load_overhead_s_per_byte`) still to be charged."""
        self._levels: dict[int, int] = {}
        """Key executed by the event in progress -> its precision level."""
        self.on_wave: Callable[[Sequence[int]], object] = lambda keys: None
        """Called with the keys of each wave once all are resident, or executed on the host."""

    def _follow(self, record: PassRecord, positions: IntArray | None = None) -> None:
        super()._follow(record)
        setting = self.setting
        if positions is not None and setting.emulate is not None:
            seconds = attention_s(setting.emulate, setting.hardware, record.phase, positions)
            self.clock.attention_s = seconds

    def _foresee(self, event: Event) -> None:
        # A third-party prefetcher without an artifact has no known cost.
        artifact = self.rules.prefetch.artifact
        cost = FREE if artifact is None else cost_of(artifact)
        ready_s = self.clock.now + self.clock.network(cost, event.num_tokens)
        self.prefetches.submit(event, ready_s)
        # The predictor reads the tokens before the first layer's dense part can run.
        self.clock.wait_until(ready_s)

    def enter(self, layer: int, num_tokens: int) -> None:
        self.clock.dense(layer, num_tokens)
        if self._prefetching and self.link.active:
            self._drain(self.clock.now, _NOTHING, layer)
        self._charge_loads()

    def run(self, event: Event) -> Plan:
        cache = self.caches[event.layer]
        plan = self._look_up(event, cache)
        if not self._ladder:
            self._carry_out(plan, cache)
            cache.eviction.on_event(plan.event)
            return plan
        plan.levels = self._levels = {}
        self._carry_out(plan, cache)
        cache.eviction.on_levels(plan.event, plan.levels)
        return plan

    def waves(self) -> Iterator[tuple[Mapping[int, int], bool]]:
        """Yield nothing: `run` has executed the whole event."""
        return iter(())

    def time_load(self, count: int) -> float:
        return count * self.link.duration_s(self.geometry.expert_bytes[0][0])

    def settle(self) -> None:
        self.link.clear()
        self.prefetches.forget()
        if self.link.inflight is not None:
            self.clock.wait_until(self.link.busy_until)
            self._land()

    def _advance(self, seconds: float) -> None:
        self.clock.wait_until(self.clock.now + seconds)
        if self.link.active:
            self._drain(self.clock.now, _NOTHING, 0)

    def _await_prefetches(self) -> float:
        if not self.link.active:
            return 0.0
        self._drain(math.inf, _NOTHING, 0)
        return self.clock.wait_until(self.link.busy_until)

    def _carry_out(self, plan: Plan, cache: ExpertCache) -> None:
        """Load the demands, execute the event, and advance the prefetches."""
        event, demands, link, clock = plan.event, plan.demands, self.link, self.clock
        prefetches, layer = self._prefetching, event.layer
        gate_s = ready_s = clock.now
        on_device, remaining = event, event.keys
        pinned = set(event.keys) if demands or prefetches else _NOTHING
        if demands:
            ready_s, on_device, remaining = self._load(plan, cache, pinned)
            if self.rules.miss.cached_first:
                # The compute is busy from here on: predictions do not hide behind the wait.
                predict_s = self.predicting_s(layer, len(event.predicted), event.num_tokens)
                clock.wait_until(clock.now + predict_s)
                awaited = {fetch.key for fetch in demands}
                self._execute(on_device, [key for key in remaining if key not in awaited])
                remaining = [key for key in remaining if key in awaited]
        if self._uploading:
            arrivals = [
                self._uploading.pop(key, 0.0) for key in event.keys if key in cache.resident
            ]
            self.record.stall_s += clock.await_link(max(arrivals, default=0.0))
        if prefetches and link.active:
            link.cancel_due(event.pass_index * self._num_layers + layer)
        if demands and not self._as_they_arrive:
            self.record.stall_s += clock.await_link(ready_s)
        if prefetches:
            ready_s = gate_s + self.predicting_s(layer, len(event.predicted), event.num_tokens)
            if not self._after_layer:
                self.prefetches.submit(event, ready_s)
            clock.wait_until(ready_s)
        if demands and self._as_they_arrive:
            self._execute_arriving(on_device, remaining)
        else:
            self._execute(on_device, remaining)
        if self._host is not None and self._host.is_open:
            self._end_host(self._host, plan, cache, pinned)
        if self._after_layer:
            self.prefetches.submit(event, clock.now)
        if prefetches and link.active:
            self._drain(clock.now, pinned, layer)

    def predicting_s(self, layer: int, num_predicted: int, num_tokens: int) -> float:
        """Return the seconds of a layer's predictions, by gates or by a trained predictor."""
        if not self._predictor or not num_predicted:
            return self.clock.gates(num_predicted)
        return self.clock.network(self._predictor[layer], num_tokens)

    def _load(
        self, plan: Plan, cache: ExpertCache, pinned: Set[int]
    ) -> tuple[float, Event, Sequence[int]]:
        """Load the demands that the host does not take, in waves where they do not fit together.

        Experts that fit together move together. Returns the arrival time of the last one, the event
        without the host's part, and the keys that remain to be executed.
        """
        clock = self.clock
        ready_s, fetches = self._what_is_under_way(plan, cache, pinned)
        if self._in_batches:
            under_way = {fetch.key for fetch in plan.demands} - {fetch.key for fetch in fetches}
            self._arrivals = {key: [ready_s] * len(self._shares) for key in under_way}
        event, fetches = self._share_out(plan, cache, fetches)
        self._loaded_bytes += sum([cache.size_of(key, level) for key, level in fetches])
        ready_s = max(ready_s, self._charge_loads())
        remaining, wave = event.keys, list[tuple[int, int]]()
        for key, level in fetches:
            nbytes = cache.size_of(key, level)
            if not cache.make_room(nbytes, pinned, event.layer, key):
                ready_s = self._move(wave, ready_s)
                wave, executed = [], [k for k in remaining if k in cache.resident]
                remaining = [k for k in remaining if k not in cache.resident]
                self.record.stall_s += clock.await_link(ready_s)
                self._execute(event, executed)
                cache.eviction.on_executed(event.layer, executed)
                self._arrivals = {}
                ready_s, pinned = clock.now, set(remaining)
                has_room = cache.make_room(nbytes, pinned, event.layer, key)
                assert has_room, f"no room for one expert of {nbytes} bytes after its wave"
            wave.append((key, nbytes))
            cache.insert(key, level)
        return self._move(wave, ready_s), event, remaining

    def _charge_loads(self) -> float:
        """Charge the compute's overhead of what was loaded, prefetches included; return the time.

        Prefetches that land while it is busy are charged at the next event.
        """
        if self._loaded_bytes:
            self.clock.load(self._loaded_bytes)
            self._loaded_bytes = 0
        return self.clock.now

    def _what_is_under_way(
        self, plan: Plan, cache: ExpertCache, pinned: Set[int]
    ) -> tuple[float, Sequence[Fetch]]:
        """Land the transfers that precede the demands; return when, and the demands left."""
        fetches, link, ready_s = plan.demands, self.link, self.clock.now
        if link.fifo and link.active:
            demanded = {fetch.key for fetch in fetches}
            ready_s = max(ready_s, self._work_off(demanded, pinned, plan.event.layer))
            fetches = [f for f in fetches if cache.resident.get(f.key, f.level + 1) > f.level]
            cache.unused_prefetches -= pinned
        elif link.inflight is not None:
            # It lands before any demand can start, while the compute waits.
            if link.inflight in pinned:
                ready_s = link.busy_until
            # No longer a demand: a wave may execute and evict it before its turn comes.
            fetches = [f for f in fetches if cache.arriving.get(f.key, f.level + 1) > f.level]
            self._land()
            cache.unused_prefetches -= pinned
        return ready_s, fetches

    def _share_out(
        self, plan: Plan, cache: ExpertCache, fetches: Sequence[Fetch]
    ) -> tuple[Event, Sequence[Fetch]]:
        """Give the host its part; return the event without it, and the loads left to the link."""
        event, link = plan.event, self.link
        if self._host is not None and fetches:
            event, fetches = self._host.begin(event, fetches, self.record)
            elsewhere = [key for key in plan.event.keys if key not in event.keys]
            self.on_wave(elsewhere)
            if self._ladder:
                self._levels.update(dict.fromkeys(elsewhere, 0))
        if self._ladder:
            # Residents at too low a level for this event, about to be loaded again.
            for key, level in fetches:
                if key in cache.resident:
                    assert cache.resident[key] > level, f"key {key} is resident at {level} already"
                    cache.release_for_upgrade(key)
        if (plan.late or self._ladder) and link.active and not link.fifo:
            link.withdraw_queued([key for key, _ in fetches])
        return event, fetches

    def _move(self, wave: Sequence[tuple[int, int]], ready_s: float) -> float:
        """Move these (key, bytes) from `ready_s` on; return the arrival time of the last one."""
        if not self._in_batches:
            for _, nbytes in wave:
                ready_s = self.link.transfer(nbytes, ready_s)
            return ready_s
        if not wave:
            return ready_s
        landed = self.link.batch([nbytes for _, nbytes in wave], ready_s)
        self._arrivals |= {key: times for (key, _), times in zip(wave, landed, strict=True)}
        return max(ready_s, self.link.busy_until)

    def _execute_arriving(self, event: Event, keys: Sequence[int]) -> None:
        """Execute projection by projection: residents first, the others as each read arrives."""
        arriving = {key: self._arrivals[key] for key in keys if key in self._arrivals}
        present = [key for key in keys if key not in arriving]
        self.on_wave(keys)
        launched = False
        for part, share in enumerate(self._shares):
            order = [(0.0, present)] if present else []
            order += sorted((times[part], [key]) for key, times in arriving.items())
            for at_s, ready_keys in order:
                self.record.stall_s += self.clock.await_link(at_s)
                assignments = num_assignments(event, ready_keys, self._num_experts)
                self.clock.experts(event.layer, len(ready_keys), assignments, 0, launched, share)
                launched = True

    def _execute(self, event: Event, keys: Sequence[int]) -> None:
        """Charge the execution of resident keys; each precision level has kernels of its own."""
        self.on_wave(keys)
        if not self._ladder:
            assignments = num_assignments(event, keys, self._num_experts)
            self.clock.experts(event.layer, len(keys), assignments)
            return
        resident = self.caches[event.layer].resident
        by_level: dict[int, list[int]] = {}
        for key in keys:
            level = self._levels[key] = resident[key]
            by_level.setdefault(level, []).append(key)
        for level, level_keys in sorted(by_level.items()):
            assignments = num_assignments(event, level_keys, self._num_experts)
            self.clock.experts(event.layer, len(level_keys), assignments, level)
            self.record.low_precision += assignments if level else 0

    def _end_host(self, host: HostStage, plan: Plan, cache: ExpertCache, pinned: Set[int]) -> None:
        """Let prefetches use the link until the host is done, then send its outputs back.

        Some of the experts it executed (`uploads`) are then loaded without waiting for them.
        """
        link, layer = self.link, plan.event.layer
        if self._prefetching and link.active:
            self._drain(host.busy_until, pinned, layer)
            if link.inflight is not None:
                # It is not interrupted; the outputs follow it.
                self._land()
        host.end(self.record)
        for key, _ in plan.demands[: self.rules.miss.uploads]:
            if key in cache.resident or key in cache.arriving:
                continue  # A prefetch loaded it while the host computed.
            nbytes = cache.size_of(key)
            if not cache.make_room(nbytes, pinned, layer, key):
                return
            self._uploading[key] = link.transfer(nbytes, self.clock.now)
            self._loaded_bytes += nbytes
            cache.insert(key)

    def _drain(self, now: float, pinned: Set[int], layer: int) -> None:
        """Let the link work through its prefetches up to `now`.

        A transfer that could start at `now` itself is left: a demand at that instant goes first.
        """
        link = self.link
        while True:
            if link.inflight is not None:
                if link.busy_until > now:
                    return
                self._land()
            # Nothing starts before the link is free.
            head = link.peek() if link.busy_until < now else None
            if head is None or head[1] >= now:
                return
            if not self._begin(*head, pinned, layer):
                # All other residents are in use until `now`.
                link.postpone(head[0], now)
                return

    def _work_off(self, keys: Set[int], pinned: Set[int], layer: int) -> float:
        """Move the prefetches issued before a demand of these keys, as a fifo link does.

        If every key is pending these are the ones up to the last key, else all that are queued. A
        prefetch that finds no room, all else being pinned, is dropped. Returns the arrival time of
        the last pending key, or 0.
        """
        link, ready_s = self.link, 0.0
        absent = any(not link.is_pending(key) for key in keys)
        while link.active and (absent or any(link.is_pending(key) for key in keys)):
            if link.inflight is not None:
                if link.inflight in keys:
                    ready_s = link.busy_until
                self._land()
                continue
            head = link.peek()
            assert head is not None, "an active link without a transfer"
            if not self._begin(*head, pinned, layer):
                link.withdraw(head[0])
        return ready_s

    def _begin(self, key: int, start_s: float, pinned: Set[int], layer: int) -> bool:
        """Begin a queued prefetch, or withdraw it if resident; False where no room can be made."""
        cache = self.caches[key // self._num_experts]
        level = self.prefetches.level_of(key)
        nbytes = cache.size_of(key, level)
        if key in cache.resident:
            self.link.withdraw(key)
        elif cache.make_room(nbytes, pinned, layer, key):
            cache.reserve(key, level)
            self.link.start(key, nbytes, start_s)
        else:
            return False
        return True

    def _land(self) -> None:
        """Make the prefetch in flight resident."""
        key = self.link.land()
        cache = self.caches[key // self._num_experts]
        self._loaded_bytes += cache.size_of(key, cache.arriving[key])
        cache.land(key)

"""The engine: one run's cache, link, clock, ledger and algorithms, driven pass by pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from lm_eval_moecache.algorithms.eviction.base import EvictionAlgorithm
from lm_eval_moecache.algorithms.prefetch.base import PrefetchAlgorithm
from lm_eval_moecache.engine.cache import Clock, ExpertCache, Link
from lm_eval_moecache.engine.decide import Plan, Rules
from lm_eval_moecache.engine.draft_stage import DraftStage
from lm_eval_moecache.engine.executor import Executor
from lm_eval_moecache.engine.setting import CONTEXT, Setting, offline, without_draft
from lm_eval_moecache.engine.virtual.executor import VirtualExecutor
from lm_eval_moecache.engine.wall.executor import WallExecutor
from lm_eval_moecache.engine.wall.link import Mover
from lm_eval_moecache.records.arrays import FloatArray, IntArray
from lm_eval_moecache.records.event import DECODE, NO_PREDICTIONS, PASS_START, Event
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.jit import compile_midway
from lm_eval_moecache.records.ledger import Ledger, PassRecord
from lm_eval_moecache.records.predictor import digest_of
from lm_eval_moecache.records.selection import Selection
from lm_eval_moecache.trace.future import Future


class TokenPass(NamedTuple):
    """What all routers of a pass of one token said, where its events are deferred to its end."""

    keys: IntArray
    """[layers, top_k] in router order."""
    weights: FloatArray | None
    """Of these; None where nobody looks at them."""
    proposed: tuple[IntArray, IntArray] | None
    """All keys that the prefetcher proposes, and where each layer's begin and the last one's end;
    None where it has to be asked at every event."""
    events: Callable[[], list[Event]]


class Engine:
    """Serves passes: `begin_pass`, then for each layer `enter`, `run` and the `waves`, `end_pass`.

    `uncompiled` says of a replay why its passes were served one event at a time, empty where a
    compiled loop did that.

    `future` is what a replay knows of the events to come; offline algorithms cannot do without.
    With a `mover` the clock is the machine's, and the mover's bytes really move; else time is
    virtual, and `waves` has nothing left to execute.
    """

    uncompiled: str = "a live run"

    def __init__(
        self,
        geometry: Geometry,
        setting: Setting,
        future: Future | None = None,
        mover: Mover | None = None,
    ) -> None:
        # The model's own sizes, and those it is charged by: they differ where it emulates another.
        self.setting, self.own_geometry = setting, geometry
        self.geometry = geometry = setting.charged(geometry)
        self.ledger = Ledger()
        self.rules = Rules.of(geometry, setting.policy, setting.seed)
        self.executor: Executor
        compile_midway(mover is None)
        if mover is None:
            self.executor = VirtualExecutor(geometry, setting, self.rules)
        else:
            self.executor = WallExecutor(geometry, setting, self.rules, mover)
        self.draft_stage: DraftStage | None = self.executor.draft_stage
        self.pools: Sequence[ExpertCache] = self.executor.pools
        self.link: Link = self.executor.link
        self.clock: Clock = self.executor.clock
        self.slots = self.executor.slots
        seers: list[PrefetchAlgorithm | EvictionAlgorithm] = [pool.eviction for pool in self.pools]
        for algorithm in [self.rules.prefetch, *seers]:
            if algorithm.is_offline and future is None:
                raise offline(algorithm)
            if future is not None:
                algorithm.prepare(future)
        if setting.draft is None and self.rules.prefetch.needs_draft:
            raise without_draft(self.rules.prefetch)
        self._foresees = self.rules.prefetch.foresees
        self._warm()
        self._before: tuple[float, ...] = self._totals()
        self._scanned: list[PassRecord] = []
        self.record: PassRecord | None = None

    def _warm(self) -> None:
        """Fill the caches with the most used experts: no pass has that time, nor those bytes."""
        profile = self.setting.warm
        if profile is None:
            return
        profile.check(self.own_geometry)
        caches, num_experts = self.executor.caches, self.geometry.num_experts
        for pool in self.pools:
            pool.warm(key for key in profile.hottest if caches[key // num_experts] is pool)
        self.executor.fill()

    def close(self) -> None:
        """End what runs beside the caller (the wall clock's worker). Safe to call twice."""
        self.executor.close()

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
        """Whether what a changed selection executes is seen with its gate scores.

        An eviction that looks at weights does, whatever the other algorithms ask for.
        """
        rules, eviction = self.rules, self.pools[0].eviction
        asked = any(a.uses_logits for a in (rules.routing, rules.miss, eviction))
        return asked or (eviction.uses_weights and rules.may_change)

    @property
    def can_defer(self) -> bool:
        """Whether the events of a pass may be served at its end, all together.

        What is decided then changes nothing that is computed, and no clock runs meanwhile: so with
        lossless algorithms and one precision in virtual time. The model's hooks only note what the
        routers say (one copy to the host for all layers), and `serve` is told of it.
        """
        return self.executor.is_virtual and not (self.rules.may_change or self.rules.ladder)

    @property
    def depth(self) -> int:
        """How many layers ahead the gates have to be asked at each event."""
        return max(self.rules.routing.depth, self.rules.prefetch.depth)

    @property
    def predictor_digest(self) -> str:
        """Whose predictions events carry: a trained predictor's digest, or empty for the gates."""
        return self.prefetch_digest if self.rules.prefetch.uses_predictor else ""

    @property
    def prefetch_digest(self) -> str:
        """Digest of what the prefetcher was trained to; empty where it has no artifact."""
        artifact = self.rules.prefetch.artifact
        return "" if artifact is None else digest_of(artifact)

    @property
    def peak_cache_bytes(self) -> int:
        """The most bytes ever held (summed over the layers where each has its own cache)."""
        return sum(pool.peak_bytes for pool in self.pools)

    def time_load(self, count: int) -> float:
        """As the executor's; what it moves is counted to no pass."""
        seconds = self.executor.time_load(count)
        self._before = self._totals()
        return seconds

    def begin_draft(self) -> DraftStage:
        """Begin drafting, which belongs to the next pass: its evictions and its time do, too."""
        assert self.draft_stage is not None, "drafting without a draft"
        index = len(self.ledger.passes)
        self.draft_stage.begin(index)
        for pool in self.pools:
            pool.begin_pass(index, 0)
        return self.draft_stage

    @property
    def wants_positions(self) -> bool:
        """Whether passes are charged by where their tokens stand in their sequences."""
        return self.setting.attention == CONTEXT

    def begin_pass(
        self,
        phase: str,
        num_tokens: int,
        foreseen: Mapping[int, FloatArray] = NO_PREDICTIONS,
        positions: IntArray | None = None,
    ) -> PassRecord:
        """Begin a pass; `foreseen` are its layers' logits, for prefetchers that ask for them.

        `positions` are those of its tokens, where they are wanted.
        """
        self.executor.recover()
        stage = self.draft_stage
        if stage is not None and stage.is_open:
            record = self.ledger.begin_pass(phase, num_tokens, stage.start_s)
            record.draft_s = self.clock.now - stage.start_s
            record.stall_s = stage.stall_s
            for pool in self.pools:
                pool.tokens += num_tokens
            stage.end()
        else:
            record = self.ledger.begin_pass(phase, num_tokens, self.clock.now)
            for pool in self.pools:
                pool.begin_pass(record.index, num_tokens)
        self.executor.begin_pass(record)
        if positions is not None:
            self.executor.attend(positions)
        self.record = record
        if self._foresees:
            self.executor.foresee(
                Event(record.index, PASS_START, phase, num_tokens, (), predicted=foreseen)
            )
        return record

    def enter(self, layer: int, num_tokens: int) -> None:
        """Note that the layer's router has decided, at this moment."""
        self.executor.enter(layer, num_tokens)

    def run(self, event: Event) -> Plan:
        """Decide an event and let its transfers begin; `enter` comes before."""
        return self.executor.run(event)

    def waves(self) -> Iterator[tuple[Mapping[int, int], bool]]:
        """Yield what the event of the last `run` has still to execute: see `Executor.waves`."""
        return self.executor.waves()

    def observe(self, observer: Callable[[Event], None]) -> None:
        """Show every event to `observer` once its experts are known and before anything moves."""
        self.executor.on_event = observer

    def serve(self, told: TokenPass) -> None:
        """Serve the deferred events of a pass of one token."""
        prefetches = self.executor.prefetches
        if told.proposed is not None:
            keys, bounds = (own.tolist() for own in told.proposed)
            prefetches.answers = (keys[start:stop] for start, stop in pairwise(bounds))
        try:
            for event in told.events():
                self.enter(event.layer, event.num_tokens)
                self.run(event)
        finally:
            prefetches.answers = None

    def end_pass(self) -> None:
        assert self.record is not None, "end_pass without begin_pass"
        self.clock.synchronize()
        record, after = self.record, self._totals()
        record.end_s = self.clock.now
        _count(record, self._before, after)
        self._before = after
        self.record = None

    def settle_drafts(self, drafted: int, accepted: int) -> None:
        """Note how many tokens the last pass was given to verify, and how many were right."""
        record = self.ledger.passes[-1]
        record.drafted, record.accepted = drafted, accepted

    def begin_scan(self, num_tokens: int) -> None:
        """Begin a text whose tokens are routed one after another, as if they were decoded."""
        self.executor.recover()
        now = self.clock.now
        self._scanned = [self.ledger.begin_pass(DECODE, 1, now) for _ in range(num_tokens)]
        for record in self._scanned:
            record.end_s = now

    def scan(self, event: Event) -> Selection | None:
        """Serve one layer for all tokens of the text, each as an event of its own.

        A layer's cache sees its tokens in order whether layers or tokens go first, so with one
        cache per layer and no prefetching every count is that of decoding the text. So are the
        times: each token's pass gets the seconds of its own events.
        """
        assert len(self.pools) == self.geometry.num_layers, "scanning without a cache per layer"
        pool, base = self.pools[event.layer], event.layer * self.geometry.num_experts
        choices: list[Selection | None] = []
        self.executor.begin_scan()
        for token, record in enumerate(self._scanned):
            pool.begin_pass(record.index, 1)
            self.executor.begin_pass(record)
            start_s, before = self.clock.now, self._totals(pool)
            self.enter(event.layer, 1)
            choices.append(self.run(event.of_token(token, record.index, base)).selection)
            record.end_s += self.clock.now - start_s
            _count(record, before, self._totals(pool))
        return Selection.join(event.experts, choices)

    def end_scan(self) -> None:
        self.executor.end_scan(self._scanned)
        self._scanned = []
        self._before = self._totals()

    def reset_cache(self) -> None:
        """Start anew (`cache_reset`): caches as they began, cold or warm, and an empty link."""
        self.executor.settle()
        before = self._totals()
        for pool in self.pools:
            pool.clear()
        self._warm()
        # What a reset throws out, the policy did not evict.
        after = self._totals()
        self._before = tuple(
            b + (a - o) for b, a, o in zip(self._before, after, before, strict=True)
        )

    def check_integrity(self) -> None:
        """Assert the conservation laws of caches, link and ledger."""
        for pool in self.pools:
            pool.check_integrity()
        counted = sum(record.bytes_moved for record in self.ledger.passes)
        is_open = self.draft_stage is not None and self.draft_stage.is_open
        assert is_open or self.record is not None or counted == self.link.bytes_moved, (
            f"ledger has {counted} bytes, link {self.link.bytes_moved}"
        )
        moved = sum(pool.loads for pool in self.pools)
        known = self.link.transfers + self.link.num_issued
        assert moved == known, f"{moved} loads, {known} transfers"

    def _totals(self, *pools: ExpertCache) -> tuple[float, ...]:
        """Return what the link and these caches (or all) have counted so far, as in `_TOTALS`."""
        asked = pools or self.pools
        return (
            self.link.bytes_moved,
            self.link.busy_s,
            sum([pool.evictions for pool in asked]),
            sum([pool.lifetime_tokens for pool in asked]),
        )


_TOTALS = ("bytes_moved", "link_busy_s", "evictions", "lifetime_tokens")
"""What a pass is told from totals before and after it: counts are whole numbers, times are not."""


def _count(record: PassRecord, before: Sequence[float], after: Sequence[float]) -> None:
    for name, old, new in zip(_TOTALS, before, after, strict=True):
        if new != old:
            setattr(record, name, getattr(record, name) + (new - old))

"""The engine: one run's cache, link, clock, ledger and algorithms, driven pass by pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lm_eval_moecache.algorithms.eviction.base import EvictionAlgorithm
from lm_eval_moecache.algorithms.prefetch.base import PrefetchAlgorithm
from lm_eval_moecache.engine.algorithms import Algorithms
from lm_eval_moecache.engine.cache import ExpertCache
from lm_eval_moecache.engine.clock import Clock, VirtualClock, WallClock
from lm_eval_moecache.engine.draft_stage import DraftStage
from lm_eval_moecache.engine.layer_step import LayerStep
from lm_eval_moecache.engine.setting import Setting, offline, without_draft
from lm_eval_moecache.engine.virtual.link import Link
from lm_eval_moecache.engine.wall.link import WallLink
from lm_eval_moecache.engine.wall.slots import SlottedCache
from lm_eval_moecache.engine.wall.step import WallStep
from lm_eval_moecache.engine.wall.worker import Mover
from lm_eval_moecache.records.event import DECODE, Event
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.ledger import Ledger, PassRecord
from lm_eval_moecache.records.predictor import digest_of
from lm_eval_moecache.records.selection import Selection
from lm_eval_moecache.trace.future import Future


class Engine:
    """Serves passes: `begin_pass`, then `enter` and `run` for each layer, then `end_pass`.

    `future` is what a replay knows of the events to come; offline algorithms cannot do without.
    With a `mover` the clock is the machine's: the mover's bytes really move, and `finish` follows
    each `run` (see `wall_step`).
    """

    def __init__(
        self,
        geometry: Geometry,
        setting: Setting,
        future: Future | None = None,
        mover: Mover | None = None,
    ) -> None:
        self.geometry = geometry
        self.setting = setting
        self.ledger = Ledger()
        policy, seed = setting.policy, setting.seed
        self.algorithms = Algorithms(
            routing=policy.routing.build(geometry, seed),
            prefetch=policy.prefetch.build(geometry, seed),
            miss=policy.miss.build(geometry, seed),
            decode_only=policy.phases == "decode",
        )
        self.clock: Clock
        self.link: Link
        self.pools: Sequence[ExpertCache]
        self._step: LayerStep
        if mover is None:
            self._build_virtual()
        else:
            self._build_wall(mover)
        self._prepare(future)
        self.draft_stage = self._make_draft_stage()
        # Called once a layer and token: bound here, so that no call goes through two functions.
        self.enter = self._step.enter
        self.run = self._step.run
        self._before = (0, 0.0, 0, 0)
        self._scanned: list[PassRecord] = []
        self.record: PassRecord | None = None

    def _build_virtual(self) -> None:
        setting, geometry = self.setting, self.geometry
        self.clock = VirtualClock(setting.hardware, geometry)
        self.link = Link(setting.hardware)
        self.pools = [
            ExpertCache(size, setting.policy.eviction.build(geometry, setting.seed), geometry)
            for size in setting.capacity.bytes_by_partition
        ]
        caches = self.pools if len(self.pools) > 1 else [*self.pools] * geometry.num_layers
        self._step = LayerStep(geometry, caches, self.link, self.clock, self.algorithms)

    def _build_wall(self, mover: Mover) -> None:
        setting, geometry = self.setting, self.geometry
        partitions = setting.capacity.partitions(geometry.num_layers)
        pools = [
            SlottedCache(size, setting.policy.eviction.build(geometry, setting.seed), geometry, own)
            for size, own in zip(setting.capacity.bytes_by_partition, partitions, strict=True)
        ]
        caches = pools if len(pools) > 1 else pools * geometry.num_layers
        link = WallLink(setting.hardware, mover, setting.throttle_bytes_per_s)
        self.clock, self.link, self.pools = WallClock(mover.synchronize), link, pools
        self._step = step = WallStep(geometry, caches, link, self.clock, self.algorithms)
        self.finish = step.finish
        self.slots = [cache.slots for cache in caches]
        """Layer -> (key -> slot) of what is resident or arriving (wall clock only)."""

    def _prepare(self, future: Future | None) -> None:
        """Tell the algorithms the future, or refuse those that cannot do without."""
        seers: list[PrefetchAlgorithm | EvictionAlgorithm] = [pool.eviction for pool in self.pools]
        for algorithm in [self.algorithms.prefetch, *seers]:
            if algorithm.is_offline and future is None:
                raise offline(algorithm)
            if future is not None:
                algorithm.prepare(future)

    def close(self) -> None:
        """End what runs beside the caller (the wall clock's worker). Safe to call twice."""
        if isinstance(self.link, WallLink):
            self.link.close()

    @property
    def wants_weights(self) -> bool:
        """Whether events need `experts` and `weights` even where a pass has one token."""
        return self.wants_logits or self.pools[0].eviction.uses_weights

    @property
    def wants_logits(self) -> bool:
        """Whether events need `logits` as well."""
        chosen = self.algorithms
        return chosen.routing.uses_logits or chosen.prefetch.uses_logits or chosen.miss.uses_logits

    @property
    def depth(self) -> int:
        """How many layers ahead the gates have to be asked at each event."""
        return max(self.algorithms.routing.depth, self.algorithms.prefetch.depth)

    @property
    def predictor_digest(self) -> str:
        """Whose predictions events carry: a trained predictor's digest, or empty for the gates."""
        prefetch = self.algorithms.prefetch
        if not prefetch.uses_predictor or prefetch.artifact is None:
            return ""
        return digest_of(prefetch.artifact)

    @property
    def peak_cache_bytes(self) -> int:
        """The most bytes ever held (summed over the layers where each has its own cache)."""
        return sum(pool.peak_bytes for pool in self.pools)

    def _make_draft_stage(self) -> DraftStage | None:
        setting, prefetch = self.setting, self.algorithms.prefetch
        if setting.draft is None:
            if prefetch.needs_draft:
                raise without_draft(prefetch)
            return None
        queue = self._step.queue
        stage = DraftStage(setting.draft, setting.hardware, self.link, self.clock, queue, prefetch)
        stage.plan(self.geometry, setting.capacity.bytes_by_partition)
        return stage

    def begin_draft(self) -> DraftStage:
        """Begin drafting, which belongs to the next pass: its evictions and its time do, too."""
        assert self.draft_stage is not None, "drafting without a draft"
        index = len(self.ledger.passes)
        self.draft_stage.begin(index)
        for pool in self.pools:
            pool.begin_pass(index, 0)
        return self.draft_stage

    def begin_pass(self, phase: str, num_tokens: int) -> PassRecord:
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
        self._step.begin_pass(record)
        self.record = record
        return record

    def observe(self, observer: Callable[[Event], None]) -> None:
        """Show every event to `observer` once its experts are known and before anything moves."""
        self._step.observer = observer

    def propose_by(self, source: Callable[[Event], Sequence[int]]) -> None:
        """Take the prefetcher's proposals from `source`: a replay of what it proposed live."""
        self._step.queue.propose = source

    def end_pass(self) -> None:
        assert self.record is not None, "end_pass without begin_pass"
        self.clock.synchronize()
        record, after = self.record, self._totals()
        record.end_s = self.clock.now
        record.bytes_moved = after[0] - self._before[0]
        record.link_busy_s = after[1] - self._before[1]
        record.evictions = after[2] - self._before[2]
        record.lifetime_tokens = after[3] - self._before[3]
        self._before = after
        self.record = None

    def settle_drafts(self, drafted: int, accepted: int) -> None:
        """Note how many tokens the last pass was given to verify, and how many were right."""
        record = self.ledger.passes[-1]
        record.drafted, record.accepted = drafted, accepted

    def begin_scan(self, num_tokens: int) -> None:
        """Begin a text whose tokens are routed one after another, as if they were decoded."""
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
        assert event.experts is not None and len(self.pools) == self.geometry.num_layers
        pool, link = self.pools[event.layer], self.link
        base = event.layer * self.geometry.num_experts
        choices: list[Selection | None] = []
        for token, record in enumerate(self._scanned):
            pool.begin_pass(record.index, 1)
            self._step.begin_pass(record)
            start_s, moved, busy_s = self.clock.now, link.bytes_moved, link.busy_s
            evictions, lifetime_tokens = pool.evictions, pool.lifetime_tokens
            self._step.enter(event.layer, 1)
            choices.append(self._step.run(event.of_token(token, record.index, base)))
            record.end_s += self.clock.now - start_s
            record.bytes_moved += link.bytes_moved - moved
            record.link_busy_s += link.busy_s - busy_s
            record.evictions += pool.evictions - evictions
            record.lifetime_tokens += pool.lifetime_tokens - lifetime_tokens
        return Selection.join(event.experts, choices)

    def end_scan(self) -> None:
        self._scanned = []
        self._before = self._totals()

    def reset_cache(self) -> None:
        """Start cold: empty the caches and forget what waits on the link (`cache_reset`)."""
        self._step.settle()
        for pool in self.pools:
            pool.clear()
        # What a reset throws out, the policy did not evict.
        moved, busy_s, *_ = self._before
        *_, evictions, lifetime_tokens = self._totals()
        self._before = (moved, busy_s, evictions, lifetime_tokens)

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

    def _totals(self) -> tuple[int, float, int, int]:
        return (
            self.link.bytes_moved,
            self.link.busy_s,
            sum(pool.evictions for pool in self.pools),
            sum(pool.lifetime_tokens for pool in self.pools),
        )

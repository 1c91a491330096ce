"""Carries plans out in virtual time: everything of one event, in the order in which it happens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set

from lm_eval_moecache.engine.cache import ExpertCache
from lm_eval_moecache.engine.decide import Plan, Rules
from lm_eval_moecache.engine.draft_stage import VirtualDraftStage
from lm_eval_moecache.engine.executor import Executor
from lm_eval_moecache.engine.host import HostStage
from lm_eval_moecache.engine.setting import AS_THEY_ARRIVE, CONTEXT, FIFO, Setting
from lm_eval_moecache.engine.virtual.link import (
    Traffic,
    VirtualClock,
    VirtualLink,
    attention_s,
    read_shares,
)
from lm_eval_moecache.records.arrays import IntArray
from lm_eval_moecache.records.data_aware import cost_of
from lm_eval_moecache.records.event import Event, Fetch, num_assignments
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.predictor import FREE, PredictorCost, costs

_NOTHING: frozenset[int] = frozenset()


class VirtualExecutor(Executor):
    """Serves an event from its lookup to the end of its last expert within `run`."""

    is_virtual = True
    clock: VirtualClock
    link: VirtualLink

    def __init__(self, geometry: Geometry, setting: Setting, rules: Rules) -> None:
        pools = [
            ExpertCache(size, setting.policy.eviction.build(geometry, setting.seed), geometry)
            for size in setting.capacity.bytes_by_partition
        ]
        super().__init__(
            geometry,
            rules,
            pools,
            VirtualLink(setting.hardware, setting.link == FIFO, setting.reads_per_expert),
        )
        self._in_batches = not setting.is_one_server
        self._as_they_arrive = setting.execute == AS_THEY_ARRIVE
        self._shares = read_shares(setting.reads_per_expert)
        self._arrivals: dict[int, Sequence[float]] = {}
        """Demands of the event in progress -> when each of their reads is there."""
        if self._as_they_arrive and rules.ladder:
            raise ValueError(
                f"execute={setting.execute!r} is for a store of one precision, and this one has "
                f"{':'.join(geometry.precision)}. Allowed: execute='together'."
            )
        self.clock = VirtualClock(setting.hardware, geometry)
        self._geometry, self._setting = geometry, setting
        self._prefetching, self._ladder = rules.prefetches, rules.ladder
        self._num_layers, self._num_experts = geometry.num_layers, geometry.num_experts
        self._cached_first = rules.miss.cached_first
        self._after_layer = self._prefetching and rules.prefetch.after_layer
        self._predictor: Sequence[PredictorCost] = ()
        self._foreseeing: PredictorCost | None = None
        artifact = rules.prefetch.artifact
        if rules.prefetch.uses_predictor:
            assert artifact is not None, "a predictor without its artifact"
            self._predictor = costs(artifact)
        elif rules.prefetch.foresees:
            # Of a prefetcher from outside, without an artifact, nothing is known.
            self._foreseeing = FREE if artifact is None else cost_of(artifact)
        self.traffic = Traffic(self.caches, self.link, self.prefetches, geometry.num_experts)
        self._host: HostStage | None = None
        if rule := rules.miss.host_rule:
            self._host = HostStage(rule, setting.hardware, geometry, self.link, self.clock)
        if setting.draft is not None:
            self.draft_stage = VirtualDraftStage(
                setting.draft,
                setting.hardware,
                self.link,
                self.clock,
                self.traffic,
                self.prefetches,
                rules.prefetch.draft_stage,
            )
            self.draft_stage.plan(geometry, setting.capacity.bytes_by_partition)
        self._uploads = rules.miss.uploads
        self._uploading: dict[int, float] = {}
        """Residents that nobody has waited for -> when they are there."""
        self._levels: dict[int, int] = {}
        """Of the event in progress, the levels at which keys have been executed."""
        self.on_wave: Callable[[Sequence[int]], None] | None = None
        """Shown the keys of each wave once they are all resident."""

    def attend(self, positions: IntArray) -> None:
        setting, phase = self._setting, self.record.phase
        if setting.attention == CONTEXT and setting.emulate is not None:
            seconds = attention_s(setting.emulate, setting.hardware, phase, positions)
            self.clock.attention_s = seconds

    def foresee(self, event: Event) -> None:
        cost = self._foreseeing
        assert cost is not None, "nobody asked for foresight"
        ready_s = self.clock.now + self.clock.network(
            cost.num_weights, cost.num_bytes, cost.num_kernels, event.num_tokens
        )
        self.prefetches.submit(event, ready_s)
        # The tokens are read before the first layer's dense part may have the compute.
        self.clock.wait_until(ready_s)

    def enter(self, layer: int, num_tokens: int) -> None:
        """Bring the time to the moment at which the layer's router has decided."""
        self.clock.dense(layer, num_tokens)
        if self._prefetching and self.link.active:
            self.traffic.drain(self.clock.now, _NOTHING, layer)

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
        """Nothing is left: what `run` returns is over, and in time nothing else passes."""
        return iter(())

    def time_load(self, count: int) -> float:
        return count * self.link.duration_s(self._geometry.expert_bytes[0][0])

    def settle(self) -> None:
        self.link.clear()
        self.prefetches.forget()
        if self.link.inflight is not None:
            self.clock.wait_until(self.link.busy_until)
            self.traffic.land()

    def _carry_out(self, plan: Plan, cache: ExpertCache) -> None:
        """Load what is demanded, execute the event, and let prefetches go on."""
        event, demands, link, clock = plan.event, plan.demands, self.link, self.clock
        prefetches, layer = self._prefetching, event.layer
        gate_s = ready_s = clock.now
        on_device, remaining = event, event.keys
        pinned = set(event.keys) if demands or prefetches else _NOTHING
        if demands:
            ready_s, on_device, remaining = self._load(plan, cache, pinned)
            if self._cached_first:
                # The compute is busy from here on: predicting does not hide behind the wait.
                predict_s = self.predicting_s(layer, len(event.predicted), event.num_tokens)
                clock.wait_until(clock.now + predict_s)
                awaited = {fetch.key for fetch in demands}
                self._execute(on_device, [key for key in remaining if key not in awaited])
                remaining = [key for key in remaining if key in awaited]
        if self._uploading:
            found = [self._uploading.pop(key, 0.0) for key in event.keys if key in cache.resident]
            self.record.stall_s += clock.await_link(max(found, default=0.0))
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
            self.traffic.drain(clock.now, pinned, layer)

    def predicting_s(self, layer: int, num_predicted: int, num_tokens: int) -> float:
        """Return the seconds that a layer's predictions take: of gates, or of a predictor."""
        if not self._predictor or not num_predicted:
            return self.clock.gates(num_predicted)
        cost = self._predictor[layer]
        return self.clock.network(cost.num_weights, cost.num_bytes, cost.num_kernels, num_tokens)

    def _load(
        self, plan: Plan, cache: ExpertCache, pinned: Set[int]
    ) -> tuple[float, Event, Sequence[int]]:
        """Load the demands that the host does not take, in waves where they do not fit together.

        What finds room together moves together. Returns when the last one is there, the event
        without the host's part, and its keys still to be executed then.
        """
        clock = self.clock
        if self._in_batches:
            clock.load(sum(cache.size_of(key, level) for key, level in plan.demands))
        ready_s, fetches = self._what_is_under_way(plan, cache, pinned)
        if self._in_batches:
            under_way = {fetch.key for fetch in plan.demands} - {fetch.key for fetch in fetches}
            self._arrivals = {key: [ready_s] * len(self._shares) for key in under_way}
        event, fetches = self._share_out(plan, cache, fetches)
        remaining, wave = event.keys, list[tuple[int, int]]()
        for key, level in fetches:
            nbytes = cache.size_of(key, level)
            if not cache.make_room(nbytes, pinned, event.layer, key):
                ready_s = self._move(wave, ready_s)
                wave, done = [], [k for k in remaining if k in cache.resident]
                remaining = [k for k in remaining if k not in cache.resident]
                self.record.stall_s += clock.await_link(ready_s)
                self._execute(event, done)
                cache.eviction.on_executed(event.layer, done)
                self._arrivals = {}
                ready_s, pinned = clock.now, set(remaining)
                fits = cache.make_room(nbytes, pinned, event.layer, key)
                assert fits, f"no room for one expert of {nbytes} bytes after its wave"
            wave.append((key, nbytes))
            cache.insert(key, level)
        return self._move(wave, ready_s), event, remaining

    def _what_is_under_way(
        self, plan: Plan, cache: ExpertCache, pinned: Set[int]
    ) -> tuple[float, Sequence[Fetch]]:
        """Let what goes before the demands land; return when, and the demands that are left."""
        fetches, link, ready_s = plan.demands, self.link, self.clock.now
        if link.fifo and link.active:
            wanted = {fetch.key for fetch in fetches}
            ready_s = max(ready_s, self.traffic.work_off(wanted, pinned, plan.event.layer))
            fetches = [f for f in fetches if cache.resident.get(f.key, f.level + 1) > f.level]
            cache.unused_prefetches -= pinned
        elif link.inflight is not None:
            # It lands before any of these can start, and while the compute stands still.
            if link.inflight in pinned:
                ready_s = link.busy_until
            # Off the list: a wave may execute and evict it before its turn comes.
            fetches = [f for f in fetches if cache.arriving.get(f.key, f.level + 1) > f.level]
            self.traffic.land()
            cache.unused_prefetches -= pinned
        return ready_s, fetches

    def _share_out(
        self, plan: Plan, cache: ExpertCache, fetches: Sequence[Fetch]
    ) -> tuple[Event, Sequence[Fetch]]:
        """Give the host its part; return the event without it, and what the link has to bring."""
        event, link = plan.event, self.link
        if self._host is not None and fetches:
            event, fetches = self._host.begin(event, fetches, self.record)
            elsewhere = [key for key in plan.event.keys if key not in event.keys]
            if self.on_wave is not None and elsewhere:
                self.on_wave(elsewhere)
            if self._ladder:
                self._levels.update(dict.fromkeys(elsewhere, 0))
        if self._ladder:
            # Copies that are about to be loaded again: to this event they are of no use.
            for key, level in fetches:
                if key in cache.resident:
                    assert cache.resident[key] > level, f"key {key} is resident at {level} already"
                    cache.release_for_upgrade(key)
        if (plan.late or self._ladder) and link.active and not link.fifo:
            link.withdraw_queued([key for key, _ in fetches])
        return event, fetches

    def _move(self, wave: Sequence[tuple[int, int]], ready_s: float) -> float:
        """Move these (key, bytes) from `ready_s` on; return when the last one is there."""
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
        """Execute projection by projection: resident experts first, others as theirs is there."""
        arriving = {key: self._arrivals[key] for key in keys if key in self._arrivals}
        present = [key for key in keys if key not in arriving]
        if self.on_wave is not None:
            self.on_wave(keys)
        launched = False
        for part, share in enumerate(self._shares):
            order = [(0.0, present)] if present else []
            order += sorted((times[part], [key]) for key, times in arriving.items())
            for at_s, now in order:
                self.record.stall_s += self.clock.await_link(at_s)
                assignments = num_assignments(event, now, self._num_experts)
                self.clock.experts(event.layer, len(now), assignments, 0, launched, share)
                launched = True

    def _execute(self, event: Event, keys: Sequence[int]) -> None:
        """Account for keys that are resident; of several levels, each has kernels of its own."""
        if self.on_wave is not None:
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
        for level, own in sorted(by_level.items()):
            assignments = num_assignments(event, own, self._num_experts)
            self.clock.experts(event.layer, len(own), assignments, level)
            self.record.low_precision += assignments if level else 0

    def _end_host(self, host: HostStage, plan: Plan, cache: ExpertCache, pinned: Set[int]) -> None:
        """Let prefetches use the link until the host is done, and bring its outputs back.

        A few of what it executed are loaded then, without waiting for them.
        """
        link, layer = self.link, plan.event.layer
        if self._prefetching and link.active:
            self.traffic.drain(host.busy_until, pinned, layer)
            if link.inflight is not None:
                # It is not interrupted: the outputs follow it.
                self.traffic.land()
        host.end(self.record)
        for key, _ in plan.demands[: self._uploads]:
            if key in cache.resident or key in cache.arriving:
                continue  # A prefetch brought it while the host computed.
            nbytes = cache.size_of(key)
            if not cache.make_room(nbytes, pinned, layer, key):
                return
            self._uploading[key] = link.transfer(nbytes, self.clock.now)
            cache.insert(key)

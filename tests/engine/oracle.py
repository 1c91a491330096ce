"""Every rule of time under the virtual clock, told slowly and plainly, to judge the engine by.

It shares no code with the engine: of the package it knows the records, and asks the algorithms for
their choices (selections, levels, proposals, victims). A key is layer * experts + expert.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lm_eval_moecache.records.arrays import softmax
from lm_eval_moecache.records.data_aware import cost_of
from lm_eval_moecache.records.event import (
    DECODE,
    DROPPED,
    PASS_START,
    PHASES,
    PREFILL,
    UNSEEN_SCORES,
    Event,
    Fetch,
)
from lm_eval_moecache.records.geometry import NO_TARGET, Geometry
from lm_eval_moecache.records.ledger import PassRecord
from lm_eval_moecache.records.predictor import FREE, costs, target_of

DENSE_KERNELS, EXPERT_KERNELS, GATE_KERNELS = 30, 15, 3


@dataclass(eq=False)
class Cache:
    """One pool of bytes. `since` has the tokens it had seen at a resident's load."""

    capacity: int
    eviction: Any
    resident: dict[int, int] = field(default_factory=dict)
    """Key -> level."""
    arriving: dict[int, int] = field(default_factory=dict)
    since: dict[int, int] = field(default_factory=dict)
    unused: set[int] = field(default_factory=set)
    """Residents that a prefetch loaded and no event has used."""
    tokens: int = 0
    peak: int = 0


@dataclass
class Wish:
    """A queued prefetch; consecutive ones of a batch share a latency."""

    key: int
    level: int
    due: int
    earliest_s: float
    batch: int | None


class Oracle:
    """Replays a trace at once; `passes`, `pools`, `now`, `moved` and `peak` say what came of it."""

    def __init__(self, trace: Any, setting: Any, future: Any, reset: str, recorded: Any) -> None:
        self.trace, self.setting, self.recorded = trace, setting, recorded
        self.hw, policy, own = setting.hardware, setting.policy, trace.geometry
        self.g = g = own if setting.emulate is None else setting.emulate.emulated_by(own)
        self.routing, self.prefetch, self.miss = (
            getattr(policy, axis).build(g, setting.seed) for axis in ("routing", "prefetch", "miss")
        )
        self.pools = [
            Cache(size, policy.eviction.build(g, setting.seed))
            for size in setting.capacity.bytes_by_partition
        ]
        self.caches = self.pools * (g.num_layers if len(self.pools) == 1 else 1)
        for pool in self.pools:
            total = sum(sizes[0] for sizes in g.expert_bytes)
            pool.eviction.capacity_bytes = pool.capacity
            pool.eviction.num_slots = max(1, pool.capacity * g.num_layers // total)
        for algorithm in [self.prefetch, *(pool.eviction for pool in self.pools)]:
            if future is not None:
                algorithm.prepare(future)
        reads, rate = setting.reads_per_expert, self.hw.link_rate
        self.shares = (2 / 3, 1 / 3) if reads == 2 else (1 / reads,) * reads
        self.lane_rate = min(rate, self.hw.link_lane_bytes_per_s or rate)
        self.fifo, self.together = setting.link == "fifo", setting.execute == "together"
        one_by_one = self.hw.link_lanes == reads == 1 and self.lane_rate == rate
        self.one_by_one = one_by_one and self.together and not self.hw.load_overhead_s_per_byte
        self.passes: list[PassRecord] = []
        self.now = self.free_s = self.host_free_s = self.draft_s = self.attention_s = 0.0
        self.busy_s, self.moved, self.evictions, self.lifetime, self.unpaid = 0.0, 0, 0, 0, 0
        self.record = PassRecord(-1, PREFILL, 0, 0.0)
        self.pass_index, self.batch, self.num_batches = -1, None, 0
        self.flying: int | None = None
        self.queue: list[Wish] = []
        self.predicted: dict[int, set[int]] = {}
        self.left_in: dict[int, int] = {}
        self.uploads: dict[int, float] = {}
        self.arrivals: dict[int, list[float]] = {}
        self.levels: dict[int, int] = {}
        self.warm()
        before, scans, at = frozenset[int](), dict(trace.scans), 0
        while at < trace.num_passes:
            if reset == "request" and trace.starts_sequence(at):
                served = {i for i, r in enumerate(trace.requests) if at in r.passes}
                if served != before:
                    self.empty()
                before = frozenset(served)
            self.scan(at, scans[at]) if at in scans else self.serve(at)
            at += scans.get(at, 1)

    # --- passes ---

    def serve(self, index: int) -> None:
        first, before, started = self.event_at(index, 0), self.totals(), self.now
        self.pass_index = index
        for pool in self.pools:
            pool.eviction.on_pass(index)
        stalled = self.draft(index)
        record = self.begin(PassRecord(index, first.phase, first.num_tokens, started))
        record.draft_s, record.stall_s = self.now - started, stalled
        for pool in self.pools:
            pool.tokens += first.num_tokens
        self.attend(first)
        if self.prefetch.foresees:
            artifact = self.prefetch.artifact
            cost = FREE if artifact is None else cost_of(artifact)
            ready_s = self.now + self.network_s(cost, first.num_tokens)
            self.submit(first._replace(layer=PASS_START, keys=()), ready_s)
            self.now = ready_s
        for layer in range(self.g.num_layers):
            self.run(self.event_at(index, layer))
        self.count(before)
        record.end_s = self.now
        record.drafted, record.accepted = self.trace.drafted.settled.get(index, (0, 0))

    def scan(self, first: int, count: int) -> None:
        """A text goes layer by layer, within a layer token by token: each a pass of its own."""
        start = self.now
        records = [PassRecord(first + i, DECODE, 1, start, start) for i in range(count)]
        for layer in range(self.g.num_layers):
            for record in records:
                began, before, self.pass_index = self.now, self.totals(), record.index
                self.caches[layer].eviction.on_pass(record.index)
                self.caches[layer].tokens += 1
                self.begin(record)
                self.run(self.event_at(record.index, layer)._replace(phase=DECODE))
                self.count(before)
                record.end_s += self.now - began
        self.passes[len(self.passes) - count * self.g.num_layers :] = records

    def begin(self, record: PassRecord) -> PassRecord:
        self.record = record
        self.passes.append(record)
        self.routing.on_pass(record.index)
        self.prefetch.on_pass(record.index)
        return record

    def totals(self) -> tuple[float, float, float, float]:
        return self.moved, self.busy_s, self.evictions, self.lifetime

    def count(self, before: Sequence[float]) -> None:
        names = ("bytes_moved", "link_busy_s", "evictions", "lifetime_tokens")
        for name, old, new in zip(names, before, self.totals(), strict=True):
            setattr(self.record, name, getattr(self.record, name) + (new - old))

    def event_at(self, index: int, layer: int) -> Event:
        trace, num_layers = self.trace, self.g.num_layers
        start, stop = trace.row_bounds[index * num_layers + layer :][:2]
        columns, rows = trace.columns, slice(start, stop)
        experts, phase = columns.experts[rows].astype(np.int64), PHASES[columns.phase[start]]
        depth = max(self.routing.depth, self.prefetch.depth)
        targets = [at for at in range(layer + 1, layer + 1 + depth) if at < num_layers]
        if self.prefetch.uses_predictor:
            targets = [at for at in [target_of(layer, num_layers, phase)] if at is not None]
        predicted = dict.fromkeys(targets, UNSEEN_SCORES)
        if trace.predicted is not None and targets:
            values = trace.predicted.values[
                trace.predicted.offsets[start] : trace.predicted.offsets[stop]
            ]
            scores = values.reshape(stop - start, -1, self.g.num_experts).astype(np.float32)
            predicted = {target: scores[:, i] for i, target in enumerate(targets)}
        return Event(
            index, layer, phase, int(stop - start), self.keys_of(layer, experts), experts,
            UNSEEN_SCORES if columns.weights is None else columns.weights[rows],
            UNSEEN_SCORES if trace.logits is None else trace.logits[rows].astype(np.float32),
            predicted,
        )  # fmt: skip

    def keys_of(self, layer: int, experts: Any) -> list[int]:
        """An event's set of experts, each once, in order of first need."""
        base = layer * self.g.num_experts
        return list(dict.fromkeys(base + e for e in experts.ravel().tolist() if e != DROPPED))

    # --- an event ---

    def run(self, event: Event) -> None:
        layer, cache, miss = event.layer, self.caches[event.layer], self.miss
        self.now += self.dense_s(self.g, layer, event.num_tokens) + self.attention_s
        self.drain(self.now, (), layer)
        self.pay()
        executed, demands = self.decide(event, cache)
        began, predict_s = self.now, self.predict_s(event)
        pinned, device, waiting, ready_s = set(executed.keys), executed, executed.keys, self.now
        self.levels, on_host_bytes = {}, 0
        if demands:
            ready_s, wanted = self.await_pending(cache, demands, pinned, layer)
            in_flight = [f.key for f in demands if f not in wanted]
            self.arrivals = {key: [ready_s] * len(self.shares) for key in in_flight}
            if miss.host_rule and wanted:
                device, wanted, on_host_bytes = self.share_out(executed, wanted)
            ready_s, waiting = self.load(cache, device, wanted, ready_s, pinned)
            if miss.cached_first:
                self.now += predict_s
                awaited = {fetch.key for fetch in demands}
                self.execute(device, [key for key in waiting if key not in awaited])
                waiting = [key for key in waiting if key in awaited]
        arrivals = [self.uploads.pop(k, 0.0) for k in executed.keys if k in cache.resident]
        self.stall(max(arrivals, default=0.0))
        number = event.pass_index * self.g.num_layers + layer
        self.queue = [wish for wish in self.queue if self.fifo or wish.due > number]
        if demands and self.together:
            self.stall(ready_s)
        if self.prefetch.is_active:
            if not self.prefetch.after_layer:
                self.submit(executed, began + predict_s)
            self.now = max(self.now, began + predict_s)
        if demands and not self.together:
            self.execute_arriving(device, waiting)
        else:
            self.execute(device, waiting)
        if on_host_bytes:
            self.end_host(cache, demands, on_host_bytes, pinned, layer)
        if self.prefetch.is_active and self.prefetch.after_layer:
            self.submit(executed, self.now)
        self.drain(self.now, pinned, layer)
        if len(self.g.precision) > 1:
            cache.eviction.on_levels(executed, self.levels)
        else:
            cache.eviction.on_event(executed)

    def decide(self, event: Event, cache: Cache) -> tuple[Event, Sequence[Fetch]]:
        """Look the event up, let lossy algorithms change it, and count; nothing moves yet."""
        record, miss, resident = self.record, self.miss, cache.resident
        acts = not (self.setting.policy.phases == "decode" and event.phase == PREFILL)
        routes, lossy = (acts and not a.is_lossless for a in (self.routing, miss))
        selection = self.routing.select(event, resident) if routes else None
        looked_up = event if selection is None else self.changed(event, selection)
        absent = [key for key in looked_up.keys if key not in resident]
        missed = [key for key in absent if not self.is_pending(key)]
        executed, wanted = looked_up, [k for k in looked_up.keys if resident.get(k, 1)]
        demands = [Fetch(key) for key in (absent if lossy else wanted)]
        unclear = missed if miss.awaits_late else absent
        if lossy and (unclear or (len(self.g.precision) > 1 and miss.upgrade)):
            resolution = miss.resolve(looked_up, unclear, resident)
            if resolution is not None:
                demands, change = list(resolution.fetch), resolution.selection
                if change is not None:
                    moved = change.experts != looked_up.experts
                    record.substituted += int((moved & (looked_up.experts != DROPPED)).sum())
                    selection = change if selection is None else change.after(selection)
                    executed = self.changed(looked_up, selection)
                if len(unclear) < len(absent):
                    late = [key for key in absent if key not in missed and key in executed.keys]
                    demands += [Fetch(key) for key in late]
                    order = {key: place for place, key in enumerate(absent)}
                    demands.sort(key=lambda fetch: order.get(fetch.key, len(order)))
        record.requests += len(looked_up.keys)
        record.misses += len(missed)
        record.late += len(absent) - len(missed)
        record.collisions += sum(self.left_in.get(key) == event.pass_index for key in missed)
        record.token_requests += event.num_tokens * self.g.top_k
        record.token_misses += self.assignments(looked_up, absent)
        if lossy:
            record.avoided += len(set(absent) - set(executed.keys))
        if (routes or lossy) and len(event.weights) and (absent or selection is not None):
            record.weighed_tokens += event.num_tokens
        if selection is not None:
            self.judge(event, selection)
        if self.prefetch.is_active:
            hits = cache.unused.intersection(looked_up.keys)
            record.prefetch_hits += len(hits)
            cache.unused -= hits
            if event.layer in self.predicted:
                predicted = self.predicted.pop(event.layer)
                record.predicted += len(predicted)
                record.predicted_right += len(predicted.intersection(looked_up.keys))
                record.predictable += len(looked_up.keys)
        return executed, demands

    def changed(self, event: Event, selection: Any) -> Event:
        """The event as selected; experts that the router did not choose weigh their softmax."""
        experts, weights = selection.experts, event.weights
        if len(weights) and len(event.logits):
            scores = softmax(event.logits)
            for token, expert in np.argwhere(event.experts != DROPPED):
                scores[token, event.experts[token, expert]] = weights[token, expert]
            weights = np.take_along_axis(scores, experts, axis=-1)
            if selection.weights is not None:
                weights = np.where(np.isnan(selection.weights), weights, selection.weights)
        if selection.keep is not None:
            experts = np.where(selection.keep, experts, DROPPED)
        keys = self.keys_of(event.layer, experts)
        return event._replace(keys=keys, experts=experts, weights=weights)

    def judge(self, event: Event, selection: Any) -> None:
        """Count what a selection leaves out, puts in, and loses of the router's weights."""
        router, keep = event.experts, selection.keep
        chosen = selection.experts if keep is None else np.where(keep, selection.experts, DROPPED)
        self.record.dropped += 0 if keep is None else int((~keep).sum())
        for row, own in zip(chosen.tolist(), router.tolist(), strict=True):
            self.record.unfaithful += sum(e not in own for e in row if keep is None or e != DROPPED)
        if len(event.weights):
            is_run = (router[:, :, None] == chosen[:, None, :]).any(axis=-1)
            total = np.maximum(event.weights.sum(axis=-1, keepdims=True), 1e-20)
            shares = np.asarray(event.weights / total, dtype=np.float32)
            self.record.lost_weight += float(shares[~is_run].sum(dtype=np.float64))

    def assignments(self, event: Event, keys: Collection[int]) -> int:
        """The (token, expert) pairs of an event that these keys serve."""
        experts = [key - event.layer * self.g.num_experts for key in keys]
        return sum(expert in experts for expert in event.experts.ravel().tolist())

    # --- loading ---

    def await_pending(
        self, cache: Cache, demands: Sequence[Fetch], pinned: set[int], layer: int
    ) -> tuple[float, Sequence[Fetch]]:
        """Land what precedes the demands on the link; return when, and the demands left."""
        ready_s, keys = self.now, {fetch.key for fetch in demands}
        if not (self.flying is not None or (self.fifo and self.queue)):
            return ready_s, demands
        if not self.fifo:
            ready_s = self.free_s if self.flying in pinned else ready_s
            under_way = dict(cache.arriving)
            self.land()
        else:
            is_new = any(not self.is_pending(key) for key in keys)
            while self.is_pending() and (is_new or any(map(self.is_pending, keys))):
                if self.flying is not None:
                    ready_s = max(ready_s, self.free_s if self.flying in keys else 0.0)
                    self.land()
                elif not self.start(self.queue[0], pinned, layer):
                    self.queue.pop(0)
            under_way = cache.resident
        cache.unused -= pinned
        return ready_s, [f for f in demands if under_way.get(f.key, f.level + 1) > f.level]

    def load(
        self, cache: Cache, event: Event, wanted: Sequence[Fetch], ready_s: float, pinned: set[int]
    ) -> tuple[float, Sequence[int]]:
        """Load in waves of what fits; return when the last has arrived, and what is left to run."""
        layer, waiting, wave = event.layer, event.keys, list[Fetch]()
        upgraded = {fetch.key for fetch in wanted if fetch.key in cache.resident}
        for key in upgraded:
            self.release(cache, key)
        if not self.fifo:
            keys = {fetch.key for fetch in wanted}
            self.queue = [wish for wish in self.queue if wish.key not in keys]
        self.unpaid += sum(self.size(*fetch) for fetch in wanted)
        self.pay()
        ready_s = max(ready_s, self.now)
        for fetch in wanted:
            if not self.make_room(cache, fetch, pinned, layer):
                self.stall(self.move(wave, ready_s))
                done = [key for key in waiting if key in cache.resident]
                waiting = [key for key in waiting if key not in cache.resident]
                self.execute(event, done)
                cache.eviction.on_executed(layer, done)
                ready_s, pinned, wave, self.arrivals = self.now, set(waiting), [], {}
                assert self.make_room(cache, fetch, pinned, layer)
            wave.append(fetch)
            self.insert(cache, *fetch, told=fetch.key not in upgraded)
        return self.move(wave, ready_s), waiting

    def move(self, wave: Sequence[Fetch], ready_s: float) -> float:
        """Move experts from `ready_s` on; return when the last arrives."""
        sizes = [self.size(*fetch) for fetch in wave]
        if self.one_by_one or not wave:
            for nbytes in sizes:
                ready_s = self.transfer(nbytes, ready_s)
            return ready_s
        start, reads = (
            max(ready_s, self.free_s),
            [share * n for share in self.shares for n in sizes],
        )
        times = self.lanes(reads)
        self.arrivals |= {
            f.key: [start + t for t in times[i :: len(wave)]] for i, f in enumerate(wave)
        }
        self.batch, self.free_s = None, start + max(times)
        self.busy_s += self.free_s - start
        self.moved += sum(sizes)
        return max(ready_s, self.free_s)

    def lanes(self, reads: Sequence[float]) -> list[float]:
        """When each request ends: in order over the lanes, a latency each, then an equal share."""
        left, waits = (
            dict(enumerate(reads)),
            dict.fromkeys(range(len(reads)), self.hw.link_latency_s),
        )
        ends, now = [0.0] * len(reads), 0.0
        while left:
            served = list(left)[: self.hw.link_lanes]
            moving = [i for i in served if i not in waits]
            rate = min(self.lane_rate, self.hw.link_rate / max(1, len(moving)))
            steps = {i: waits[i] if i in waits else left[i] / rate for i in served}
            step, first = min((step, i) for i, step in steps.items())
            now += step
            for i in served:
                (waits if i in waits else left)[i] -= step if i in waits else rate * step
            if first in waits:
                del waits[first]
            else:
                del left[first]
                ends[first] = now
        return ends

    # --- the link and its prefetches ---

    def transfer(self, nbytes: int, at_s: float, joins: bool = False) -> float:
        duration_s = nbytes / self.lane_rate
        if not joins:
            duration_s, self.batch = duration_s + self.hw.link_latency_s, None
        self.free_s = max(at_s, self.free_s) + duration_s
        self.busy_s += duration_s
        self.moved += nbytes
        return self.free_s

    def is_pending(self, key: int | None = None) -> bool:
        keys = [wish.key for wish in self.queue] + [k for k in [self.flying] if k is not None]
        return key in keys if key is not None else bool(keys)

    def submit(self, event: Event, ready_s: float) -> None:
        if self.recorded is None:
            keys = self.prefetch.propose(event)
        elif self.prefetch.foresees and event.layer != PASS_START:
            keys = []
        else:
            number = event.pass_index * self.g.num_layers + max(event.layer, 0)
            keys = self.recorded.at(number).tolist()
        levels: dict[int, int] = {}
        acts = not (self.setting.policy.phases == "decode" and event.phase == PREFILL)
        if len(self.g.precision) > 1 and acts and not self.miss.is_lossless:
            for layer in range(self.g.num_layers):
                own = [key for key in keys if key // self.g.num_experts == layer]
                chosen = self.miss.prefetch_levels(event, layer, own) if own else []
                levels.update(zip(own, chosen, strict=True))
        self.enqueue(keys, event.pass_index, event.layer, ready_s, levels)

    def enqueue(
        self,
        keys: Sequence[int],
        index: int,
        after: int,
        ready_s: float,
        levels: Any,
        batch: Any = None,
    ) -> None:
        """Queue absent keys by the event they are for: up to layer `after` the next pass's."""
        for key in keys:
            layer = key // self.g.num_experts
            self.predicted.setdefault(layer, set()).add(key)
            if key in self.caches[layer].resident:
                self.caches[layer].eviction.on_predicted(key)
            elif not self.is_pending(key):
                due = (index + (layer <= after)) * self.g.num_layers + layer
                self.queue.append(Wish(key, levels.get(key, 0), due, ready_s, batch))
        if not self.fifo:
            self.queue.sort(key=lambda wish: wish.due)

    def drain(self, until_s: float, pinned: Collection[int], layer: int) -> None:
        """Let prefetches use the link up to `until_s`; at that instant demands go first."""
        while self.is_pending():
            if self.flying is not None:
                if self.free_s > until_s:
                    return
                self.land()
            elif max(self.free_s, self.queue[0].earliest_s) >= until_s:
                return
            elif not self.start(self.queue[0], pinned, layer):
                self.queue[0].earliest_s = until_s
                return

    def start(self, wish: Wish, pinned: Collection[int], layer: int) -> bool:
        """Begin a prefetch, which takes its room now; False if there is none."""
        cache, fetch = self.caches[wish.key // self.g.num_experts], Fetch(wish.key, wish.level)
        if wish.key not in cache.resident:
            if not self.make_room(cache, fetch, pinned, layer):
                return False
            at_s = max(wish.earliest_s, self.free_s)
            joins = wish.batch is not None and wish.batch == self.batch and at_s <= self.free_s
            self.transfer(self.size(*fetch), at_s, joins)
            self.batch, self.flying, cache.arriving[wish.key] = wish.batch, wish.key, wish.level
            cache.peak = max(cache.peak, self.used(cache))
        self.queue.remove(wish)
        return True

    def land(self) -> None:
        assert self.flying is not None
        key, self.flying = self.flying, None
        cache = self.caches[key // self.g.num_experts]
        level = cache.arriving.pop(key)
        self.unpaid += self.size(key, level)
        cache.resident[key], cache.since[key] = level, cache.tokens
        cache.unused.add(key)
        cache.eviction.on_insert(key, True)

    # --- caches ---

    def size(self, key: int, level: int = 0) -> int:
        return self.g.expert_bytes[key // self.g.num_experts][level]

    def used(self, cache: Cache) -> int:
        return sum(self.size(*held) for held in [*cache.resident.items(), *cache.arriving.items()])

    def make_room(self, cache: Cache, fetch: Fetch, pinned: Collection[int], layer: int) -> bool:
        limit = cache.capacity - self.size(*fetch)
        if self.used(cache) > limit:
            cache.eviction.on_miss(fetch.key)
        while self.used(cache) > limit:
            victim = cache.eviction.victim(pinned, layer)
            if victim is None:
                return False
            assert victim in cache.resident and victim not in pinned
            self.evict(cache, victim)
        return True

    def evict(self, cache: Cache, key: int) -> None:
        self.evictions += 1
        self.lifetime += cache.tokens - cache.since[key]
        self.left_in[key] = self.pass_index
        self.release(cache, key)
        cache.eviction.on_evict(key)

    def release(self, cache: Cache, key: int) -> None:
        del cache.resident[key], cache.since[key]
        cache.unused.discard(key)

    def insert(self, cache: Cache, key: int, level: int = 0, told: bool = True) -> None:
        """Make a demanded key resident; evictions hear nothing of an upgrade."""
        cache.resident[key], cache.since[key] = level, cache.tokens
        cache.peak = max(cache.peak, self.used(cache))
        if told:
            cache.eviction.on_insert(key, False)

    def warm(self) -> None:
        """Fill the caches with the hottest experts that fit, the hottest as the latest."""
        for pool in self.pools if self.setting.warm else []:
            fitting, room = list[int](), pool.capacity - self.used(pool)
            for key in self.setting.warm.hottest:
                if self.caches[key // self.g.num_experts] is pool and self.size(key) <= room:
                    fitting.append(key)
                    room -= self.size(key)
            for key in reversed(fitting):
                self.insert(pool, key)

    def empty(self) -> None:
        """Start cold (or warm) again: nothing queued, and these evictions are not counted."""
        counted = self.evictions, self.lifetime
        self.queue, self.predicted = [], {}
        if self.flying is not None:
            self.now = max(self.now, self.free_s)
            self.land()
        for pool in self.pools:
            for key in list(pool.resident):
                self.evict(pool, key)
        self.warm()
        self.evictions, self.lifetime = counted

    # --- the clock ---

    def stall(self, until_s: float) -> None:
        """Wait for the link, which costs the wait overhead as well."""
        if until_s > self.now:
            self.record.stall_s += until_s - self.now
            self.now = until_s + self.hw.wait_overhead_s

    def pay(self) -> None:
        """Charge the compute for what was loaded since the last time."""
        self.now, self.unpaid = self.now + self.hw.load_overhead_s_per_byte * self.unpaid, 0

    def roofline(
        self, g: Geometry, flops: float, weights: float, tokens: int, read_s: float
    ) -> float:
        return max(weights * (2 / g.element_bytes / flops) * tokens, read_s)

    def dense_s(self, g: Geometry, layer: int, tokens: int) -> float:
        hw, nbytes = self.hw, g.dense_bytes[layer]
        fixed_s = DENSE_KERNELS * hw.kernel_overhead_s + hw.layer_overhead_s
        fixed_s += hw.pass_overhead_s if layer == 0 else 0.0
        read_s = nbytes / hw.memory_bytes_per_s
        return self.roofline(g, hw.peak_flops, nbytes, tokens, read_s) + fixed_s

    def experts_s(
        self,
        g: Geometry,
        layer: int,
        count: int,
        assignments: int,
        level: int = 0,
        share: float = 1.0,
    ) -> float:
        sizes = g.expert_bytes[layer]
        weights = g.compute_bytes[layer] if g.compute_bytes else sizes[0]
        read_s = sizes[level] / self.hw.memory_bytes_per_s * count
        return share * self.roofline(g, self.hw.peak_flops, weights, assignments, read_s)

    def network_s(self, cost: Any, tokens: int) -> float:
        flop_s = 2 * cost.num_weights * tokens / self.hw.peak_flops
        roofline_s = max(flop_s, cost.num_bytes / self.hw.memory_bytes_per_s)
        return roofline_s + cost.num_kernels * self.hw.kernel_overhead_s

    def predict_s(self, event: Event) -> float:
        if self.prefetch.uses_predictor and event.predicted:
            cost = costs(self.prefetch.artifact)[event.layer]
            return self.network_s(cost, event.num_tokens)
        return len(event.predicted) * (GATE_KERNELS * self.hw.kernel_overhead_s)

    def execute(self, event: Event, keys: Sequence[int]) -> None:
        """Run residents; each level has kernels of its own."""
        resident = self.caches[event.layer].resident
        for level in sorted({resident[key] for key in keys}):
            own = [key for key in keys if resident[key] == level]
            count = self.assignments(event, own)
            seconds = self.experts_s(self.g, event.layer, len(own), count, level)
            self.now += seconds + EXPERT_KERNELS * self.hw.kernel_overhead_s
            self.record.low_precision += count if level else 0
            self.levels.update(dict.fromkeys(own, level))

    def execute_arriving(self, event: Event, keys: Sequence[int]) -> None:
        """Run read by read: residents first, then each expert as its read arrives."""
        overhead_s = EXPERT_KERNELS * self.hw.kernel_overhead_s
        present = [key for key in keys if key not in self.arrivals]
        for part, share in enumerate(self.shares):
            coming = sorted((self.arrivals[key][part], [key]) for key in keys if key not in present)
            for at_s, own in [(0.0, present)] * bool(present) + coming:
                self.stall(at_s)
                count = self.assignments(event, own)
                seconds = self.experts_s(self.g, event.layer, len(own), count, 0, share)
                self.now, overhead_s = self.now + (seconds + overhead_s), 0.0

    def attend(self, first: Event) -> None:
        """Charge each layer of a pass for attention to the context and the KV cache."""
        if self.setting.attention != "context":
            return
        model, start = self.setting.emulate, first.pass_index * self.g.num_layers
        rows = slice(*self.trace.row_bounds[start : start + 2])
        positions = self.trace.columns.token[rows].tolist()
        flops, read = 0.0, 0
        for kind in model.caches:
            attended = sum(min(at + 1, kind.window or math.inf) for at in positions)
            flops += 2 * kind.num_layers * kind.multiply_adds * attended
        for at, after in zip(positions, [*positions[1:], -1], strict=True):
            if first.phase == DECODE or after != at + 1:
                read += model.kv_bytes(at + 1)
        seconds = max(flops / self.hw.peak_flops, read / self.hw.memory_bytes_per_s)
        self.attention_s = seconds / model.num_layers

    # --- the host ---

    def share_out(
        self, event: Event, wanted: Sequence[Fetch]
    ) -> tuple[Event, Sequence[Fetch], int]:
        """Give the host its part; return the device's, its loads, and the bytes to send back."""
        g, hw, layer = self.g, self.hw, event.layer
        sizes, now = g.expert_bytes[layer], self.now
        weights = g.compute_bytes[layer] if g.compute_bytes else sizes[0]
        load_s = hw.link_latency_s + sizes[0] / hw.link_rate
        cross_s = hw.link_latency_s + self.hidden(event.num_tokens) / hw.link_rate
        tokens = {f.key: self.assignments(event, [f.key]) for f in wanted}
        host_read_s = sizes[0] / hw.host_memory_bytes_per_s
        host = {
            k: self.roofline(g, hw.host_flops, weights, n, host_read_s) for k, n in tokens.items()
        }
        device = {key: self.experts_s(g, layer, 1, n) for key, n in tokens.items()}
        if self.miss.host_rule == "always":
            chosen = set(tokens)
        elif self.miss.host_rule == "first":
            chosen = {k for k in tokens if cross_s + cross_s + host[k] < load_s + device[k]}
        else:  # balanced: the cheapest left goes to the host or the dearest over the link
            chosen, left = set(), sorted(tokens, key=lambda key: (host[key], key))
            host_s, link_s, device_s = (
                max(now + cross_s, self.host_free_s),
                max(now, self.free_s),
                now,
            )
            while left:
                by_link_s = max(link_s + load_s, device_s) + device[left[-1]]
                if host_s + host[left[0]] + cross_s < by_link_s:
                    host_s += host[left[0]]
                    chosen.add(left.pop(0))
                else:
                    link_s, device_s = link_s + load_s, by_link_s
                    left.pop()
        if not chosen:
            return event, wanted, 0
        on_host = np.isin(event.experts, [key - layer * g.num_experts for key in chosen])
        nbytes = self.hidden(int(on_host.any(axis=-1).sum()))
        begins_s = max(self.transfer(nbytes, now), self.host_free_s)
        seconds = sum(host[f.key] for f in wanted if f.key in chosen)
        self.host_free_s = begins_s + seconds
        self.record.host_s += seconds
        self.record.host_executed += sum(tokens[key] for key in chosen)
        self.levels.update(dict.fromkeys(chosen, 0))
        keys = [key for key in event.keys if key not in chosen]
        rest = event._replace(keys=keys, experts=np.where(on_host, DROPPED, event.experts))
        return rest, [f for f in wanted if f.key not in chosen], nbytes

    def hidden(self, tokens: int) -> int:
        return int(tokens * self.g.hidden_size * self.g.element_bytes)

    def end_host(
        self, cache: Cache, demands: Sequence[Fetch], nbytes: int, pinned: set[int], layer: int
    ) -> None:
        """Prefetches have the link until the host's outputs come back; then uploads."""
        self.drain(self.host_free_s, pinned, layer)
        if self.flying is not None:
            self.land()
        arrival_s = self.transfer(nbytes, self.host_free_s)
        self.record.host_wait_s += max(0.0, arrival_s - self.now)
        self.now = max(self.now, arrival_s)
        for key, _ in demands[: self.miss.uploads]:
            if key not in cache.resident:
                if not self.make_room(cache, Fetch(key), pinned, layer):
                    return
                self.uploads[key] = self.transfer(self.size(key), self.now)
                self.unpaid += self.size(key)
                self.insert(cache, key)

    # --- drafts ---

    def draft(self, index: int) -> float:
        """Repeat the drafting before a pass, if any; return the seconds it waited for the link."""
        drafted, stage, stalled_s = self.trace.drafted, self.prefetch.draft_stage, 0.0
        if drafted.draft is None or drafted.tokens is None:
            return stalled_s
        draft, g = drafted.draft, drafted.draft.geometry
        ranks = iter(drafted.ranks.at(index).reshape(-1, max(drafted.ranked, 1)))
        counts = iter(drafted.experts.at(index).tolist())
        for tokens in drafted.tokens.at(index).tolist():
            for layer, target in enumerate(draft.targets or [NO_TARGET] * g.num_layers):
                self.draft_part(self.dense_s(g, layer, tokens))
                order = next(ranks) if target != NO_TARGET and drafted.ranked else None
                if stage is not None and order is not None and target < stage.cutoff:
                    self.advance(GATE_KERNELS * self.hw.kernel_overhead_s)
                    scores = np.full((1, self.g.num_experts), -np.inf, dtype=np.float32)
                    scores[0, order] = -np.arange(len(order))
                    self.num_batches += 1
                    batch = self.num_batches if stage.batched else None
                    keys = stage.propose_draft(target, scores)
                    self.enqueue(keys, index, PASS_START, self.now, {}, batch)
                    self.advance(0.0)
                count = next(counts)
                seconds = self.experts_s(g, layer, count, tokens * g.top_k, draft.level)
                self.draft_part(seconds + EXPERT_KERNELS * self.hw.kernel_overhead_s)
                if stage is not None and stage.synchronous and self.is_pending():
                    self.drain(math.inf, (), 0)
                    stalled_s += max(0.0, self.free_s - self.now)
                    self.now = max(self.now, self.free_s)
        return stalled_s

    def draft_part(self, seconds: float) -> None:
        before_s, self.draft_s = self.draft_s, self.draft_s + seconds
        self.advance(self.draft_s - before_s)

    def advance(self, seconds: float) -> None:
        self.now += seconds
        self.drain(self.now, (), 0)

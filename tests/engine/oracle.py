"""Every rule of time under the virtual clock, told slowly and plainly, to judge the engine by.

It shares no code with the engine: of the package it knows the records, and it asks the algorithms
for their choices (selections, levels, proposals, victims). A key is layer * experts + expert.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from lm_eval_moecache.algorithms.learned.data_aware import cost_of
from lm_eval_moecache.algorithms.learned.predictor import PredictorCost, costs
from lm_eval_moecache.algorithms.miss.base import weight_shares
from lm_eval_moecache.records.arrays import softmax
from lm_eval_moecache.records.event import DECODE, DROPPED, PASS_START, PREFILL, Event
from lm_eval_moecache.records.geometry import NO_TARGET
from lm_eval_moecache.records.ledger import PassRecord
from tests.engine.costs import Costs
from tests.engine.features import RankedAlone, as_stateful

TOTALS = ("bytes_moved", "link_busy_s", "evictions", "lifetime_tokens")


class Fetch(NamedTuple):
    """A load, at a precision level."""

    key: int
    level: int = 0


@dataclass
class Wish:
    """A queued prefetch; consecutive ones of a batch share a latency."""

    key: int
    level: int
    due: int
    ready_s: float
    batch: int | None


class Oracle:
    """Serves a trace; `passes`, `level` (of residents), `now` and `peak` say what came of it."""

    def __init__(
        self,
        trace: Any,
        events: Any,
        setting: Any,
        future: Any,
        pass_proposals: Any = None,
    ) -> None:
        self.trace, self.events, self.setting, self.hw = trace, events, setting, setting.hardware
        own, model, policy, hw = trace.geometry, setting.emulate, setting.policy, setting.hardware
        self.g = g = model.emulated_by(own) if model else own
        self.costs, self.pass_proposals = Costs(hw, g), pass_proposals
        self.routing, self.prefetch, self.miss = (
            getattr(policy, axis).build(g, setting.seed) for axis in ("routing", "prefetch", "miss")
        )
        self.room = setting.capacity.bytes_by_partition
        self.rules = [as_stateful(policy.eviction.build(g, setting.seed)) for _ in self.room]
        for rule, room in zip(self.rules, self.room, strict=True):
            mean = sum(levels[0] for levels in g.expert_bytes)
            rule.capacity_bytes, rule.num_slots = room, max(1, room * g.num_layers // mean)
        for algorithm in [self.prefetch, *self.rules]:
            algorithm.prepare(future)
        reads = setting.reads_per_expert
        self.shares = (2 / 3, 1 / 3) if reads == 2 else (1 / reads,) * reads
        self.fifo, self.together = setting.link == "fifo", setting.execute == "together"
        one_at_a_time = hw.link_lanes == reads == 1 and hw.lane_rate == hw.link_rate
        self.in_lanes = not (one_at_a_time and self.together) or hw.load_overhead_s_per_byte > 0
        self.now = self.free_s = self.host_free_s = self.draft_s = self.attention_s = 0.0
        self.totals = dict[str, Any].fromkeys(TOTALS, 0)
        self.tokens, self.peak, self.unpaid = [0] * len(self.room), [0] * len(self.room), 0
        self.level, self.since, self.left_in = dict[int, int](), dict[int, int](), dict[int, int]()
        self.unused, self.predicted = set[int](), dict[int, set[int]]()
        self.queue, self.index, self.num_batches = list[Wish](), -1, 0
        self.flying: Wish | None = None
        self.batch: int | None = None
        self.uploads, self.arrivals = dict[int, float](), dict[int, list[float]]()
        self.passes, self.levels = list[PassRecord](), dict[int, int]()
        self.warm()
        scans, at = dict(trace.scans), 0
        while at < trace.num_passes:
            self.scan(at, scans[at]) if at in scans else self.serve(at)
            at += scans.get(at, 1)

    # --- passes ---

    def serve(self, index: int) -> None:
        first, before, started, self.index = self.events[index][0], {**self.totals}, self.now, index
        for rule in self.rules:
            rule.on_pass(index)
        stalled = self.draft(index)
        record = PassRecord(index, first.phase, len(first.experts), started)
        record.draft_s, record.stall_s = self.now - started, stalled
        self.passes.append(record)
        self.tokens = [tokens + len(first.experts) for tokens in self.tokens]
        self.begin(record)
        if self.setting.attention == "context":
            rows = slice(*self.trace.row_bounds[index * self.g.num_layers :][:2])
            at = self.trace.columns.token[rows].tolist()
            model = self.setting.emulate
            self.attention_s = self.costs.attention_s(model, first.phase, at)
        if self.prefetch.predicts_pass:
            artifact = self.prefetch.artifact
            cost = PredictorCost() if artifact is None else cost_of(artifact)
            ready_s = self.now + self.costs.network_s(cost, len(first.experts))
            self.enqueue(self.pass_proposals[index], index, PASS_START, ready_s, {})
            self.now = ready_s
        for event in self.events[index]:
            self.run(event)
        self.count(before)
        record.end_s = self.now
        record.drafted, record.accepted = self.trace.drafted.settled.get(index, (0, 0))

    def scan(self, first: int, count: int) -> None:
        """A text goes layer by layer, in each token by token; every token is a pass of its own."""
        texts = [PassRecord(i, DECODE, 1, self.now, self.now) for i in range(first, first + count)]
        self.passes += texts
        for layer in range(self.g.num_layers):
            for record in texts:
                began, before, self.index = self.now, {**self.totals}, record.index
                self.rules[layer].on_pass(record.index)
                self.tokens[layer] += 1
                self.begin(record)
                self.run(self.events[record.index][layer]._replace(phase=DECODE))
                self.count(before)
                record.end_s += self.now - began

    def begin(self, record: PassRecord) -> None:
        self.record = record
        self.routing.on_pass(record.index)
        self.prefetch.on_pass(record.index)

    def count(self, before: dict[str, Any]) -> None:
        for name, total in self.totals.items():
            setattr(self.record, name, getattr(self.record, name) + (total - before[name]))

    # --- an event ---

    def run(self, event: Event) -> None:
        layer, rule, miss = event.layer, self.rules[self.pool_of(event.layer)], self.miss
        self.now += self.costs.dense_s(layer, len(event.experts)) + self.attention_s
        self.drain(self.now, (), layer)
        self.pay()
        executed, demands = self.decide(event)
        began, pinned, predict_s = self.now, set(executed.keys), self.costs.gates_s(event)
        if self.prefetch.uses_predictor and event.predicted:
            network = costs(self.prefetch.artifact)[layer]
            predict_s = self.costs.network_s(network, len(event.experts))
        ready_s, device, waiting, sent = self.now, executed, executed.keys, None
        self.levels = {}
        if demands:
            ready_s, wanted = self.await_pending(demands, pinned, layer)
            landed = [fetch.key for fetch in demands if fetch not in wanted]
            self.arrivals = {key: [ready_s] * len(self.shares) for key in landed}
            if miss.host_rule and wanted:
                device, wanted, sent = self.share_out(executed, wanted)
            ready_s, waiting = self.load(device, wanted, ready_s, pinned)
            if miss.cached_first:
                self.now += predict_s
                awaited = {fetch.key for fetch in demands}
                self.execute(device, [key for key in waiting if key not in awaited])
                waiting = [key for key in waiting if key in awaited]
        uploaded = [self.uploads.pop(k, 0.0) for k in executed.keys if k in self.level]
        self.stall(max(uploaded, default=0.0))
        number = event.pass_index * self.g.num_layers + layer
        self.queue = [wish for wish in self.queue if self.fifo or wish.due > number]
        if demands and self.together:
            self.stall(ready_s)
        if self.prefetch.is_active:
            if not self.prefetch.after_layer:
                self.submit(executed, began + predict_s)
            self.now = max(self.now, began + predict_s)
        if self.together or not demands:
            self.execute(device, waiting)
        else:  # read by read: residents first, then each expert as its read arrives
            present = [key for key in waiting if key not in self.arrivals]
            first = [(0.0, present)] * bool(present)
            for part, share in enumerate(self.shares):
                coming = sorted((self.arrivals[k][part], [k]) for k in waiting if k not in present)
                for at, (arrival_s, keys) in enumerate(first + coming):
                    self.stall(arrival_s)
                    self.execute(device, keys, share, launches=part == at == 0)
        if sent is not None:
            self.end_host(demands, sent, pinned, layer)
        if self.prefetch.is_active and self.prefetch.after_layer:
            self.submit(executed, self.now)
        self.drain(self.now, pinned, layer)
        if isinstance(rule, RankedAlone):
            rule.on_levels(executed, self.levels)
        else:
            rule.on_event(executed)

    def decide(self, event: Event) -> tuple[Event, Sequence[Fetch]]:
        """Look the event up, let lossy algorithms change it, and count; nothing moves yet."""
        record, miss, held = self.record, self.miss, self.level
        acts = not (self.setting.policy.phases == "decode" and event.phase == PREFILL)
        routes, lossy = (acts and not a.is_lossless for a in (self.routing, miss))
        selection = self.routing.choose(self.seen(event, self.routing)) if routes else None
        looked_up = executed = self.changed(event, selection)
        absent = [key for key in looked_up.keys if key not in held]
        missed = [key for key in absent if not self.is_pending(key)]
        asked, upgrades = missed if miss.awaits_late else absent, lossy and miss.upgrade
        required = dict.fromkeys(looked_up.keys, 0)
        if lossy and (asked or (len(self.g.precision) > 1 and upgrades)):
            given = self.seen(looked_up, miss)
            change, levels = miss.choose(given), miss.levels(given.experts, given.weights)
            if change is not None:
                is_other = change.experts != looked_up.experts
                record.substituted += int((is_other & (looked_up.experts != DROPPED)).sum())
                selection = change if selection is None else change.after(selection)
                executed = self.changed(looked_up, selection)
            base = event.layer * self.g.num_experts
            for key in executed.keys:
                own = levels[executed.experts == key - base]
                required[key] = int(own.min())
        demands = [
            Fetch(key, required.get(key, 0))
            for key in dict.fromkeys([*looked_up.keys, *executed.keys])
            if key in executed.keys
            and (key not in held or ((upgrades or not lossy) and held[key] > required.get(key, 0)))
        ]
        record.requests += len(looked_up.keys)
        record.misses += len(missed)
        record.late += len(absent) - len(missed)
        record.collisions += sum(self.left_in.get(key) == event.pass_index for key in missed)
        record.token_requests += len(event.experts) * self.g.top_k
        record.token_misses += self.served(looked_up, absent)
        record.avoided += len(set(absent) - set(executed.keys)) if lossy else 0
        differs = selection is not None and not (
            np.array_equal(selection.experts, event.experts)
            and (selection.keep is None or bool(np.all(selection.keep)))
        )
        if (routes or lossy) and len(event.weights) and (absent or differs):
            record.weighed_tokens += len(event.experts)
        if selection is not None:
            self.judge(event, selection)
        hits = self.unused.intersection(looked_up.keys)
        record.prefetch_hits += len(hits)
        self.unused -= hits
        if event.layer in self.predicted:
            predicted = self.predicted.pop(event.layer)
            record.predicted += len(predicted)
            record.predicted_right += len(predicted.intersection(looked_up.keys))
            record.predictable += len(looked_up.keys)
        return executed, demands

    def changed(self, event: Event, selection: Any) -> Event:
        """The event as selected; experts that the router did not choose weigh their softmax."""
        if selection is None:
            return event
        experts, weights = selection.experts, event.weights
        if len(weights) and len(event.logits):
            scores = softmax(event.logits)
            for token, place in np.argwhere(event.experts != DROPPED):
                scores[token, event.experts[token, place]] = weights[token, place]
            weights = np.take_along_axis(scores, experts, axis=-1)
            if selection.weights is not None:
                weights = np.where(np.isnan(selection.weights), weights, selection.weights)
        if selection.keep is not None:
            experts = np.where(selection.keep, experts, DROPPED)
        return event._replace(experts=experts, weights=weights)

    def seen(self, event: Event, rule: Any) -> Event:
        """The event with where the layer's experts are, as rules that choose see it."""
        keys = range(event.layer * self.g.num_experts, (event.layer + 1) * self.g.num_experts)
        held = np.array([[key in self.level for key in keys]])
        late = np.array([[self.miss.awaits_late and self.is_pending(key) for key in keys]])
        return event._replace(resident=held, absent=~held & ~late, own=[rule])

    def judge(self, event: Event, selection: Any) -> None:
        """Count what a selection leaves out, puts in, and loses of the router's weights."""
        router, chosen, keep = event.experts, selection.experts, selection.keep
        keep = np.ones(chosen.shape, bool) if keep is None else keep
        is_same = router[:, :, None] == np.where(keep, chosen, DROPPED)[:, None, :]
        self.record.dropped += int((~keep).sum())
        self.record.unfaithful += int((keep & ~is_same.any(axis=1)).sum())
        if len(event.weights):
            lost = weight_shares(event.experts, event.weights)[~is_same.any(axis=2)]
            self.record.lost_weight += float(lost.sum(dtype=np.float64))

    def served(self, event: Event, keys: Collection[int]) -> int:
        """The (token, expert) pairs of an event that these keys serve."""
        experts = [key - event.layer * self.g.num_experts for key in keys]
        return sum(expert in experts for expert in event.experts.ravel().tolist())

    # --- loading ---

    def await_pending(self, demands: Any, pinned: set[int], layer: int) -> tuple[float, Any]:
        """Land what precedes the demands on the link; return when, and the demands left."""
        ready_s, keys = self.now, {fetch.key for fetch in demands}
        if self.flying or (self.fifo and self.queue):
            self.unused -= pinned
            precedes = not self.fifo or any(not self.is_pending(key) for key in keys)
            while self.is_pending() and (precedes or any(map(self.is_pending, keys))):
                if self.flying:
                    ready_s = max(ready_s, self.free_s) if self.flying.key in keys else ready_s
                    self.land()
                elif not self.fifo:
                    break
                elif not self.start(self.queue[0], pinned, layer):
                    self.queue.pop(0)
            self.unused -= pinned
        return ready_s, [f for f in demands if self.level.get(f.key, f.level + 1) > f.level]

    def load(
        self, event: Event, wanted: Any, ready_s: float, pinned: set[int]
    ) -> tuple[float, Any]:
        """Load in waves of what fits; return when the last has arrived, and what is left to run."""
        layer, waiting, wave, keys = event.layer, event.keys, list[Fetch](), {f.key for f in wanted}
        upgraded = keys.intersection(self.level)
        for key in upgraded:
            self.remove(key)
        self.queue = [wish for wish in self.queue if self.fifo or wish.key not in keys]
        self.unpaid += sum(self.size(*fetch) for fetch in wanted)
        self.pay()
        ready_s = max(ready_s, self.now)
        for fetch in wanted:
            if not self.make_room(*fetch, pinned, layer):
                self.stall(self.move(wave, ready_s))
                done = [key for key in waiting if key in self.level]
                waiting = [key for key in waiting if key not in self.level]
                self.execute(event, done)
                self.rules[self.pool_of(layer)].on_executed(layer, done)
                ready_s, pinned, wave, self.arrivals = self.now, set(waiting), [], {}
                assert self.make_room(*fetch, pinned, layer)
            wave.append(fetch)
            self.insert(*fetch, prefetched=False, is_new=fetch.key not in upgraded)
        return self.move(wave, ready_s), waiting

    def move(self, wave: Sequence[Fetch], ready_s: float) -> float:
        """Move experts from `ready_s` on; return when the last arrives."""
        sizes, start = [self.size(*fetch) for fetch in wave], max(ready_s, self.free_s)
        if not self.in_lanes or not wave:
            for nbytes in sizes:
                ready_s = self.transfer(nbytes, ready_s)
            return ready_s
        ends = self.costs.lanes([share * nbytes for share in self.shares for nbytes in sizes])
        for place, fetch in enumerate(wave):
            self.arrivals[fetch.key] = [start + end_s for end_s in ends[place :: len(wave)]]
        self.free_s, self.batch = start + max(ends), None
        self.totals["link_busy_s"] += self.free_s - start
        self.totals["bytes_moved"] += sum(sizes)
        return self.free_s

    # --- the link and its prefetches ---

    def transfer(self, nbytes: int, at_s: float, joins: bool = False) -> float:
        duration_s = nbytes / self.hw.lane_rate
        if not joins:
            duration_s, self.batch = duration_s + self.hw.link_latency_s, None
        self.free_s = max(at_s, self.free_s) + duration_s
        self.totals["link_busy_s"] += duration_s
        self.totals["bytes_moved"] += nbytes
        return self.free_s

    def is_pending(self, key: int | None = None) -> bool:
        wishes = self.queue + ([self.flying] if self.flying else [])
        return any(key in (None, wish.key) for wish in wishes)

    def submit(self, event: Event, ready_s: float) -> None:
        keys, levels = [*self.prefetch.propose(event)], dict[int, int]()
        acts = not (self.setting.policy.phases == "decode" and event.phase == PREFILL)
        if len(self.g.precision) > 1 and acts and not self.miss.is_lossless:
            for layer in dict.fromkeys(key // self.g.num_experts for key in keys):
                own = np.array([key for key in keys if key // self.g.num_experts == layer])
                told = self.miss.prefetch_levels(event, layer, own % self.g.num_experts)
                levels |= zip(own.tolist(), told.tolist(), strict=True)
        self.enqueue(keys, event.pass_index, event.layer, ready_s, levels)

    def enqueue(
        self, keys: Any, index: int, after: int, ready_s: float, levels: Any, batch: Any = None
    ) -> None:
        """Queue absent keys by the event they are for: up to layer `after` the next pass's."""
        for key in keys:
            layer = key // self.g.num_experts
            self.predicted.setdefault(layer, set()).add(key)
            if key in self.level:
                self.rules[self.pool_of(layer)].on_predicted(key)
            elif not self.is_pending(key):
                due = (index + (layer <= after)) * self.g.num_layers + layer
                self.queue.append(Wish(key, levels.get(key, 0), due, ready_s, batch))
        if not self.fifo:
            self.queue.sort(key=lambda wish: wish.due)

    def drain(self, until_s: float, pinned: Collection[int], layer: int) -> None:
        """Let prefetches use the link up to `until_s`; at that instant demands go first."""
        while self.is_pending():
            if self.flying:
                if self.free_s > until_s:
                    return
                self.land()
            elif max(self.free_s, self.queue[0].ready_s) >= until_s:
                return
            elif not self.start(self.queue[0], pinned, layer):
                self.queue[0].ready_s = until_s
                return

    def start(self, wish: Wish, pinned: Collection[int], layer: int) -> bool:
        """Begin a prefetch, which takes its room now; False if there is none."""
        if wish.key not in self.level:
            if not self.make_room(wish.key, wish.level, pinned, layer):
                return False
            at_s = max(wish.ready_s, self.free_s)
            joins = wish.batch is not None and wish.batch == self.batch and at_s <= self.free_s
            self.transfer(self.size(wish.key, wish.level), at_s, joins)
            self.batch, self.flying = wish.batch, wish
        self.queue.remove(wish)
        return True

    def land(self) -> None:
        wish, self.flying = self.flying, None
        self.unpaid += self.size(wish.key, wish.level)
        self.unused.add(wish.key)
        self.insert(wish.key, wish.level, True)

    # --- caches ---

    def pool_of(self, layer: int) -> int:
        return layer if len(self.rules) > 1 else 0

    def size(self, key: int, level: int = 0) -> int:
        return self.g.expert_bytes[key // self.g.num_experts][level]

    def used(self, pool: int) -> int:
        held = [*self.level.items(), *[(w.key, w.level) for w in [self.flying] if w]]
        own = [each for each in held if self.pool_of(each[0] // self.g.num_experts) == pool]
        return sum(self.size(*each) for each in own)

    def make_room(self, key: int, level: int, pinned: Collection[int], layer: int) -> bool:
        """Evict until an expert fits into its cache; False if all that is left is pinned."""
        pool, nbytes = self.pool_of(key // self.g.num_experts), self.size(key, level)
        rule, most = self.rules[pool], self.room[pool] - nbytes
        if self.used(pool) > most:
            rule.on_miss(key)
        while self.used(pool) > most:
            victim = rule.victim(pinned, layer)
            if victim is None:
                return False
            assert victim in self.level and victim not in pinned
            self.evict(pool, victim)
        self.peak[pool] = max(self.peak[pool], self.used(pool) + nbytes)
        return True

    def insert(self, key: int, level: int, prefetched: bool, is_new: bool = True) -> None:
        """Make an expert resident; evictions hear nothing of one loaded at a better level."""
        pool = self.pool_of(key // self.g.num_experts)
        self.level[key], self.since[key] = level, self.tokens[pool]
        if is_new:
            self.rules[pool].on_insert(key, prefetched)

    def evict(self, pool: int, key: int) -> None:
        self.totals["evictions"] += 1
        self.totals["lifetime_tokens"] += self.tokens[pool] - self.since[key]
        self.left_in[key] = self.index
        self.remove(key)
        self.rules[pool].on_evict(key)

    def remove(self, key: int) -> None:
        del self.level[key], self.since[key]
        self.unused.discard(key)

    def warm(self) -> None:
        """Fill the caches with the hottest experts that fit, the hottest inserted last."""
        room, fitting = [*self.room], list[int]()
        for key in self.setting.warm.hottest if self.setting.warm else ():
            pool = self.pool_of(key // self.g.num_experts)
            if self.size(key) <= room[pool]:
                room[pool] -= self.size(key)
                fitting.insert(0, key)
        for key in fitting:
            self.make_room(key, 0, (), 0)
            self.insert(key, 0, prefetched=False)

    def stall(self, until_s: float) -> None:
        """Wait for the link, which costs the wait overhead as well."""
        if until_s > self.now:
            self.record.stall_s += until_s - self.now
            self.now = until_s + self.hw.wait_overhead_s

    def pay(self) -> None:
        """Charge the compute for what was loaded since the last time."""
        self.now, self.unpaid = self.now + self.hw.load_overhead_s_per_byte * self.unpaid, 0

    def execute(self, event: Event, keys: Any, share: float = 1.0, launches: bool = True) -> None:
        """Run residents, or a share of their weights; each level has kernels of its own."""
        for level in sorted({self.level[key] for key in keys}):
            own = [key for key in keys if self.level[key] == level]
            served = self.served(event, own)
            seconds = self.costs.experts_s(event.layer, len(own), served, level)
            self.now += share * seconds + (self.costs.launch_s if launches else 0.0)
            self.record.low_precision += served if level else 0
            self.levels |= dict.fromkeys(own, level)

    # --- the host ---

    def share_out(self, event: Event, wanted: Any) -> tuple[Event, Any, int | None]:
        """Give the host its part; return the device's, its loads, and the bytes to send back."""
        tokens = {fetch.key: self.served(event, [fetch.key]) for fetch in wanted}
        chosen, seconds = self.costs.host_share(
            self.miss.host_rule, event, tokens, self.now, self.free_s, self.host_free_s
        )
        if not chosen:
            return event, wanted, None
        base = event.layer * self.g.num_experts
        on_host = np.isin(event.experts, [key - base for key in chosen])
        sent = self.costs.activations(int(on_host.any(axis=-1).sum()))
        self.host_free_s = max(self.transfer(sent, self.now), self.host_free_s) + seconds
        self.record.host_s += seconds
        self.record.host_executed += sum(tokens[key] for key in chosen)
        self.levels |= dict.fromkeys(chosen, 0)
        rest = event._replace(experts=np.where(on_host, DROPPED, event.experts))
        return rest, [fetch for fetch in wanted if fetch.key not in chosen], sent

    def end_host(self, demands: Any, sent: int, pinned: set[int], layer: int) -> None:
        """Prefetches have the link until the host's outputs come back; then uploads."""
        self.drain(self.host_free_s, pinned, layer)
        if self.flying:
            self.land()
        arrival_s = self.transfer(sent, self.host_free_s)
        self.record.host_wait_s += max(0.0, arrival_s - self.now)
        self.now = max(self.now, arrival_s)
        for key, _ in demands[: self.miss.uploads]:
            if key not in self.level:
                if not self.make_room(key, 0, pinned, layer):
                    return
                self.uploads[key] = self.transfer(self.size(key), self.now)
                self.unpaid += self.size(key)
                self.insert(key, 0, prefetched=False)

    # --- drafts ---

    def draft(self, index: int) -> float:
        """Repeat the drafting before a pass, if any; return the seconds it waited for the link."""
        drafted, stage, stalled_s = self.trace.drafted, self.prefetch.draft_stage, 0.0
        if drafted.draft is None:
            return stalled_s
        draft, seconds = drafted.draft, Costs(self.hw, drafted.draft.geometry)
        ranks = iter(drafted.ranks.at(index).reshape(-1, max(drafted.ranked, 1)))
        counts = iter(drafted.experts.at(index).tolist())
        for tokens in drafted.tokens.at(index).tolist():
            for layer, target in enumerate(draft.targets or [NO_TARGET] * seconds.g.num_layers):
                self.draft_for(seconds.dense_s(layer, tokens))
                order = next(ranks) if target != NO_TARGET and drafted.ranked else None
                if stage is not None and order is not None and target < stage.cutoff:
                    self.advance(seconds.gate_s)
                    scores = np.full((1, self.g.num_experts), -np.inf, dtype=np.float32)
                    scores[0, order] = -np.arange(len(order))
                    self.num_batches += 1
                    batch = self.num_batches if stage.batched else None
                    keys = stage.propose_draft(target, scores)
                    self.enqueue(keys, index, PASS_START, self.now, {}, batch)
                    self.advance(0.0)
                served, count = tokens * seconds.g.top_k, next(counts)
                experts_s = seconds.experts_s(layer, count, served, draft.level)
                self.draft_for(experts_s + seconds.launch_s)
                if stage is not None and stage.synchronous and self.is_pending():
                    self.drain(math.inf, (), 0)
                    stalled_s += max(0.0, self.free_s - self.now)
                    self.now = max(self.now, self.free_s)
        return stalled_s

    def draft_for(self, seconds: float) -> None:
        before_s, self.draft_s = self.draft_s, self.draft_s + seconds
        self.advance(self.draft_s - before_s)

    def advance(self, seconds: float) -> None:
        self.now += seconds
        self.drain(self.now, (), 0)

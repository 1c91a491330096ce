"""The engine on a link that really moves, which has experts run as they come.

`run` decides and starts the transfers where the router has spoken; the `waves` execute, where the
model calls the experts. All decisions are the calling thread's: only bytes move elsewhere.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from lm_eval_moecache.engine.decide import Plan
from lm_eval_moecache.engine.engine import Engine
from lm_eval_moecache.engine.host import HOST, HostShare
from lm_eval_moecache.engine.setting import Setting
from lm_eval_moecache.engine.wall.link import (
    Mover,
    Traffic,
    Transfer,
    WallClock,
    WallLink,
    bring,
    time_load,
    transfer_of,
)
from lm_eval_moecache.engine.wall.slots import PlacedCache, make_caches
from lm_eval_moecache.records.event import PREFILL, Event, Fetch, num_assignments
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.ledger import PassRecord
from lm_eval_moecache.records.selection import Selection

# A prefill executes what has arrived once it is a quarter of the event: more, smaller parts hide
# little more of the compute and cost kernels.
PARTS = 4
_NOTHING: frozenset[int] = frozenset()


@dataclass(slots=True)
class _Pending:
    """An event between `run` and the last of its waves."""

    event: Event
    demands: list[Fetch]
    """Not yet given to the link: they did not fit."""
    remaining: Sequence[int]
    """Keys not yet executed."""
    levels: dict[int, int] | None
    """Key -> the level at which it was executed; None where there is one level."""
    on_host: Sequence[int] = ()
    """Keys that the host executes."""


class WallEngine(Engine):
    """Serves an event in two parts: `run` begins it, the `waves` end it.

    The clock is the machine's, and the mover's bytes really move.
    """

    clock: WallClock
    link: WallLink
    caches: Sequence[PlacedCache]

    def __init__(self, geometry: Geometry, setting: Setting, mover: Mover) -> None:
        # Where experts are stored encoded, also at one level, the mover makes slots for them.
        encoded = bool(geometry.compute_bytes)
        pools = make_caches(geometry, setting, encoded)
        link = WallLink(mover, setting.throttle_bytes_per_s, encoded)
        self._pending: _Pending | None = None
        self._script: ScanScript | None = None
        super().__init__(geometry, setting, pools, link, WallClock(mover.synchronize))
        self.traffic = Traffic(self.caches, link, self.prefetches, geometry.num_experts)
        rule = self.rules.miss.host_rule
        self.host = HostShare(rule, self.geometry, link) if rule else None

    def _warm(self) -> None:
        super()._warm()
        self.fill()

    def enter(self, layer: int, num_tokens: int) -> None:
        """Do nothing: the end of the layer before has issued what may begin until `run`."""

    def run(self, event: Event) -> Plan:
        prefetches, traffic, link = self.rules.prefetches, self.traffic, self.link
        link.launched()
        if prefetches and link.active:
            traffic.settle(link.arrivals())
        cache = self.caches[event.layer]
        plan = self._look_up(event, cache)
        if self._script is not None:
            self._script.add(plan, cache, self.record)
            return plan
        event = plan.event
        levels: dict[int, int] | None = {} if self.rules.ladder else None
        plan.levels = levels
        self._pending = pending = _Pending(event, list(plan.demands), event.keys, levels)
        self._begin(pending)
        if prefetches:
            if not self.rules.prefetch.after_layer:
                self.prefetches.submit(event, self.clock.now)
            if not pending.demands:
                keys = set(event.keys)
                awaited = any(link.is_flying(key) for key in keys)
                traffic.drain(keys, event.layer, (event.phase, event.layer, "begun"), awaited)
        return plan

    def waves(self) -> Iterator[tuple[Mapping[int, int], bool]]:
        if self._script is not None:
            yield from self._script.play(self.clock)
            self._script = None
            return
        if (pending := self._pending) is None:
            return
        event = pending.event
        eviction = self.caches[event.layer].eviction
        if pending.on_host:
            if pending.levels is not None:
                pending.levels.update(dict.fromkeys(pending.on_host, 0))
            assignments = num_assignments(event, pending.on_host, self.geometry.num_experts)
            self.record.host_executed += assignments
            yield dict.fromkeys(pending.on_host, HOST), False
        while True:
            yield from self._wave(pending)
            if not pending.demands:
                break
            given = len(pending.demands)
            left = set(pending.remaining)
            eviction.on_executed(event.layer, [key for key in event.keys if key not in left])
            self.link.launched()
            self._demand(pending, left)
            assert len(pending.demands) < given, "no room for one expert after its wave"
        if self.rules.prefetches:
            self.link.launched()
            if self.rules.prefetch.after_layer:
                self.prefetches.submit(event, self.clock.now)
            self.traffic.drain(set(event.keys), event.layer, (event.phase, event.layer, "executed"))
        if pending.levels is None:
            eviction.on_event(event)
        else:
            eviction.on_levels(event, pending.levels)
        self._pending = None  # Until here `recover` waits for what was demanded.

    def _recover(self) -> None:
        if self._script is not None:
            self._script.catch_up()
            self._script = None
        if self._pending is not None:
            # What it demanded may still be on its way into its slots.
            self._pending = None
            while demanded := self.link.demanded():
                self.traffic.settle(self.link.wait_for(demanded))

    def scan(self, event: Event) -> Selection | None:
        self._script = ScanScript(self.link)
        return super().scan(event)

    def end_scan(self) -> None:
        # What the text took beside its tokens' own experts is shared among these.
        self.clock.synchronize()
        records = self._scanned
        spent_s = sum(record.duration_s for record in records)
        rest_s = self.clock.now - records[0].start_s - spent_s
        for record in records:
            record.end_s += rest_s / len(records)
        super().end_scan()

    def fill(self) -> None:
        """Bring what the caches say is resident there, uncounted: they have been warmed."""
        for cache in dict.fromkeys(self.caches):
            bring(cache, self.link, list(cache.slots.items()))

    def time_load(self, count: int) -> float:
        seconds = time_load(self.caches[0], self.link, count)
        self._before = self._totals()
        return seconds

    def _advance(self, seconds: float) -> None:
        if self.link.active:
            self.link.launched()
            self.traffic.drain(_NOTHING, 0)

    def _await_prefetches(self) -> float:
        start_s = self.clock.now
        # What finds no room is left to its event, which demands it.
        while issued := self.link.issued():
            self.traffic.settle(self.link.wait_for(issued))
            self._advance(0.0)
        return self.clock.now - start_s

    def settle(self) -> None:
        self._recover()
        link = self.link
        link.clear()
        self.prefetches.forget()
        for cache in dict.fromkeys(self.caches):
            while (key := link.withdraw_last(cache.arriving, ())) is not None:
                cache.withdraw(key)
            while cache.arriving:
                self.traffic.settle(link.wait_for(cache.arriving))

    def close(self) -> None:
        self.link.close()

    def _begin(self, pending: _Pending) -> None:
        """Give an event's demands to the link, as far as they fit."""
        event, link = pending.event, self.link
        wanted = set(event.keys)
        cache = self.caches[event.layer]
        if self.rules.prefetches and link.active:
            pending.demands = [f for f in pending.demands if not self._is_coming(cache, f)]
            due = event.pass_index * self.geometry.num_layers + event.layer
            self.traffic.cancel(due, wanted)
            cache.unused_prefetches -= wanted
        if self.host is not None and pending.demands:
            chosen = self.host.choose(event, pending.demands)
            pending.on_host = [fetch.key for fetch in pending.demands if fetch.key in chosen]
            pending.demands = [fetch for fetch in pending.demands if fetch.key not in chosen]
            pending.remaining = [key for key in pending.remaining if key not in chosen]
        if self.rules.ladder:
            for fetch in pending.demands:
                if fetch.key in cache.resident:
                    # At a worse level, which is of no use to this event.
                    cache.release_for_upgrade(fetch.key)
        self._demand(pending, wanted)

    def note_host(self, busy_s: float, wait_s: float) -> None:
        """Note what the host's part of an event took, and how long the device's waited for it."""
        self.record.host_s += busy_s
        self.record.host_wait_s += wait_s

    def _is_coming(self, cache: PlacedCache, fetch: Fetch) -> bool:
        """Whether a demand need not be moved: a prefetch brings it, at a level that will do."""
        key, link = fetch.key, self.link
        if key in cache.arriving:
            if cache.arriving[key] <= fetch.level:
                link.promote(key)
                return True
            if link.take_back(key):
                cache.withdraw(key)
            else:
                self._wait({key})
        elif link.is_pending(key):
            link.withdraw(key)
        return cache.resident.get(key, fetch.level + 1) <= fetch.level

    def _demand(self, pending: _Pending, pinned: Set[int]) -> None:
        cache, layer = self.caches[pending.event.layer], pending.event.layer
        for done, (key, level) in enumerate(pending.demands):
            nbytes = cache.size_of(key, level)
            while not cache.make_room(nbytes, pinned, layer, key):
                if not self._reclaim(cache, pinned):
                    pending.demands = pending.demands[done:]
                    return
            cache.insert(key, level)
            self.link.demand(transfer_of(cache, key, level))
        pending.demands = []

    def _reclaim(self, cache: PlacedCache, pinned: Set[int]) -> bool:
        """Make one prefetch give way to a demand; False where none of this cache is under way."""
        key = self.link.withdraw_last(cache.arriving, pinned)
        if key is not None:
            cache.withdraw(key)
            return True
        moving = cache.arriving.keys() - pinned
        if not moving:
            return False
        self._wait(moving)
        return True

    def _wave(self, pending: _Pending) -> Iterator[tuple[Mapping[int, int], bool]]:
        """Yield all that is there or on its way, in order of arrival.

        A decode step waits for its last expert: one call, as few kernels as possible. The compute
        of a prefill hides part of its transfers, and so does that of the resident experts where
        the policy executes them first.
        """
        event, cache, link = pending.event, self.caches[pending.event.layer], self.link
        held = [k for k in pending.remaining if k in cache.slots]
        pending.remaining = [k for k in pending.remaining if k not in cache.slots]
        flying = {k for k in held if link.is_flying(k)}
        here = [k for k in held if k not in flying]
        enough = -(-len(event.keys) // PARTS) if event.phase == PREFILL else len(held) + 1
        at_once = self.rules.miss.cached_first
        while flying:
            if here and (at_once or len(here) >= enough):
                yield self._execute(pending, cache, here), False
                here = []
            at_once = False
            self._wait(flying, max(1, min(len(flying), enough - len(here))))
            arrived = [k for k in held if k in flying and not link.is_flying(k)]
            flying -= set(arrived)
            here += arrived
        if here:
            yield self._execute(pending, cache, here), len(here) == len(event.keys)
        cache.unused_prefetches -= set(held)

    def _execute(
        self, pending: _Pending, cache: PlacedCache, keys: Sequence[int]
    ) -> Mapping[int, int]:
        """Note that these keys are executed now; return where they lie."""
        if pending.levels is not None:
            pending.levels.update({key: cache.resident[key] for key in keys})
            lower = [key for key in keys if cache.resident[key]]
            if lower:
                num_experts = self.geometry.num_experts
                self.record.low_precision += num_assignments(pending.event, lower, num_experts)
        return {key: cache.slots[key] for key in keys}

    def _wait(self, keys: Set[int], count: int = 1) -> None:
        """Stand still until `count` of the flying `keys` are there."""
        start_s = time.perf_counter()
        self.traffic.settle(self.link.wait_for(keys, count))
        waited_s = time.perf_counter() - start_s
        self.record.stall_s += waited_s
        self.traffic.stood_still(waited_s)


class ScanScript:
    """A layer's tokens: what each of them asks of the link, and where its experts lie then.

    The router decides for the whole text before any expert runs. Without prefetches nothing that a
    cache decides depends on time, so all tokens are decided first, and their bytes follow in that
    order, each token's awaited before the next one's may take their slots. An expert runs once, for
    all of its tokens, when it first is there: the same products as without a cache.
    """

    def __init__(self, link: WallLink) -> None:
        self._link = link
        self._steps: deque[tuple[list[Transfer], dict[int, int], PassRecord]] = deque()
        """What moves before a part of one token's experts, and where these lie then."""

    def add(self, plan: Plan, cache: PlacedCache, record: PassRecord) -> None:
        """Decide one token's event to its end, waves included; what it moves is counted now."""
        event, demands = plan.event, deque(plan.demands)
        remaining = set(event.keys)
        while remaining:
            transfers: list[Transfer] = []
            while demands:
                key, level = demands[0]
                if not cache.make_room(cache.size_of(key, level), remaining, event.layer, key):
                    break
                cache.insert(key, level)
                transfers.append(transfer_of(cache, key, level))
                self._link.count(transfers[-1])
                demands.popleft()
            here = {k: cache.slots[k] for k in event.keys if k in remaining and k in cache.slots}
            assert here, "no room for one expert after its wave"
            remaining -= here.keys()
            self._steps.append((transfers, here, record))
        cache.eviction.on_event(event)

    def play(self, clock: WallClock) -> Iterator[tuple[Mapping[int, int], bool]]:
        """Carry everything out; yield what is there for the first time, as it comes."""
        link, done = self._link, set[int]()
        while self._steps:
            transfers, slots, record = self._steps[0]
            start_s, busy_s = clock.now, link.busy_s
            self._move(transfers, record)
            fresh = {key: slot for key, slot in slots.items() if key not in done}
            done.update(fresh)
            self._steps.popleft()
            if fresh:
                yield fresh, False
            record.link_busy_s += link.busy_s - busy_s
            record.end_s += clock.now - start_s

    def catch_up(self) -> None:
        """Move what is left of a text that broke off: the cache says already that it is there."""
        while self._steps:
            transfers, _, record = self._steps.popleft()
            self._move(transfers, record)

    def _move(self, transfers: Sequence[Transfer], record: PassRecord) -> None:
        link = self._link
        if not transfers:
            return
        link.launched()
        for transfer in transfers:
            link.move(transfer)
        begun_s = time.perf_counter()
        link.wait_for({transfer.key for transfer in transfers}, len(transfers))
        record.stall_s += time.perf_counter() - begun_s

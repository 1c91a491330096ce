"""The engine of the wall clock: real transfers, and experts executed as they arrive.

`run` decides and starts the transfers once the router has chosen; the `waves` execute where the
model calls its experts. The calling thread makes all decisions; only bytes move in another.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import count

from lm_eval_moecache.engine import core
from lm_eval_moecache.engine.decide import Plan
from lm_eval_moecache.engine.engine import Engine
from lm_eval_moecache.engine.host import HOST, HostShare
from lm_eval_moecache.engine.setting import Setting
from lm_eval_moecache.engine.wall.link import (
    Mover,
    Traffic,
    WallClock,
    WallLink,
    bring,
    time_load,
    transfer_of,
)
from lm_eval_moecache.engine.wall.slots import Held, LeveledCache, PlacedCache, SlottedCache
from lm_eval_moecache.records.event import PREFILL, Event, Fetch, num_assignments
from lm_eval_moecache.records.geometry import Geometry

# A prefill executes the arrived experts once they are a quarter of the event: more, smaller parts
# would hide little more of the transfers and cost kernel launches.
PARTS = 4
NOBODY = -1
"""A mark by which nobody is pinned."""


@dataclass(slots=True)
class _Pending:
    """An event between `run` and the last of its waves."""

    event: Event
    demands: list[Fetch]
    """Demands not yet given to the link, because they did not fit."""
    remaining: Sequence[int]
    """Keys not yet executed."""
    levels: dict[int, int] | None
    """Executed key -> its precision level; None where the store has one level."""
    on_host: Sequence[int] = ()
    """Keys that the host executes."""


class WallEngine(Engine):
    """Serves an event in two steps: `run` begins it, the `waves` end it.

    Time is the machine's, and the mover really copies bytes.
    """

    clock: WallClock
    link: WallLink
    pools: Sequence[PlacedCache]
    caches: Sequence[PlacedCache]

    def __init__(self, geometry: Geometry, setting: Setting, mover: Mover) -> None:
        # For experts stored encoded, even at a single level, the mover makes the slots.
        self._encoded = bool(geometry.compute_bytes)
        self._pending: _Pending | None = None
        super().__init__(geometry, setting)
        self.link = WallLink(mover, setting.throttle_bytes_per_s, self._encoded)
        self.clock = WallClock(mover.synchronize)
        self.traffic = Traffic(self.caches, self.link, self.state)
        rule = self.rules.miss.host_rule
        self.host = HostShare(rule, self.geometry, self.link) if rule else None
        self.state.run[0].placed = 1
        caches, slots = self.caches, self.state.slots
        # Without a reference to the engine: the memory of its slots goes with it.
        self.outside.vacate = lambda key: caches[slots[key].home].vacate(key)
        self._fill()
        self._before = self._totals()

    def _make_pools(self) -> Sequence[PlacedCache]:
        geometry, held, names = self.geometry, Held(self.state), count()
        partitions = self.setting.capacity.partitions(geometry.num_layers)
        pools: list[PlacedCache] = []
        for eviction, layers in zip(self.outside.evictions, partitions, strict=True):
            if self._encoded:
                pools.append(LeveledCache(held, len(pools), eviction, names))
            else:
                pools.append(SlottedCache(held, len(pools), eviction, geometry, layers))
        return pools

    def _fill(self) -> None:
        for key in self.warm:
            self.caches[self.state.slots[key].home].fill([key])
        self.fill()

    @property
    def _is_prefetching(self) -> bool:
        """Whether a prefetch is queued or issued."""
        return self.rules.prefetches and (self.state.run[0].queued > 0 or self.link.active)

    def enter(self, layer: int, num_tokens: int) -> None:
        """Do nothing: the end of the previous layer issued what may begin before `run`."""

    def run(self, event: Event) -> Plan:
        traffic, link, run = self.traffic, self.link, self.state.run[0]
        link.launched()
        if self._is_prefetching:
            traffic.land(link.arrivals())
        plan = self._decide(event)
        event, demands = plan.event, plan.demands
        if demands is None:
            slots = self.state.slots
            demands = [Fetch(key) for key in event.keys if slots[key].demanded == run.mark]
        levels: dict[int, int] | None = {} if self.rules.ladder else None
        plan.levels = levels
        self._pending = pending = _Pending(event, list(demands), event.keys, levels)
        self._begin(pending)
        if self.rules.prefetches:
            if not self.rules.prefetch.after_layer:
                self._submit(event, self.clock.now)
            if not pending.demands:
                awaited = any(link.is_flying(key) for key in event.keys)
                visit = event.phase, event.layer, "begun"
                traffic.drain(run.mark, event.layer, visit, awaited)
        return plan

    def waves(self) -> Iterator[tuple[Mapping[int, int], bool]]:
        if (pending := self._pending) is None:
            return
        event, state = pending.event, self.state
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
            num_demands = len(pending.demands)
            unexecuted = set(pending.remaining)
            core.pin(state, pending.remaining, 0, len(pending.remaining), event.layer)
            if state.run[0].own:
                executed = [key for key in event.keys if key not in unexecuted]
                self.caches[event.layer].eviction.on_executed(event.layer, executed)
            self.link.launched()
            self._demand(pending, unexecuted)
            assert len(pending.demands) < num_demands, "no room for one expert after its wave"
        if self.rules.prefetches:
            self.link.launched()
            if self.rules.prefetch.after_layer:
                self._submit(event, self.clock.now)
            core.pin(state, event.keys, 0, len(event.keys), event.layer)
            visit = event.phase, event.layer, "executed"
            self.traffic.drain(state.run[0].mark, event.layer, visit)
        for key, level in (pending.levels or {}).items():
            state.slots[key].executed_level = level
            state.experts[key].ran_below_best_precision = int(level > 0)
        core.note(state, self._event_of(event))
        self._pending = None  # Up to here `_recover` has demands to wait for.

    def _recover(self) -> None:
        super()._recover()
        if self._pending is not None:
            # Its demands may still be moving into their slots.
            self._pending = None
            while demanded := self.link.demanded():
                self.traffic.land(self.link.wait_for(demanded))

    def fill(self) -> None:
        """Load the residents of warmed caches into their slots; no pass is charged."""
        for cache in dict.fromkeys(self.caches):
            bring(cache, self.link, list(cache.slots.items()))

    def time_load(self, count: int) -> float:
        seconds = time_load(self.caches[0], self.link, count)
        self._before = self._totals()
        return seconds

    def advance(self, seconds: float) -> None:
        if self._is_prefetching:
            self.link.launched()
            self.traffic.drain(NOBODY, 0)

    def await_prefetches(self) -> float:
        start_s = self.clock.now
        # Prefetches that find no room are left for their events to demand.
        while issued := self.link.issued():
            self.traffic.land(self.link.wait_for(issued))
            self.advance(0.0)
        return self.clock.now - start_s

    def flush(self) -> None:
        self._recover()
        link = self.link
        core.flush(self.state)
        while (key := link.withdraw_last(link.issued(), ())) is not None:
            self.caches[self.state.slots[key].home].withdraw(key)
        while issued := link.issued():
            self.traffic.land(link.wait_for(issued))

    def close(self) -> None:
        self.link.close()

    def _begin(self, pending: _Pending) -> None:
        """Give an event's demands to the link as far as they fit, after the host's share."""
        event = pending.event
        event_keys = set(event.keys)
        cache = self.caches[event.layer]
        if self._is_prefetching:
            pending.demands = [f for f in pending.demands if not self._is_coming(cache, f)]
            due = event.pass_index * self.geometry.num_layers + event.layer
            self.traffic.cancel(due, event_keys)
            self._use(event_keys)
        if self.host is not None and pending.demands:
            chosen = self.host.choose(event, pending.demands)
            pending.on_host = [fetch.key for fetch in pending.demands if fetch.key in chosen]
            pending.demands = [fetch for fetch in pending.demands if fetch.key not in chosen]
            pending.remaining = [key for key in pending.remaining if key not in chosen]
        if self.rules.ladder:
            for fetch in pending.demands:
                if self.state.experts[fetch.key].resident:
                    # At a worse level than this event needs.
                    core.release_for_upgrade(self.state, fetch.key)
        self._demand(pending, event_keys)

    def note_host(self, busy_s: float, wait_s: float) -> None:
        """Record the seconds of the host's part of an event, and of the device's wait for it."""
        self.record.host_s += busy_s
        self.record.host_wait_s += wait_s

    def _is_coming(self, cache: PlacedCache, fetch: Fetch) -> bool:
        """Whether a demand needs no transfer, as a prefetch brings it at a sufficient level."""
        key, link, slot = fetch.key, self.link, self.state.slots[fetch.key]
        if slot.arriving:
            if slot.level <= fetch.level:
                link.promote(key)
                return True
            if link.revoke(key):
                cache.withdraw(key)
            else:
                self._wait({key})
        elif slot.due >= 0:
            core.withdraw(self.state, key)
        return cache.holds(key, fetch.level)

    def _demand(self, pending: _Pending, pinned: Set[int]) -> None:
        cache, layer = self.caches[pending.event.layer], pending.event.layer
        for index, (key, level) in enumerate(pending.demands):
            while not cache.make_room(key, level, self.state.run[0].mark, layer):
                if not self._reclaim(cache, pinned):
                    pending.demands = pending.demands[index:]
                    return
            cache.insert(key, level)
            self.link.demand(transfer_of(cache, key, level))
        pending.demands = []

    def _reclaim(self, cache: PlacedCache, pinned: Set[int]) -> bool:
        """Make a prefetch of this cache give way to a demand; False where none can."""
        arriving = {key for key in self.link.issued() if key in cache.keys}
        key = self.link.withdraw_last(arriving, pinned)
        if key is not None:
            cache.withdraw(key)
            return True
        moving = arriving - pinned
        if not moving:
            return False
        self._wait(moving)
        return True

    def _wave(self, pending: _Pending) -> Iterator[tuple[Mapping[int, int], bool]]:
        """Yield all keys that are resident or in flight, in order of arrival.

        A decode step waits for its last expert: one call, as few kernels as possible. The compute
        of a prefill hides part of its transfers, and so does that of the resident experts where
        the policy executes them first.
        """
        event, cache, link = pending.event, self.caches[pending.event.layer], self.link
        placed = [k for k in pending.remaining if k in cache.slots]
        pending.remaining = [k for k in pending.remaining if k not in cache.slots]
        flying = {k for k in placed if link.is_flying(k)}
        ready = [k for k in placed if k not in flying]
        enough = -(-len(event.keys) // PARTS) if event.phase == PREFILL else len(placed) + 1
        at_once = self.rules.miss.cached_first
        while flying:
            if ready and (at_once or len(ready) >= enough):
                yield self._execute(pending, cache, ready), False
                ready = []
            at_once = False
            self._wait(flying, max(1, min(len(flying), enough - len(ready))))
            arrived = [k for k in placed if k in flying and not link.is_flying(k)]
            flying -= set(arrived)
            ready += arrived
        if ready:
            yield self._execute(pending, cache, ready), len(ready) == len(event.keys)
        self._use(placed)

    def _use(self, keys: Iterable[int]) -> None:
        """Note that an event uses these keys, whoever loaded them."""
        for key in keys:
            self.state.slots[key].unused = 0

    def _execute(
        self, pending: _Pending, cache: PlacedCache, keys: Sequence[int]
    ) -> Mapping[int, int]:
        """Record that these keys are executed now; return their slots."""
        if pending.levels is not None:
            slots = self.state.slots
            pending.levels.update({key: slots[key].level for key in keys})
            lower = [key for key in keys if slots[key].level]
            if lower:
                num_experts = self.geometry.num_experts
                self.record.low_precision += num_assignments(pending.event, lower, num_experts)
        return {key: cache.slots[key] for key in keys}

    def _wait(self, keys: Set[int], count: int = 1) -> None:
        """Wait until `count` of the flying `keys` have arrived, and record the stall."""
        start_s = time.perf_counter()
        self.traffic.land(self.link.wait_for(keys, count))
        waited_s = time.perf_counter() - start_s
        self.record.stall_s += waited_s
        self.traffic.note_stall(waited_s)

"""Carries plans out on a link that really moves, and has experts run as they come.

`run` decides and starts the transfers where the router has spoken; the `waves` execute, where the
model calls the experts. All decisions are the calling thread's: only bytes move elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

from lm_eval_moecache.engine.algorithms import Algorithms
from lm_eval_moecache.engine.decide import Plan
from lm_eval_moecache.engine.executor import Executor
from lm_eval_moecache.engine.setting import Setting
from lm_eval_moecache.engine.wall.clock import WallClock
from lm_eval_moecache.engine.wall.link import WallLink
from lm_eval_moecache.engine.wall.slots import SlottedCache
from lm_eval_moecache.engine.wall.traffic import Traffic
from lm_eval_moecache.engine.wall.worker import Mover
from lm_eval_moecache.records.event import PREFILL, Event, Fetch
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.ledger import PassRecord

# A prefill executes what has arrived once it is a quarter of the event: more, smaller parts hide
# little more of the compute and cost kernels.
PARTS = 4


@dataclass(slots=True)
class _Pending:
    """An event between `run` and the last of its waves."""

    event: Event
    demands: list[Fetch]
    """Not yet given to the link: they did not fit."""
    remaining: Sequence[int]
    """Keys not yet executed."""


class WallExecutor(Executor):
    """Serves an event in two parts: `run` begins it, the `waves` end it."""

    clock: WallClock
    link: WallLink

    def __init__(
        self, geometry: Geometry, setting: Setting, algorithms: Algorithms, mover: Mover
    ) -> None:
        partitions = setting.capacity.partitions(geometry.num_layers)
        pools = [
            SlottedCache(size, setting.policy.eviction.build(geometry, setting.seed), geometry, own)
            for size, own in zip(setting.capacity.bytes_by_partition, partitions, strict=True)
        ]
        link = WallLink(mover, setting.throttle_bytes_per_s)
        super().__init__(geometry, algorithms, pools, link)
        self.clock = WallClock(mover.synchronize)
        self._geometry = geometry
        self._slotted = pools if len(pools) > 1 else pools * geometry.num_layers
        self.slots = [cache.slots for cache in self._slotted]
        self.traffic = Traffic(self._slotted, link, geometry.num_experts, geometry.top_k)
        self._pending: _Pending | None = None

    def enter(self, layer: int, num_tokens: int) -> None:
        if self.rules.prefetches and self.link.active:
            self.traffic.drain(frozenset(), layer)

    def run(self, event: Event) -> Plan:
        prefetches, traffic = self.rules.prefetches, self.traffic
        if prefetches and self.link.active:
            # Time has passed since `enter`: on a device, reading the router's choice waits for it.
            traffic.settle(self.link.arrivals())
        plan = self._look_up(event, self._slotted[event.layer])
        event = plan.event
        assert all(level == 0 for _, level in plan.demands), "the wall clock has one precision"
        self._pending = pending = _Pending(event, list(plan.demands), event.keys)
        self._begin(pending)
        if prefetches:
            self.prefetches.submit(event, self.clock.now)
            if not pending.demands:
                traffic.drain(set(event.keys), event.layer)
        return plan

    def waves(self) -> Iterator[tuple[Sequence[int], bool]]:
        pending, self._pending = self._pending, None
        if pending is None:
            return
        event = pending.event
        while True:
            yield from self._wave(pending)
            if not pending.demands:
                break
            given = len(pending.demands)
            self._demand(pending, set(pending.remaining))
            assert len(pending.demands) < given, "no room for one expert after its wave"
        if self.rules.prefetches:
            self.traffic.drain(set(event.keys), event.layer)
        self._slotted[event.layer].eviction.on_event(event)

    def begin_pass(self, record: PassRecord) -> None:
        super().begin_pass(record)
        if self._pending is None:
            return
        # The pass before broke off: what it demanded may still be on its way into its slots.
        self._pending = None
        while demanded := self.link.demanded():
            self.traffic.settle(self.link.wait_for(demanded))

    def settle(self) -> None:
        link = self.link
        link.clear()
        self.prefetches.forget()
        for cache in dict.fromkeys(self._slotted):
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
        cache = self._slotted[event.layer]
        if self.rules.prefetches and link.active:
            for fetch in pending.demands:
                if fetch.key in cache.arriving:
                    link.promote(fetch.key)
                elif link.is_pending(fetch.key):
                    link.withdraw(fetch.key)
            held = cache.resident.keys() | cache.arriving.keys()
            pending.demands = [fetch for fetch in pending.demands if fetch.key not in held]
            due = event.pass_index * self._geometry.num_layers + event.layer
            self.traffic.cancel(due, wanted)
            cache.unused_prefetches -= wanted
        self._demand(pending, wanted)

    def _demand(self, pending: _Pending, pinned: Set[int]) -> None:
        cache, layer = self._slotted[pending.event.layer], pending.event.layer
        for done, fetch in enumerate(pending.demands):
            nbytes = cache.size_of(fetch.key)
            while not cache.make_room(nbytes, pinned, layer):
                if not self._reclaim(cache, pinned):
                    pending.demands = pending.demands[done:]
                    return
            cache.insert(fetch.key)
            self.link.demand(fetch.key, cache.slots[fetch.key], nbytes)
        pending.demands = []

    def _reclaim(self, cache: SlottedCache, pinned: Set[int]) -> bool:
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

    def _wave(self, pending: _Pending) -> Iterator[tuple[Sequence[int], bool]]:
        """Yield all that is there or on its way, in order of arrival.

        A decode step waits for its last expert: one call, as few kernels as possible. The compute
        of a prefill hides part of its transfers.
        """
        event, cache, link = pending.event, self._slotted[pending.event.layer], self.link
        held = [k for k in pending.remaining if k in cache.slots]
        pending.remaining = [k for k in pending.remaining if k not in cache.slots]
        flying = {k for k in held if link.is_flying(k)}
        here = [k for k in held if k not in flying]
        enough = -(-len(event.keys) // PARTS) if event.phase == PREFILL else len(held) + 1
        while flying:
            if len(here) >= enough:
                yield here, False
                here = []
            self._wait(flying, max(1, min(len(flying), enough - len(here))))
            arrived = [k for k in held if k in flying and not link.is_flying(k)]
            flying -= set(arrived)
            here += arrived
        if here:
            yield here, len(here) == len(event.keys)
        cache.unused_prefetches -= set(held)

    def _wait(self, keys: Set[int], count: int = 1) -> None:
        """Stand still until `count` of the flying `keys` are there."""
        start_s = time.perf_counter()
        self.traffic.settle(self.link.wait_for(keys, count))
        self.record.stall_s += time.perf_counter() - start_s

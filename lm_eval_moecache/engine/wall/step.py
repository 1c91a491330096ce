"""The layer step of the wall clock: the same decisions, real transfers, experts run as they come.

`run` decides and starts the transfers where the router has spoken; `finish` executes, where the
model calls the experts. All decisions are the calling thread's: only bytes move elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

from lm_eval_moecache.engine.algorithms import Algorithms
from lm_eval_moecache.engine.clock import Clock
from lm_eval_moecache.engine.layer_step import Execute as ExecuteAtOnce
from lm_eval_moecache.engine.layer_step import LayerStep
from lm_eval_moecache.engine.prefetch_queue import PrefetchQueue
from lm_eval_moecache.engine.wall.link import WallLink
from lm_eval_moecache.engine.wall.slots import SlottedCache
from lm_eval_moecache.records.event import PREFILL, Event, Fetch
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.ledger import PassRecord
from lm_eval_moecache.records.selection import Selection

Execute = Callable[[Sequence[int], bool], None]
# A prefill executes what has arrived once it is a quarter of the event: more, smaller parts hide
# little more of the compute and cost kernels.
PARTS = 4


@dataclass(slots=True)
class _Pending:
    """An event between `run` and `finish`."""

    event: Event
    demands: list[Fetch]
    """Not yet given to the link: they did not fit."""
    remaining: list[int]
    """Keys not yet executed."""


class WallQueue(PrefetchQueue):
    """Issues prefetches a little ahead of their turn, so that the link does not run dry.

    An issued prefetch has taken another expert's place already. One is issued at a time, one more
    where the link ran dry between two visits (at most as many as a token needs), and one less
    where several still waited.
    """

    def __init__(
        self,
        geometry: Geometry,
        caches: Sequence[SlottedCache],
        link: WallLink,
        algorithms: Algorithms,
    ) -> None:
        super().__init__(geometry, caches, link, algorithms.prefetch)
        self._slotted = caches
        self._wall_link = link
        self._window, self._widest = 1, geometry.top_k
        self._was_issued = False

    def drain(self, now: float, pinned: Set[int], layer: int) -> None:
        """Land what has arrived, then issue what may come next (`now` is the present)."""
        self.settle_arrivals(self._wall_link.arrivals())
        link = self._wall_link
        if link.num_issued == 0 and self._was_issued:
            self._window = min(self._window + 1, self._widest)
        elif link.num_issued > 1:
            self._window = max(self._window - 1, 1)
        self._issue(pinned, layer)
        self._was_issued = link.num_issued > 0

    def _issue(self, pinned: Set[int], layer: int) -> None:
        link = self._wall_link
        while link.num_issued < self._window:
            head = link.peek()
            if head is None:
                return
            key = head[0]
            cache = self._slotted[key // self._num_experts]
            nbytes = cache.size_of(key)
            if key in cache.resident:
                link.withdraw(key)
            elif cache.make_room(nbytes, pinned, layer):
                cache.reserve(key)
                link.issue(key, cache.slots[key], nbytes)
            else:
                return

    def settle_arrivals(self, keys: Sequence[int]) -> None:
        for key in keys:
            self._slotted[key // self._num_experts].land(key)

    def cancel(self, due: int, wanted: Set[int]) -> None:
        """Drop the prefetches of events up to `due`, also issued ones that have not begun."""
        self._wall_link.cancel_due(due)
        for key in self._wall_link.withdraw_issued(due, wanted):
            self._slotted[key // self._num_experts].withdraw(key)


class WallStep(LayerStep):
    """Runs events on a link that really moves: `enter`, `run`, then `finish`, for each layer."""

    def __init__(
        self,
        geometry: Geometry,
        caches: Sequence[SlottedCache],
        link: WallLink,
        clock: Clock,
        algorithms: Algorithms,
    ) -> None:
        super().__init__(geometry, caches, link, clock, algorithms)
        self._slotted = caches
        self._wall_link = link
        self.queue: WallQueue = WallQueue(geometry, caches, link, algorithms)
        self._pending: _Pending | None = None

    def run(self, event: Event, execute: ExecuteAtOnce | None = None) -> Selection | None:
        """Decide an event and start its transfers; `finish` has to follow.

        Returns the changed selection, or None where the router's is executed.
        """
        assert execute is None, "the wall clock executes in `finish`"
        if self._prefetches and self._wall_link.active:
            # Time has passed since `enter`: on a device, reading the router's choice waits for it.
            self.queue.settle_arrivals(self._wall_link.arrivals())
        selection, demands = self._decide(event)
        assert all(fetch.level == 0 for fetch in demands), "the wall clock has one precision"
        self._pending = pending = _Pending(event, list(demands), event.keys)
        self._begin(pending)
        if self._prefetches:
            self.queue.submit(event, self._clock.now)
            if not pending.demands:
                self.queue.drain(0.0, set(event.keys), event.layer)
        return selection

    def finish(self, execute: Execute) -> bool:
        """Execute the event that `run` began, in waves where it does not fit.

        `execute` is called with keys whose weights are there and stay until it returns, and with
        whether they are all of the event's. False, and nothing done, where `run` began no event.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return False
        event = pending.event
        while True:
            self._execute_wave(pending, execute)
            if not pending.demands:
                break
            given = len(pending.demands)
            self._demand(pending, set(pending.remaining))
            assert len(pending.demands) < given, "no room for one expert after its wave"
        if self._prefetches:
            self.queue.drain(0.0, set(event.keys), event.layer)
        self._slotted[event.layer].eviction.on_event(event)
        return True

    def begin_pass(self, record: PassRecord) -> None:
        super().begin_pass(record)
        if self._pending is None:
            return
        # The pass before broke off: what it demanded may still be on its way into its slots.
        self._pending = None
        while demanded := self._wall_link.demanded():
            self.queue.settle_arrivals(self._wall_link.wait_for(demanded))

    def settle(self) -> None:
        """Take back what waits for the link, and let what moves land."""
        self._wall_link.clear()
        self.queue.forget()
        for cache in dict.fromkeys(self._slotted):
            while (key := self._wall_link.withdraw_last(cache.arriving, ())) is not None:
                cache.withdraw(key)
            while cache.arriving:
                self.queue.settle_arrivals(self._wall_link.wait_for(cache.arriving))

    def _begin(self, pending: _Pending) -> None:
        """Give an event's demands to the link, as far as they fit."""
        event, link = pending.event, self._wall_link
        wanted = set(event.keys)
        cache = self._slotted[event.layer]
        if self._prefetches and link.active:
            for fetch in pending.demands:
                if fetch.key in cache.arriving:
                    link.promote(fetch.key)
                elif link.is_pending(fetch.key):
                    link.withdraw(fetch.key)
            held = cache.resident.keys() | cache.arriving.keys()
            pending.demands = [fetch for fetch in pending.demands if fetch.key not in held]
            self.queue.cancel(event.pass_index * self._geometry.num_layers + event.layer, wanted)
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
            self._wall_link.demand(fetch.key, cache.slots[fetch.key], nbytes)
        pending.demands = []

    def _reclaim(self, cache: SlottedCache, pinned: Set[int]) -> bool:
        """Make one prefetch give way to a demand; False where none of this cache is under way."""
        key = self._wall_link.withdraw_last(cache.arriving, pinned)
        if key is not None:
            cache.withdraw(key)
            return True
        moving = cache.arriving.keys() - pinned
        if not moving:
            return False
        self._wait(moving)
        return True

    def _execute_wave(self, pending: _Pending, execute: Execute) -> None:
        """Execute all that is there or on its way, in order of arrival.

        A decode step waits for its last expert: one call, as few kernels as possible. The compute
        of a prefill hides part of its transfers.
        """
        event, cache = pending.event, self._slotted[pending.event.layer]
        held = [k for k in pending.remaining if k in cache.slots]
        pending.remaining = [k for k in pending.remaining if k not in cache.slots]
        flying = {k for k in held if self._wall_link.is_flying(k)}
        here = [k for k in held if k not in flying]
        enough = -(-len(event.keys) // PARTS) if event.phase == PREFILL else len(held) + 1
        while flying:
            if len(here) >= enough:
                execute(here, False)
                here = []
            self._wait(flying, max(1, min(len(flying), enough - len(here))))
            arrived = [k for k in held if k in flying and not self._wall_link.is_flying(k)]
            flying -= set(arrived)
            here += arrived
        if here:
            execute(here, len(here) == len(event.keys))
        cache.unused_prefetches -= set(held)

    def _wait(self, keys: Set[int], count: int = 1) -> None:
        """Stand still until `count` of the flying `keys` are there."""
        start_s = time.perf_counter()
        self.queue.settle_arrivals(self._wall_link.wait_for(keys, count))
        self._record.stall_s += time.perf_counter() - start_s

"""The engine of the wall clock: real transfers, and experts executed as they arrive.

Choosing a layer's experts decides and starts the transfers; the `waves` execute them where the
model calls its experts. The calling thread makes all decisions; only bytes move in another.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from lm_eval_moecache.engine.callbacks import Callbacks
from lm_eval_moecache.engine.engine import Engine
from lm_eval_moecache.engine.kernel import cache as told
from lm_eval_moecache.engine.kernel import event
from lm_eval_moecache.engine.kernel.serve import BEGIN, CLOSE, END, ENTER, FILL
from lm_eval_moecache.engine.memory import door, make_memory
from lm_eval_moecache.engine.rows import Rows
from lm_eval_moecache.engine.rules import Rules, make_evictions
from lm_eval_moecache.engine.setting import Setting
from lm_eval_moecache.engine.wall.link import (
    Mover,
    Traffic,
    WallLink,
    bring,
    time_load,
    transfer_of,
)
from lm_eval_moecache.engine.wall.slots import LeveledCache, PlacedCache, SlottedCache
from lm_eval_moecache.records.arrays import IntArray
from lm_eval_moecache.records.event import PREFILL
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.memory import INTS, numbers

# A prefill executes the arrived experts once they are a quarter of the event: more, smaller parts
# would hide little more of the transfers and cost kernel launches.
PARTS = 4
NOBODY = -1
"""A mark by which nobody is pinned."""
HOST = -1
"""In a wave, in place of a slot: the expert is executed on the host, where it is stored."""


class HostCosts(NamedTuple):
    """Seconds measured before the first request (profiled offline by Fiddler, section 3.3).

    Executing one expert of the first layer takes `fixed + each * tokens`; other layers scale by
    expert bytes.
    """

    host_fixed_s: float
    host_each_s: float
    device_fixed_s: float
    device_each_s: float
    load_s: float
    """Loading one expert of the first layer over the real link."""
    way_s: float
    """Moving activations to the host, or back."""


_COUNTED = ["peak", "loads", "warmed", "evictions", "replaced", "lifetime"]
"""What caches count for the whole run, however often they start anew."""


class WallRows(Rows):
    """Serves the layers of a `WallEngine`, the only one of its device."""

    def __init__(self, engine: WallEngine) -> None:
        super().__init__([engine])
        self.engine, self._visit = engine, door("visit")

    def _do(self, what: int, first_layer: int, end_layer: int) -> None:
        engine = self.engine
        if what & END:
            engine.synchronize()
        if what & (BEGIN | END):
            engine.note_time()
        if what & ENTER:
            engine.enter()
        super()._do(what, first_layer, end_layer)
        if what & CLOSE:
            engine.begin_event(first_layer)

    def visit(
        self,
        what: int,
        mark: int = 0,
        keys: Sequence[int] = (),
        number: int = 0,
        seconds: float = 0.0,
    ) -> int:
        """Let the kernel do one of the things of `event.visit`."""
        if keys:
            self._give(keys=np.array(keys, np.int64))
            self._call.num_keys = len(keys)
        self._call.number, self._call.seconds = number, seconds
        answer = int(self._visit(self._place, what, mark))
        self.engine.callbacks.finish()
        return answer


class WallCallbacks(Callbacks):
    """Gives loaded experts their slots, and takes those of the evicted ones."""

    def __init__(self, engine: WallEngine, evictions: Sequence[Any]) -> None:
        engine.memory.run.notifies = 1
        self._engine = weakref.proxy(engine)
        super().__init__(engine.memory, evictions, engine.rules)

    def _readers(self) -> Any:
        own, engine = [*super()._readers()], self._engine

        def also(kind: int, do: Any) -> None:
            before = own[kind]
            own[kind] = lambda key: (do(key), before(key))

        also(told.EVICTED, lambda key: engine.cache_of(key).vacate(key))
        # A bound method would keep the engine.
        also(told.DEMANDED, lambda key: engine.place(key))
        # What is loaded anew at a better level: RELEASED and UPGRADED.
        return [*own, lambda key: engine.cache_of(key).vacate(key), lambda key: engine.place(key)]


@dataclass(slots=True)
class _Pending:
    """An event between its decision and the last of its waves."""

    layer: int
    keys: Sequence[int]
    mark: int
    """By which its keys were pinned first."""
    num_demands: int
    remaining: Sequence[int]
    """Keys not yet executed."""
    next_demand: int = 0
    """Demands from this place on are not loaded yet, because they did not fit."""
    on_host: Sequence[int] = ()
    """Keys that the host executes."""


class WallEngine(Engine):
    """Serves an event in two steps: choosing begins it, the `waves` end it.

    Time is the machine's, and the mover really copies bytes.
    """

    is_virtual = False
    pools: Sequence[Any]
    alone: Any
    caches: Sequence[Any]

    def __init__(self, geometry: Geometry, setting: Setting, mover: Mover) -> None:
        # For experts stored encoded, even at a single level, the mover makes the slots.
        self._encoded = bool(geometry.compute_bytes)
        self._pending: _Pending | None = None
        self._is_open = False
        """Whether a pass is in progress."""
        self._placed: list[int] = []
        """Keys that have just got their slots."""
        self.host_costs: HostCosts | None = None
        self.link = WallLink(mover, setting.throttle_bytes_per_s, self._encoded)
        self.synchronize, self._origin_s = mover.synchronize, time.perf_counter()
        super().__init__(geometry, setting)

    def _make(self, evictions: Sequence[Any], like: Engine | None) -> None:
        geometry = self.geometry
        self.memory = make_memory(geometry, self.setting, self.rules, evictions, None, self.depth)
        self.memory.run.wall = 1
        self._first_memory = self.memory.copy()
        self.callbacks = WallCallbacks(self, evictions)
        names, pools = count(), list[PlacedCache]()
        partitions = self.setting.capacity.partitions(geometry.num_layers)
        for index, layers in enumerate(partitions):
            if self._encoded:
                pools.append(LeveledCache(self.memory, index, names))
            else:
                pools.append(SlottedCache(self.memory, index, geometry, layers))
        self.pools = pools
        self.alone = WallRows(weakref.proxy(self))
        self.traffic = Traffic(self)

    def fresh(self, future: Any = None) -> Engine:
        raise AssertionError("an engine on the wall clock is the only one of its device")

    def close(self) -> None:
        self.link.close()

    @property
    def now(self) -> float:
        return time.perf_counter() - self._origin_s

    @property
    def can_defer(self) -> bool:
        return False

    @property
    def asks_for_host_costs(self) -> bool:
        """Whether the host's rule needs measured times."""
        return self.rules.miss.host_rule not in ("", "always")

    def set_host_costs(self, costs: HostCosts) -> None:
        """Let the host's share follow measured times, set before the first event."""
        levels, run, sizes = self.memory.levels, self.memory.run, self.geometry.expert_bytes
        self.host_costs = costs
        for layer in range(self.geometry.num_layers):
            scale, own = sizes[layer][0] / sizes[0][0], levels[layer * run.num_levels]
            own["host_fixed_s"], own["fixed_s"] = costs.host_fixed_s, costs.device_fixed_s
            own["host_flop_s"], own["flop_s"] = costs.host_each_s, costs.device_each_s
            for name in ("host_fixed_s", "fixed_s", "host_flop_s", "flop_s"):
                own[name] *= scale
        run.latency_s, run.link_rate, run.way_s = 0.0, sizes[0][0] / costs.load_s, costs.way_s
        run.element_bytes = 0.0

    def cache_of(self, key: int) -> PlacedCache:
        """Return the cache that may hold a key."""
        cache: PlacedCache = self.caches[key // self.geometry.num_experts]
        return cache

    def place(self, key: int) -> None:
        """Give a loaded key its slot."""
        self.cache_of(key).place(key, int(self.memory.slots["level"][key]))
        self._placed.append(key)

    def take_placed(self) -> list[int]:
        """Return the keys that got their slots since the last call."""
        placed, self._placed = self._placed, []
        return placed

    def note_time(self) -> None:
        """Tell the kernel the time, and what the link has done."""
        run = self.memory.run
        run.now, run.moved, run.busy_s = self.now, self.link.bytes_moved, self.link.busy_s
        run.transfers = self.link.transfers + len(self.link.issued)

    # An event.

    @property
    def _is_prefetching(self) -> bool:
        """Whether a prefetch is queued or issued."""
        return bool(self.rules.prefetches and (self.memory.run.queued > 0 or self.link.issued))

    def enter(self) -> None:
        """Make what has arrived resident, before a layer's experts are looked up."""
        self.link.launched()
        if self._is_prefetching:
            self.traffic.land(self.link.arrivals())

    def begin_event(self, layer: int) -> None:
        """Begin the transfers of an event that has been decided."""
        run = self.memory.run
        keys: list[int] = numbers(run.keys, INTS)[: run.num_keys]
        self._pending = pending = _Pending(layer, keys, run.mark, run.num_demands, keys)
        self._begin(pending)
        if self.rules.prefetches:
            if not self.rules.prefetch.after_layer:
                self.alone.visit(event.SUBMIT, seconds=self.now)
            if pending.next_demand == pending.num_demands:
                awaited = any(self.link.is_flying(key) for key in keys)
                self.traffic.drain(run.mark, (self.alone.phase, layer, "begun"), awaited)

    def _begin(self, pending: _Pending) -> None:
        """Give an event's demands to the link as far as they fit, after the host's share."""
        layer, rows, slots = pending.layer, self.alone, self.memory.slots
        demands: list[int] = self.memory.scratch["demands"][: pending.num_demands].tolist()
        if self._is_prefetching:
            for key in demands:
                self._meet(key)
            due = self.num_passes * self.geometry.num_layers + layer
            self.traffic.cancel(due, set(pending.keys))
        if demands:
            if self.rules.miss.host_rule:
                costs, sizes = self.host_costs, self.geometry.expert_bytes
                load_s = 0.0
                if costs is not None:
                    load_s = costs.load_s * sizes[layer][0] / sizes[0][0]
                # Late prefetches of this event come before its demands.
                link_free_s = sum(map(self.link.is_flying, pending.keys)) * load_s
                rows.visit(event.HOST, pending.mark, seconds=link_free_s)
                pending.on_host = [key for key in demands if slots["done"][key] == pending.mark]
            rows.visit(event.RELEASE, pending.mark)
        pending.remaining = [key for key in pending.keys if key not in pending.on_host]
        self._demand(pending)

    def _meet(self, key: int) -> None:
        """See to it that a demand's prefetch under way comes at once, or not at all."""
        slot = self.memory.slots[key]
        if slot["arriving"]:
            if slot["level"] <= slot["demanded_level"]:
                self.link.promote(key)
            elif self.link.revoke(key):
                self.take_back(key)
            else:
                self._wait({key})

    def take_back(self, key: int) -> None:
        """Give back the room of a prefetch whose transfer has not begun."""
        self.alone.visit(event.TAKEN_BACK, keys=[key])
        self.cache_of(key).vacate(key)

    def _demand(self, pending: _Pending) -> None:
        """Load the next demands, as many as fit; prefetches not yet moving give way to them."""
        cache = self.caches[pending.layer]
        while pending.next_demand < pending.num_demands:
            start = pending.next_demand
            pending.next_demand = self.alone.visit(event.LOAD, pending.mark, number=start)
            for key in self.take_placed():
                level = int(self.memory.slots["level"][key])
                self.link.demand(transfer_of(cache, key, level))
            if pending.next_demand < pending.num_demands and not self._reclaim(cache, pending):
                return

    def _reclaim(self, cache: Any, pending: _Pending) -> bool:
        """Make a prefetch of this cache give way to a demand; False where none can."""
        pinned = self.memory.experts["pinned"]
        arriving = {key for key in self.link.issued if key in cache.keys}
        wanted = {key for key in arriving if pinned[key] == self.memory.run.mark}
        key = self.link.withdraw_last(arriving, wanted)
        if key is not None:
            self.take_back(key)
            return True
        moving = arriving - wanted
        if not moving:
            return False
        self._wait(moving)
        return True

    def waves(self) -> Iterator[tuple[Mapping[int, int], bool]]:
        """Yield, as they arrive, the keys that the event in progress has still to execute.

        Each key comes with its slot, which holds its weights until the next wave is requested. The
        flag is True where the wave is the whole event. The iterator must be exhausted.
        """
        if (pending := self._pending) is None:
            return
        rows = self.alone
        if pending.on_host:
            yield dict.fromkeys(pending.on_host, HOST), False
        while True:
            yield from self._wave(pending)
            if pending.next_demand == pending.num_demands:
                break
            rows.visit(event.WAVE_ENDED, pending.mark)
            self.link.launched()
            before = pending.next_demand
            self._demand(pending)
            assert pending.next_demand > before, "no room for one expert after its wave"
        after_layer = self.rules.prefetches and self.rules.prefetch.after_layer
        if after_layer:
            self.link.launched()
            rows.visit(event.SUBMIT, seconds=self.now)
        rows.visit(event.ENDED, pending.mark)
        if self.rules.prefetches:
            self.link.launched()
            visit = rows.phase, pending.layer, "executed"
            self.traffic.drain(self.memory.run.mark, visit)
        self._pending = None  # Up to here `_recover` has demands to wait for.

    def _wave(self, pending: _Pending) -> Iterator[tuple[Mapping[int, int], bool]]:
        """Yield all keys that are resident or in flight, in order of arrival.

        A decode step waits for its last expert: one call, as few kernels as possible. The compute
        of a prefill hides part of its transfers, and so does that of the resident experts where
        the policy executes them first.
        """
        slots, link = self.caches[pending.layer].slots, self.link
        placed = [k for k in pending.remaining if k in slots]
        pending.remaining = [k for k in pending.remaining if k not in slots]
        flying = {k for k in placed if link.is_flying(k)}
        ready, num_keys = [k for k in placed if k not in flying], len(pending.keys)
        enough = -(-num_keys // PARTS) if self.alone.phase == PREFILL else len(placed) + 1
        at_once = self.rules.miss.cached_first
        while flying:
            if ready and (at_once or len(ready) >= enough):
                yield {key: slots[key] for key in ready}, False
                ready = []
            at_once = False
            self._wait(flying, max(1, min(len(flying), enough - len(ready))))
            arrived = [k for k in placed if k in flying and not link.is_flying(k)]
            flying -= set(arrived)
            ready += arrived
        if ready:
            yield {key: slots[key] for key in ready}, len(ready) == num_keys

    def _wait(self, keys: Set[int], count: int = 1) -> None:
        """Wait until `count` of the flying `keys` have arrived, and record the stall."""
        start_s = time.perf_counter()
        self.traffic.land(self.link.wait_for(keys, count))
        waited_s = time.perf_counter() - start_s
        self.alone.counts[0]["stall_s"] += waited_s
        self.traffic.note_stall(waited_s)

    def note_host(self, busy_s: float, wait_s: float) -> None:
        """Record the seconds of the host's part of an event, and of the device's wait for it."""
        record = self.alone.counts[0]
        record["host_s"] += busy_s
        record["host_wait_s"] += wait_s

    # Passes, drafts, resets.

    def begin_pass(self, *given: Any, **named: Any) -> None:
        self._recover()
        super().begin_pass(*given, **named)
        self._is_open = True

    def end_pass(self) -> Any:
        self._is_open = False
        return super().end_pass()

    def _recover(self) -> None:
        """Clean up after a pass that broke off, if any, before the next one begins."""
        if self._is_open:
            self._is_open = False
            # Nobody cancels what was due at the events that the pass did not reach.
            number = (self.num_passes + 1) * self.geometry.num_layers - 1
            self.alone.visit(event.CANCEL, number=number)
        if self._pending is not None:
            # Its demands may still be moving into their slots.
            self._pending = None
            while demanded := self.link.demanded():
                self.traffic.land(self.link.wait_for(demanded))

    def time_load(self, count: int) -> float:
        return time_load(self.caches[0], self.link, count)

    def advance(self, seconds: float) -> None:
        if self._is_prefetching:
            self.link.launched()
            self.traffic.drain(NOBODY)

    def await_prefetches(self) -> float:
        start_s = self.now
        # Prefetches that find no room are left for their events to demand.
        while issued := self.link.issued:
            self.traffic.land(self.link.wait_for(issued))
            self.advance(0.0)
        return self.now - start_s

    def _settle(self, *given: Any, **named: Any) -> float:
        self.note_time()
        return super()._settle(*given, **named)

    def _fill(self) -> None:
        self.fill(np.array(self._warm, np.int64))

    def fill(self, keys: IntArray) -> None:
        """Fill the empty caches with these keys; no pass is charged for it."""
        self._settle(FILL, keys=keys)
        self.take_placed()
        for pool in self.pools:
            bring(pool, self.link, [*pool.slots.items()])

    def restart(self) -> None:
        """Start anew for another request: cache, link and the state of every rule.

        What `fresh` does with another engine, for the one that holds a device's memory.
        """
        self._recover()
        while (key := self.link.withdraw_last(self.link.issued, ())) is not None:
            self.take_back(key)
        while issued := self.link.issued:
            self.traffic.land(self.link.wait_for(issued))
        setting, geometry, stage = self.setting, self.geometry, self.rules.prefetch
        self.rules = Rules(geometry, setting.policy, setting.seed, self.rules)
        if stage.needs_draft:
            # What was planned for a draft stage is no state of its rule.
            self.rules.prefetch = stage
        evictions = make_evictions(geometry, setting)
        run = self.memory.run
        moved = run.moved_before, run.busy_s_before
        counted = self.memory.caches[_COUNTED].copy()
        counted["evictions"] += self.memory.caches["held"]
        for pool in self.pools:
            for key in [*pool.slots]:
                pool.vacate(key)
        self.memory.restore(self._first_memory)
        self.memory.caches[_COUNTED] = counted
        run.wall = 1
        run.moved_before, run.busy_s_before = moved
        if self.host_costs is not None:
            self.set_host_costs(self.host_costs)
        self.eviction = evictions[0]
        self.callbacks = WallCallbacks(self, evictions)
        self.alone.restart()
        self._fill()

    def check_integrity(self) -> None:
        self.note_time()
        super().check_integrity()

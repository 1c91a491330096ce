"""What the loop over tables leaves to Python: evictions with a state of their own, lanes, the host.

`engine.core` calls an `Outside` in the branches that machine code leaves out (`core.IN_PYTHON`). To
evictions machine code leaves messages, and it asks `answer` for victims.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

import numpy as np

from lm_eval_moecache.algorithms.eviction.base import EvictionAlgorithm
from lm_eval_moecache.engine import core
from lm_eval_moecache.engine.host import HostStage
from lm_eval_moecache.engine.setting import Setting
from lm_eval_moecache.engine.tables import read, read_some, write
from lm_eval_moecache.engine.virtual.costs import arrivals, read_shares
from lm_eval_moecache.records.event import PASS_START, PREFILL, Event
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.jit import Table, column
from lm_eval_moecache.records.ledger import Counters

_NOTHING: frozenset[int] = frozenset()


class Outside:
    """The parts of an event in progress, and of the run, that no table holds."""

    def __init__(
        self,
        setting: Setting,
        evictions: list[EvictionAlgorithm],
        geometry: Geometry,
        state: Callable[[], core.State],
    ) -> None:
        hardware = setting.hardware
        self.evictions = evictions
        """By cache."""
        self.by_layer = evictions if len(evictions) > 1 else evictions * geometry.num_layers
        self._state = state
        self._num_experts, self._has_levels = geometry.num_experts, len(geometry.precision) > 1
        self.error: BaseException | None = None
        """What an eviction raised while machine code ran."""
        self._executed: list[int] = []
        """Keys that were executed in the wave in progress."""
        self.notify = self._messages()
        self.event = Event(-1, PASS_START, PREFILL, 0, ())
        """The event in progress, as executed."""
        self.events: Iterator[Event] | None = None
        """Those of the passes in progress, if they are served together and are asked for."""
        self.wave: list[int] = []
        """Keys that are executed together, in the wave in progress."""
        self.on_wave: Callable[[Sequence[int]], object] = lambda keys: None
        """Called with the keys of each wave once all are resident, or executed on the host."""
        self.add_span: Callable[[str, float, float, int, int], object] = lambda *span: None
        """Called with each span of time that the loop records: its kind, start and end, its layer
        or bytes, and how many tokens or experts, or a prefetch's key."""
        self.host: HostStage | None = None
        self.uploads: int = 0
        """How many of an event's demands that the host executes are loaded afterwards."""
        self.vacate: Callable[[int], object] = lambda key: None
        """Called with each key whose bytes are released, where residents have slots."""
        self.moving: list[tuple[int, int]] = []
        """Key and bytes of the demands that the lanes are about to move together."""
        self._pinned: Set[int] = _NOTHING
        self._pinned_mark = -1
        self._shares = read_shares(setting.reads_per_expert)
        self._lanes = {
            "lanes": hardware.link_lanes,
            "lane_rate": hardware.lane_rate,
            "link_rate": hardware.link_rate,
            "latency_s": hardware.link_latency_s,
        }
        self._arrivals: dict[int, Sequence[float]] = {}
        """Key demanded by the event in progress -> arrival times of its reads."""
        self._uploading: dict[int, float] = {}
        """Key resident by an upload not yet waited for -> its arrival time."""

    def begin(self, event: Event) -> None:
        """Begin an event, as it will be executed."""
        self.event, self._arrivals = event, {}

    # Evictions with a state of their own.

    def _messages(self) -> Sequence[Callable[[int], object]]:
        """Return what is done with each kind of message (see `core.PASS`), by its number."""
        by_layer, num_experts = self.by_layer, self._num_experts

        def of(name: str, *more: Any) -> Callable[[int], object]:
            if len(self.evictions) > 1:
                return lambda key: getattr(by_layer[key // num_experts], name)(key, *more)
            method = getattr(self.evictions[0], name)
            return (lambda key: method(key, *more)) if more else method

        return (
            self._begin_pass,
            self._begin_next,
            of("on_insert", False),
            of("on_insert", True),
            *map(of, ("on_predicted", "on_miss", "on_evict")),
            lambda key: self._executed.append(key),
            self._end_wave,
            self._note,
        )

    def _begin_pass(self, number: int) -> None:
        for eviction in self.evictions:
            eviction.on_pass(number)

    def _begin_next(self, layer: int) -> None:
        if self.events is not None:
            self.begin(next(self.events))

    def _end_wave(self, layer: int) -> None:
        executed, self._executed = self._executed, []
        self.by_layer[layer].on_executed(layer, executed)

    def _note(self, layer: int) -> None:
        self._executed = []
        if self._has_levels:
            levels = read_some(self._state().slots, self.event.keys, "executed_level")
            by_key = dict(zip(self.event.keys, levels, strict=True))
            self.by_layer[layer].on_levels(self.event, by_key)
        else:
            self.by_layer[layer].on_event(self.event)

    def notify_reset(self, state: core.State) -> None:
        """Notify of the eviction of all residents."""
        for key in in_order_of_loading(state.experts, state.slots):
            self.notify[core.EVICTED](key)

    def victim(self, state: core.State, cache: int, mark: int, layer: int) -> int:
        """Return the key that a cache's eviction chooses outside those pinned by `mark`, or -1."""
        if mark != self._pinned_mark:
            keys, self._pinned_mark = self.event.keys, mark
            marks = read_some(state.experts, keys, "pinned")
            self._pinned = {key for key, at in zip(keys, marks, strict=True) if at == mark}
        found = self.evictions[cache].victim(self._pinned, layer)
        assert found not in self._pinned, f"eviction chose the pinned key {found}"
        return -1 if found is None else found

    def answer(self, cache: int, mark: int, layer: int, num_messages: int) -> int:
        """Do what machine code asks for: find a victim or, as `cache` says, something else.

        Machine code cannot be ended by an exception. It is kept in `error`, and what is still asked
        is answered with any resident.
        """
        state = self._state()
        try:
            if self.error is None:
                self._read(state, num_messages)
                if cache == core.RESET_ALL:
                    self.notify_reset(state)
                if cache < 0:
                    return 0
                found = self.victim(state, cache, mark, layer)
                assert found < 0 or state.experts["resident"][found], f"{found} is not resident"
                return found
        except BaseException as error:
            self.error = error
        if cache < 0:
            return 0
        first, end = (read(state.caches, cache, n) for n in ("first_layer", "end_layer"))
        flags = (column(state.experts, "resident") > 0) & (column(state.experts, "pinned") != mark)
        own = range(first * self._num_experts, end * self._num_experts)
        return next((key for key in own if flags[key]), -1)

    def _read(self, state: core.State, num_messages: int) -> None:
        messages, notify = state.messages[:num_messages].tolist(), self.notify
        for kind, number in zip(messages[::2], messages[1::2], strict=True):
            notify[kind](number)

    def end_machine_code(self) -> None:
        """Read the last messages of machine code; raise what an eviction has raised."""
        state = self._state()
        num_messages = read(state.run, 0, "num_messages")
        write(state.run, 0, "num_messages", 0)
        if self.error is None:
            self._read(state, num_messages)
            return
        error, self.error = self.error, None
        raise error

    def notify_wave(self) -> None:
        self.on_wave(self.wave)

    # Lanes, and experts executed as they arrive.

    def move_together(self, state: core.State, ready_s: float) -> float:
        """Move the waiting demands over the lanes from `ready_s` on; return when all are there.

        Where experts are read by projections, the first projection of every expert goes first.
        """
        if not self.moving:
            return ready_s
        run, sizes = state.run[0], [nbytes for _, nbytes in self.moving]
        start_s = ready_s if ready_s > run.busy_until else run.busy_until
        reads = tuple([size * share for share in self._shares for size in sizes])
        times = arrivals(reads, **self._lanes)
        run.open_batch = -1
        run.busy_until = start_s + max(times)
        run.busy_s += run.busy_until - start_s
        run.moved += sum(sizes)
        run.transfers += len(sizes)
        for place, (key, _) in enumerate(self.moving):
            self._arrivals[key] = [start_s + at_s for at_s in times[place :: len(sizes)]]
        self.moving = []
        self.add_span("loads", start_s, run.busy_until, sum(sizes), -1)
        return float(max(ready_s, run.busy_until))

    def end_wave(self) -> None:
        """Forget the arrivals of keys that a wave has executed."""
        self._arrivals = {}

    def note_in_flight(
        self, state: core.State, demands: Sequence[int], mark: int, ready_s: float
    ) -> None:
        """Note when the demands arrived that a prefetch has brought."""
        for key in demands:
            if state.slots[key].demanded == mark and not core.is_missing(state, key, mark):
                self._arrivals[key] = [ready_s] * len(self._shares)

    def execute_piecewise(
        self, state: core.State, event: core.BatchEvent, mark: int, count: Counters
    ) -> None:
        """Execute projection by projection: residents first, the others as each read arrives."""
        slots, keys = state.slots, event.batch.keys[event.start : event.stop]
        keys = [key for key in keys if slots[key].done != mark]
        counts_serves = event.tokens > 1 or state.run[0].lossy
        arriving = {key: self._arrivals[key] for key in keys if key in self._arrivals}
        present = [key for key in keys if key not in arriving]
        self.wave = list(keys)
        self.notify_wave()
        launched = False
        for part, share in enumerate(self._shares):
            order = [(0.0, present)] if present else []
            order += sorted((times[part], [key]) for key, times in arriving.items())
            for at_s, ready_keys in order:
                count.stall_s += core.await_link(state, at_s)
                served = len(ready_keys)
                if counts_serves:
                    served = sum([slots[key].serves for key in ready_keys])
                core.execute_level(state, event.layer, 0, len(ready_keys), served, share, launched)
                launched = True

    # The host.

    def share_out(
        self, state: core.State, demands: Sequence[int], mark: int, count: Counters
    ) -> tuple[int, int]:
        """Give the host its part of the event; return how many keys and assignments that is."""
        assert self.host is not None, "no host"
        missing = [key for key in demands if core.is_missing(state, key, mark)]
        if not missing:
            return 0, 0
        on_host, num_served, begun_s = self.host.begin(state, self.event, missing, count)
        if not on_host:
            return 0, 0
        self.add_span("host", begun_s, self.host.busy_until, self.event.layer, len(on_host))
        for key in on_host:
            state.slots[key].done = mark
            state.slots[key].executed_level = state.experts[key].ran_below_best_precision = 0
        self.wave = [key for key in self.event.keys if key in on_host]
        self.notify_wave()
        return len(on_host), num_served

    def await_uploads(self, state: core.State, keys: Sequence[int], count: Counters) -> None:
        """Wait for those of the event's keys that an upload is bringing."""
        if self._uploading:
            resident = [key for key in keys if state.experts[key].resident]
            times = [self._uploading.pop(key, 0.0) for key in resident]
            count.stall_s += core.await_link(state, max(times, default=0.0))

    def end_host(
        self,
        state: core.State,
        rank: Any,
        keys: Sequence[int],
        mark: int,
        layer: int,
        count: Counters,
    ) -> None:
        """Let prefetches use the link until the host is done, then send its outputs back.

        Some of the experts it executed (`uploads`) are then loaded without waiting for them.
        """
        host, run = self.host, state.run[0]
        if host is None or not host.is_open:
            return
        if run.prefetches and core.is_active(run):
            core.drain(state, rank, host.busy_until, run.mark, layer)
            if run.inflight >= 0:
                # It is not interrupted; the outputs follow it.
                core.land(state)
        host.end(state, count)
        cache, level = state.layers[layer].cache, layer * run.num_levels
        nbytes = state.levels[level].nbytes
        demands = [key for key in keys if state.slots[key].demanded == mark]
        for key in demands[: self.uploads]:
            if state.experts[key].resident or state.slots[key].arriving:
                continue  # A prefetch loaded it while the host computed.
            if not core.make_room(state, rank, key, nbytes, cache, run.mark, layer):
                return
            self._uploading[key] = core.transfer(state, layer, 0, run.now, False, -1)
            run.loaded_bytes += nbytes if run.load_overhead_s else 0
            core.take_bytes(state, cache, nbytes)
            core.insert(state, key, layer, 0, False)


def in_order_of_loading(experts: Table, slots: Table) -> list[int]:
    """Return the resident keys, those loaded first in front."""
    resident, arrivals = np.flatnonzero(column(experts, "resident")), column(slots, "arrival")
    keys: list[int] = resident[np.argsort(arrivals[resident])].tolist()
    return keys

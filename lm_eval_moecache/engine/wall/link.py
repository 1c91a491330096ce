"""The link of the wall clock: a worker thread that copies, what is given to it, and its traffic."""

from __future__ import annotations

import math
import statistics
import threading
import time
import weakref
from collections import deque
from collections.abc import Collection, Container, Hashable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Protocol

from lm_eval_moecache.engine.kernel import event
from lm_eval_moecache.engine.wall.slots import PlacedCache
from lm_eval_moecache.records.errors import TransferError

WAITING, MOVING, DONE = "waiting", "moving", "done"
_POLL_S = 0.5


@dataclass(slots=True, eq=False)
class Transfer:
    """One expert on its way into a slot."""

    key: int
    slot: int
    nbytes: int
    due: int = 0
    """The event that a prefetch is due at."""
    level: int = 0
    """The precision level at which it is copied."""
    drops: Sequence[int] = ()
    """Slots given up, whose memory can be freed (`Mover.place`)."""
    after: object = None
    """The fence that the device must have passed before the slot may be written (`Mover.fence`)."""
    state: str = WAITING
    submitted_s: float = field(default_factory=time.perf_counter)
    moved_s: float = 0.0
    """Once arrived: the seconds for which it had the link."""
    ended_s: float = 0.0
    """Once arrived: its arrival time, at the rate of a throttled link."""
    lag_s: float = 0.0
    """Once arrived: the seconds it took to begin on an otherwise idle link."""


class Mover(Protocol):
    """Copies an expert's bytes into a slot. `begin` and `finish` run in the worker's thread."""

    depth: int
    """How many transfers may be in progress at once."""

    def fence(self) -> object:
        """Return what new transfers must wait for; called when their slots are reassigned."""

    def place(self, transfer: Transfer) -> None:
        """Make a transfer's slot if it does not exist; called before `fence`.

        Called only where slots differ in size, and by the deciding thread: kernels that it has
        launched may still use the dropped slots, and the fence comes after them.
        """

    def begin(self, transfer: Transfer) -> object:
        """Start the copy (or complete it) and return what `finish` waits for."""

    def finish(self, token: object) -> float | None:
        """Return the seconds of the copy, once its bytes are in the slot.

        None where the copy has taken all the time since `begin`.
        """

    def synchronize(self) -> None:
        """Return once the device has executed all its work."""


class Worker:
    """Serves demanded transfers before prefetches, each kind in order of submission.

    With `bytes_per_s` a transfer takes at least its bytes over that rate, measured from the end of
    the previous one if it was waiting by then, so that late wake-ups do not add up. Errors in the
    thread are raised, as TransferError, by the next call that waits, puts or collects.
    """

    def __init__(self, mover: Mover, bytes_per_s: float | None = None) -> None:
        self._mover = mover
        self._bytes_per_s = bytes_per_s
        self._demanded: deque[Transfer] = deque()
        self._prefetches: deque[Transfer] = deque()
        self._finished: list[Transfer] = []
        self._awaited: Container[int] = ()
        self._wanted = 0
        """How many of the awaited keys the caller waits for; 0 while it does not wait."""
        self._error: BaseException | None = None
        self._closing = threading.Event()
        self._changed = threading.Condition()
        self.busy_s = 0.0
        """Seconds in which at least one transfer was on the link."""
        self._free_s = 0.0
        self._busy_until_s = 0.0
        self._thread = threading.Thread(target=self._run, name="moecache-link", daemon=True)
        self._thread.start()

    def put(self, transfer: Transfer, demanded: bool) -> None:
        """Queue a transfer, among the demands or the prefetches."""
        with self._changed:
            self._check()
            (self._demanded if demanded else self._prefetches).append(transfer)
            self._changed.notify_all()

    def promote(self, transfer: Transfer) -> None:
        """Serve a prefetch as a demand; one already moving is unaffected."""
        with self._changed:
            if transfer.state == WAITING:
                self._prefetches.remove(transfer)
                self._demanded.append(transfer)

    def withdraw(self, transfer: Transfer) -> bool:
        """Withdraw a prefetch; False where it is already moving."""
        with self._changed:
            if transfer.state != WAITING:
                return False
            self._prefetches.remove(transfer)
            return True

    def collect(self) -> list[Transfer]:
        """Return the transfers that have arrived since the last call."""
        with self._changed:
            self._check()
            finished, self._finished = self._finished, []
            return finished

    def wait_for(self, keys: Container[int], count: int = 1) -> None:
        """Return once `count` of these keys have arrived and are not yet collected."""
        with self._changed:
            while self._arrived(keys) < count:
                self._check()
                self._awaited, self._wanted = keys, count
                self._changed.wait(_POLL_S)
            self._wanted = 0

    def close(self) -> None:
        """End the thread and drop queued transfers. Safe to call twice."""
        self._closing.set()
        with self._changed:
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _arrived(self, keys: Container[int]) -> int:
        return sum(transfer.key in keys for transfer in self._finished)

    def _check(self) -> None:
        if self._error is not None:
            raise TransferError(
                f"moving experts failed: {type(self._error).__name__}: {self._error}"
            ) from self._error
        if self._closing.is_set() or not self._thread.is_alive():
            raise TransferError("moving experts: the link is closed.")

    def _run(self) -> None:
        moving: deque[tuple[Transfer, float, object]] = deque()
        try:
            while True:
                transfer = self._next(wait=not moving)
                if transfer is not None:
                    begun_s = time.perf_counter()
                    moving.append((transfer, begun_s, self._mover.begin(transfer)))
                    if len(moving) < self._mover.depth:
                        continue
                if not moving:
                    return
                self._finish(*moving.popleft())
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _next(self, wait: bool) -> Transfer | None:
        """Take the next transfer; None where there is none (with `wait`: only on closing)."""
        with self._changed:
            if wait:
                self._changed.wait_for(
                    lambda: self._closing.is_set() or self._demanded or self._prefetches
                )
            if self._closing.is_set():
                return None
            for queue in (self._demanded, self._prefetches):
                if queue:
                    transfer = queue.popleft()
                    transfer.state = MOVING
                    return transfer
            return None

    def _finish(self, transfer: Transfer, begun_s: float, token: object) -> None:
        moved_s = self._mover.finish(token)
        end_s = time.perf_counter()
        if moved_s is not None:
            # Until then it waited for the device to be done with the slot, not for the link.
            begun_s = max(begun_s, end_s - moved_s)
        free_s = max(self._free_s, transfer.submitted_s)
        due_s, copied_s = end_s, end_s - begun_s
        if self._bytes_per_s is not None:
            least_s = transfer.nbytes / self._bytes_per_s
            due_s, copied_s = max(free_s + least_s, end_s), max(copied_s, least_s)
        self._free_s = transfer.ended_s = due_s
        transfer.lag_s = max(due_s - free_s - copied_s, 0.0)
        while end_s < due_s and not self._closing.wait(due_s - end_s):
            end_s = time.perf_counter()
        with self._changed:
            transfer.moved_s = end_s - max(begun_s, self._busy_until_s)
            self._busy_until_s = end_s
            self.busy_s += transfer.moved_s
            transfer.state = DONE
            self._finished.append(transfer)
            # Each needless wake-up would take the interpreter from the next copy.
            if self._wanted and self._arrived(self._awaited) >= self._wanted:
                self._changed.notify_all()


WEIGHT = 0.25
"""Weight of the newest sample in running averages of times: an outlier soon fades."""


class WallLink:
    """Gives transfers to a worker: demands at once, prefetches shortly before their turn.

    A prefetch is queued (in the tables), then issued (it has a slot and may move at any time), then
    arrives. The caller's thread makes all decisions; a transfer counts once it is demanded or has
    arrived.
    """

    def __init__(self, mover: Mover, bytes_per_s: float | None, makes_slots: bool = False) -> None:
        """`makes_slots`: whether the mover makes slots on demand, each of its expert's size."""
        self.busy_s = 0.0
        self.bytes_moved = 0
        self.transfers = 0
        self._mover = mover
        self._makes_slots = makes_slots
        self._fence: tuple[object] | None = None
        """The fence of the event in progress's transfers; None until the first of them."""
        self._worker = Worker(mover, bytes_per_s)
        self._flying: dict[int, Transfer] = {}
        """Transfers demanded or issued and not known to have arrived, by key."""
        self.issued: dict[int, Transfer] = {}
        """The prefetches among them, by key: not yet counted as transfers."""
        self._s_per_byte: float | None = None
        """Running average over the last transfers; None before the first."""
        self._ended_s = 0.0
        """Latest arrival time known."""
        self.demanded_s = 0.0
        """Seconds in which demands were in flight, without the delays of handing them over."""
        self._demanded_until_s = 0.0
        # An interrupted or discarded run leaves no thread behind.
        self.close = weakref.finalize(self, self._worker.close)

    def is_flying(self, key: int) -> bool:
        """Whether a key is demanded or issued and not known to have arrived."""
        return key in self._flying

    def demanded(self) -> set[int]:
        """Return the keys in flight that an event demanded."""
        return self._flying.keys() - self.issued.keys()

    def free_s(self, now: float) -> float:
        """Return when the link will have moved everything given to it, at its recent rate.

        Infinity while the rate is unknown; `now` where nothing is in flight.
        """
        if not self._flying:
            return now
        if self._s_per_byte is None:
            return math.inf
        first_s = min(transfer.submitted_s for transfer in self._flying.values())
        nbytes = sum(transfer.nbytes for transfer in self._flying.values())
        return max(now, max(first_s, self._ended_s) + nbytes * self._s_per_byte)

    def launched(self) -> None:
        """Note that the device may have new work, which the next transfers must wait for, too."""
        self._fence = None

    def demand(self, transfer: Transfer) -> None:
        """Move an expert into its slot, ahead of all prefetches not yet moving."""
        self.bytes_moved += transfer.nbytes
        self.transfers += 1
        self.move(transfer)

    def move(self, transfer: Transfer) -> None:
        """Move an expert that no event demands, such as a warmed cache's, and count nothing."""
        self._put(transfer, demanded=True)

    def issue(self, transfer: Transfer) -> None:
        """Give a prefetch to the worker, to move when its turn comes."""
        self.issued[transfer.key] = transfer
        self._put(transfer, demanded=False)

    def promote(self, key: int) -> None:
        """Serve an issued prefetch as a demand, because an event demands it."""
        self._worker.promote(self.issued[key])

    def withdraw_last(self, keys: Container[int], wanted: Container[int]) -> int | None:
        """Withdraw the issued prefetch among `keys`, none `wanted`, that is due last; return it."""
        candidates = [(-t.due, k) for k, t in self.issued.items() if k in keys and k not in wanted]
        return next((key for _, key in sorted(candidates) if self.revoke(key)), None)

    def revoke(self, key: int) -> bool:
        """Withdraw one issued prefetch; False where it is already moving."""
        if not self._worker.withdraw(self.issued[key]):
            return False
        del self._flying[key], self.issued[key]
        return True

    def arrivals(self) -> list[int]:
        """Collect arrived transfers; return the keys of the prefetches among them."""
        landed = []
        for transfer in self._worker.collect():
            assert transfer.state == DONE
            del self._flying[transfer.key]
            self._ended_s = max(self._ended_s, transfer.ended_s)
            rate = transfer.moved_s / transfer.nbytes
            average = rate if self._s_per_byte is None else self._s_per_byte
            self._s_per_byte = average + (rate - average) * WEIGHT
            if self.issued.pop(transfer.key, None) is not None:
                self.bytes_moved += transfer.nbytes
                self.transfers += 1
                landed.append(transfer.key)
            else:
                since_s = max(transfer.submitted_s, self._demanded_until_s)
                self._demanded_until_s = max(transfer.ended_s, since_s)
                self.demanded_s += self._demanded_until_s - since_s - transfer.lag_s
        self.busy_s = self._worker.busy_s
        return landed

    def wait_for(self, keys: Collection[int], count: int = 1) -> list[int]:
        """Wait until `count` of the flying `keys` have arrived; then as `arrivals`."""
        self._worker.wait_for(keys, count)
        return self.arrivals()

    def _put(self, transfer: Transfer, demanded: bool) -> None:
        assert transfer.key not in self._flying, f"key {transfer.key} is already on its way"
        if self._makes_slots:
            self._mover.place(transfer)
        if self._fence is None:
            self._fence = (self._mover.fence(),)
        (transfer.after,) = self._fence
        # Submitted now, whenever it was decided: a throttled link counts from here.
        transfer.submitted_s = time.perf_counter()
        self._flying[transfer.key] = transfer
        self._worker.put(transfer, demanded)


TRIALS = 3


def transfer_of(cache: PlacedCache, key: int, level: int, due: int = 0) -> Transfer:
    """Return the transfer of a key into the slot that it has been given."""
    nbytes, drops = cache.size_of(key, level), cache.take_dropped()
    return Transfer(key, cache.slots[key], nbytes, due=due, level=level, drops=drops)


class Traffic:
    """Issues those prefetches whose turn on the link comes before the next visit.

    An issued prefetch has already evicted another expert, in vain if its event comes before it
    begins to move; with too few issued, the link stands idle. So each kind of visit learns the time
    to the next one, and the link its own rate.
    """

    def __init__(self, engine: Any) -> None:
        """`engine` is that of the wall clock."""
        # A reference would keep the engine and its slots alive.
        self._engine: Any = weakref.proxy(engine)
        self._gaps: dict[Hashable, float] = {}
        """Kind of visit -> seconds to the next one, without the waits of the compute."""
        self._last: tuple[Hashable, float] | None = None

    def drain(self, mark: int, visit: Hashable = None, awaited: bool = False) -> None:
        """Land arrived prefetches, then issue those that begin to move before the next visit.

        Keys pinned by `mark` do not make room for them. `awaited`: whether the compute waits for
        the transfers already given to the link.
        """
        link = self._engine.link
        self.land(link.arrivals())
        now = time.perf_counter()
        if self._last is not None:
            last_visit, since_s = self._last
            average = self._gaps.get(last_visit, now - since_s)
            self._gaps[last_visit] = average + (now - since_s - average) * WEIGHT
        self._last = (visit, now)
        begins_s = link.free_s(now) if awaited else now
        self._issue(mark, now, begins_s + self._gaps.get(visit, 0.0))

    def note_stall(self, seconds: float) -> None:
        """Note for how long the compute has waited since the last visit."""
        if self._last is not None:
            self._last = (self._last[0], self._last[1] + seconds)

    def _issue(self, mark: int, now: float, until_s: float) -> None:
        """Issue the prefetches that begin by `until_s`, and the whole rest of a batch."""
        engine, batch = self._engine, -1
        link, rows = engine.link, engine.alone
        while True:
            key, last_batch = rows.visit(event.NEXT), batch
            if key < 0:
                return
            slot = engine.memory.slots[key]
            batch, due = int(slot["batch"]), int(slot["due"])
            if link.free_s(now) > until_s and (batch < 0 or batch != last_batch):
                return
            if not rows.visit(event.RESERVE, mark, [key]):
                return
            cache, level = engine.cache_of(key), int(slot["level"])
            cache.place(key, level)
            link.issue(transfer_of(cache, key, level, due))

    def land(self, keys: Sequence[int]) -> None:
        """Make arrived keys resident."""
        if keys:
            self._engine.alone.visit(event.LANDED, keys=keys)

    def cancel(self, due: int, wanted: Set[int]) -> None:
        """Drop the prefetches of events up to `due`, also issued ones not yet moving."""
        link = self._engine.link
        self._engine.alone.visit(event.CANCEL, number=due)
        for key, transfer in [*link.issued.items()]:
            if transfer.due <= due and key not in wanted and link.revoke(key):
                self._engine.take_back(key)


def bring(cache: PlacedCache, link: WallLink, places: Sequence[tuple[int, int]]) -> None:
    """Move keys into these slots at the best level, and wait for all of them."""
    # Kernels of a pass that broke off may still read these slots.
    link.launched()
    for key, slot in places:
        drops = cache.take_dropped() if cache.slots else ()
        link.move(Transfer(key, slot, cache.size_of(key), drops=drops))
    if places:
        link.wait_for({key for key, _ in places}, len(places))


def time_load(cache: PlacedCache, link: WallLink, count: int) -> float:
    """Return the median seconds of loading `count` experts of the first layer together.

    Where fewer fit into the cache, scaled up by bytes from as many as fit. Residents are loaded
    again into their own slots.
    """
    size = cache.size_of(0)
    num_experts = max(1, min(count, len(cache.slots) or cache.capacity_bytes // size))
    seconds, moved = [], 0
    for _ in range(TRIALS):
        places = list(cache.slots.items())[:num_experts]
        if not places:
            places = list(enumerate(cache.trial_slots(num_experts)))
        moved = sum(cache.size_of(key) for key, _ in places)
        start_s = time.perf_counter()
        bring(cache, link, places)
        seconds.append(time.perf_counter() - start_s)
    return statistics.median(seconds) * count * size / moved

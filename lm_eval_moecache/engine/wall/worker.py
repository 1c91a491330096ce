"""The thread that moves experts while the model computes: on-demand before queued prefetches."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Protocol

WAITING, MOVING, DONE = "waiting", "moving", "done"
_POLL_S = 0.5


class TransferError(RuntimeError):
    """Moving an expert failed; the run cannot go on."""


@dataclass(slots=True, eq=False)
class Transfer:
    """One expert on its way into a slot."""

    key: int
    slot: int
    nbytes: int
    due: int = 0
    """The event a prefetch is for."""
    level: int = 0
    """The precision level at which it is copied."""
    drops: Sequence[int] = ()
    """Slots that are no more: what lies there is of no use any longer (`Mover.place`)."""
    after: object = None
    """What must have happened on the device before the slot may be written (`Mover.fence`)."""
    state: str = WAITING
    submitted_s: float = field(default_factory=time.perf_counter)
    moved_s: float = 0.0
    """Once it is there: how long it had the link."""
    ended_s: float = 0.0
    """Once it is there: when that was, by the rate of a link that is slowed down."""
    lag_s: float = 0.0
    """Once it is there: how long it took to begin, on a link that had nothing else to do."""


class Mover(Protocol):
    """Copies an expert's bytes into a slot. `begin` and `finish` run in the worker's thread."""

    depth: int
    """How many transfers may be begun before the first of them is finished."""

    def fence(self) -> object:
        """Return what new transfers have to wait for; called where their slots are given away."""

    def place(self, transfer: Transfer) -> None:
        """Make the slot of a transfer where there is none; called before `fence`.

        Only where slots differ in size, and by the thread that decides: what it drops may be in
        use by kernels that it has launched, and the fence comes after these.
        """

    def begin(self, transfer: Transfer) -> object:
        """Start the copy (or make it) and return what `finish` waits for."""

    def finish(self, token: object) -> float | None:
        """Return once the bytes are in the slot: the seconds that they moved.

        None where nothing but moving has taken time since `begin`.
        """

    def synchronize(self) -> None:
        """Return once the device has executed all it was given."""


class Worker:
    """Serves transfers in the order: demanded ones, then prefetches, each as they came.

    With `bytes_per_s` a transfer takes at least its bytes over that rate, measured from the end of
    the one before where it was waiting by then, so that waking up late does not add up. What goes
    wrong in the thread is raised, as TransferError, by the next call that waits or puts.
    """

    def __init__(self, mover: Mover, bytes_per_s: float | None = None) -> None:
        self._mover = mover
        self._bytes_per_s = bytes_per_s
        self._demanded: deque[Transfer] = deque()
        self._prefetches: deque[Transfer] = deque()
        self._finished: list[Transfer] = []
        self._awaited: Container[int] = ()
        self._wanted = 0
        """How many of the awaited keys the caller is waiting for; 0 where it is not."""
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
        with self._changed:
            self._check()
            (self._demanded if demanded else self._prefetches).append(transfer)
            self._changed.notify_all()

    def promote(self, transfer: Transfer) -> None:
        """Serve a prefetch as if it had been demanded; one that moves already goes on."""
        with self._changed:
            if transfer.state == WAITING:
                self._prefetches.remove(transfer)
                self._demanded.append(transfer)

    def withdraw(self, transfer: Transfer) -> bool:
        """Take a prefetch back; False where it moves already."""
        with self._changed:
            if transfer.state != WAITING:
                return False
            self._prefetches.remove(transfer)
            return True

    def collect(self) -> list[Transfer]:
        """Return what has arrived since the last call."""
        with self._changed:
            self._check()
            finished, self._finished = self._finished, []
            return finished

    def wait_for(self, keys: Container[int], count: int = 1) -> None:
        """Return once `count` of these keys have arrived and were not collected yet."""
        with self._changed:
            while self._arrived(keys) < count:
                self._check()
                self._awaited, self._wanted = keys, count
                self._changed.wait(_POLL_S)
            self._wanted = 0

    def close(self) -> None:
        """End the thread; what waits is forgotten. Safe to call twice."""
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
        """Take the next transfer; None where there is none (after waiting: at the end)."""
        with self._changed:
            if wait:
                self._changed.wait_for(self._has_work)
            if self._closing.is_set():
                return None
            for queue in (self._demanded, self._prefetches):
                if queue:
                    transfer = queue.popleft()
                    transfer.state = MOVING
                    return transfer
            return None

    def _has_work(self) -> bool:
        return self._closing.is_set() or bool(self._demanded or self._prefetches)

    def _finish(self, transfer: Transfer, begun_s: float, token: object) -> None:
        moved_s = self._mover.finish(token)
        end_s = time.perf_counter()
        if moved_s is not None:
            # Before that it waited for the device to be done with the slot, not for the link.
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
            # Each needless waking would take the interpreter from the next copy.
            if self._wanted and self._arrived(self._awaited) >= self._wanted:
                self._changed.notify_all()

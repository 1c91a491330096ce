"""The machine's clock, and its link: the same queue of prefetches, and a thread that moves."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Collection, Container, Sequence

from lm_eval_moecache.engine.link import Link
from lm_eval_moecache.engine.wall.worker import DONE, Mover, Transfer, Worker

WEIGHT = 0.25
"""Of the newest in what is learned of times: one that stands out is soon forgotten."""


class WallClock:
    """Work takes as long as it takes, so there is nothing to account."""

    def __init__(self, synchronize: Callable[[], None]) -> None:
        self.synchronize = synchronize
        self._origin_s = time.perf_counter()

    @property
    def now(self) -> float:
        return time.perf_counter() - self._origin_s


class WallLink(Link):
    """Gives transfers to a worker, up to a few prefetches ahead of their turn.

    A prefetch is queued, then issued (it has a slot and may move at any time), then arrives. All
    decisions are made by the caller's thread; a transfer counts once it is demanded or has arrived.
    """

    def __init__(self, mover: Mover, bytes_per_s: float | None, makes_slots: bool = False) -> None:
        """`makes_slots` is whether the mover makes them as they are needed, each of its size."""
        super().__init__()
        self._mover = mover
        self._makes_slots = makes_slots
        self._fence: tuple[object] | None = None
        """What the transfers of the event in progress wait for; None until the first of them."""
        self._worker = Worker(mover, bytes_per_s)
        self._flying: dict[int, Transfer] = {}
        """Demanded or issued, and not known to have arrived."""
        self._issued: dict[int, Transfer] = {}
        """The prefetches among them."""
        self._s_per_byte: float | None = None
        """As the last transfers were; None before the first."""
        self._ended_s = 0.0
        """When the last transfer that is known to have arrived was there."""
        self.demanded_s = 0.0
        """Seconds in which demands were on their way, without those that handing over took."""
        self._demanded_until_s = 0.0
        # A run that is interrupted or dropped leaves no thread.
        self.close = weakref.finalize(self, self._worker.close)

    @property
    def active(self) -> bool:
        return bool(self._issued) or bool(self._queued)

    @property
    def num_issued(self) -> int:
        return len(self._issued)

    def is_pending(self, key: int) -> bool:
        return key in self._issued or key in self._queued

    def without_pending(self, keys: Sequence[int]) -> list[int]:
        return [key for key in keys if not self.is_pending(key)]

    def issued(self) -> set[int]:
        """Return the keys of prefetches that may move at any time."""
        return set(self._issued)

    def is_flying(self, key: int) -> bool:
        return key in self._flying

    def demanded(self) -> set[int]:
        """Return the keys that fly because an event demanded them."""
        return self._flying.keys() - self._issued.keys()

    def free_s(self, now: float) -> float:
        """Return when all that was given to the link will have moved, at the rate of the last.

        Never where the rate is not known yet; `now` where nothing is on its way.
        """
        if not self._flying:
            return now
        if self._s_per_byte is None:
            return math.inf
        first_s = min(transfer.submitted_s for transfer in self._flying.values())
        nbytes = sum(transfer.nbytes for transfer in self._flying.values())
        return max(now, max(first_s, self._ended_s) + nbytes * self._s_per_byte)

    def launched(self) -> None:
        """Note that the device may have been given work: the next transfers wait for it, too."""
        self._fence = None

    def demand(self, transfer: Transfer) -> None:
        """Move a key's bytes into its slot before all prefetches that are not moving yet."""
        self.count(transfer)
        self.move(transfer)

    def count(self, transfer: Transfer) -> None:
        """Count a demand, which `move` may carry out later."""
        self.bytes_moved += transfer.nbytes
        self.transfers += 1

    def move(self, transfer: Transfer) -> None:
        """Move what has been counted as a demand."""
        self._put(transfer, demanded=True)

    def batch_of_head(self) -> int | None:
        """Return the batch of the next queued prefetch, if one waits and is of a batch."""
        head = self.head()
        return None if head is None else self._queued[head][2]

    def issue(self, transfer: Transfer) -> None:
        """Let the first of the queued prefetches move when its turn comes."""
        assert transfer.key == self.head(), f"{transfer.key} is not the first in the queue"
        transfer.due = self.withdraw(transfer.key)[0]
        self._issued[transfer.key] = transfer
        self._put(transfer, demanded=False)

    def promote(self, key: int) -> None:
        """An event demands an issued prefetch: it goes before all others."""
        self._worker.promote(self._issued[key])

    def withdraw_issued(self, due: int, wanted: Container[int]) -> list[int]:
        """Take back the issued prefetches for events up to `due` that have not begun to move.

        Those in `wanted` stay. Returns the keys taken back, whose slots are free again.
        """
        candidates = [k for k, t in self._issued.items() if t.due <= due and k not in wanted]
        return [key for key in candidates if self.take_back(key)]

    def withdraw_last(self, keys: Container[int], wanted: Container[int]) -> int | None:
        """Take back the issued prefetch among `keys` that is due last, to free its slot."""
        candidates = [(-t.due, k) for k, t in self._issued.items() if k in keys and k not in wanted]
        return next((key for _, key in sorted(candidates) if self.take_back(key)), None)

    def take_back(self, key: int) -> bool:
        """Take back one issued prefetch; False where it moves already."""
        if not self._worker.withdraw(self._issued[key]):
            return False
        del self._flying[key], self._issued[key]
        return True

    def arrivals(self) -> list[int]:
        """Return the keys of prefetches that have arrived since the last call."""
        landed = []
        for transfer in self._worker.collect():
            assert transfer.state == DONE
            del self._flying[transfer.key]
            self._ended_s = max(self._ended_s, transfer.ended_s)
            rate = transfer.moved_s / transfer.nbytes
            known = rate if self._s_per_byte is None else self._s_per_byte
            self._s_per_byte = known + (rate - known) * WEIGHT
            if self._issued.pop(transfer.key, None) is not None:
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
        """Stand still until `count` of the flying `keys` are there; then as `arrivals`."""
        self._worker.wait_for(keys, count)
        return self.arrivals()

    def _put(self, transfer: Transfer, demanded: bool) -> None:
        assert transfer.key not in self._flying, f"key {transfer.key} is already on its way"
        if self._makes_slots:
            self._mover.place(transfer)
        if self._fence is None:
            self._fence = (self._mover.fence(),)
        (transfer.after,) = self._fence
        # Asked for now, whenever that was decided: a throttled link counts from here.
        transfer.submitted_s = time.perf_counter()
        self._flying[transfer.key] = transfer
        self._worker.put(transfer, demanded)

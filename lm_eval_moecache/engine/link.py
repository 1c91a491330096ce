"""What both kinds of time share: a clock, and the link between where experts are stored and run.

On-demand transfers go before queued prefetches and never interrupt the one in flight. On-demand
loads are awaited by the compute, so none of them is ever left waiting between events: the queue
holds prefetches only.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Protocol


class Clock(Protocol):
    """Tells the time of a run in seconds; it never goes back."""

    @property
    def now(self) -> float: ...

    def synchronize(self) -> None:
        """Let what the pass has launched come to its end before the time is taken."""


class Link(ABC):
    """The queue of prefetches that wait for the link, and what the link has counted.

    They wait in one queue for each event they are due at: a prefetcher names many experts at a
    time, most of which are withdrawn together when their event has come.
    """

    def __init__(self) -> None:
        self.busy_s = 0.0
        self.bytes_moved = 0
        self.transfers = 0
        self._queued: dict[int, tuple[int, float, int | None]] = {}
        """Key -> (event that it is due at, earliest start, batch)."""
        self._queues: dict[int, dict[int, None]] = {}
        """Due event -> the keys that wait, in the order of submission."""
        self._dues: list[int] = []
        """Heap of the events in `_queues`."""

    @property
    @abstractmethod
    def num_issued(self) -> int:
        """Prefetches that hold bytes of a cache and are not counted as transfers yet."""

    @property
    @abstractmethod
    def active(self) -> bool:
        """Whether a prefetch is under way or waiting."""

    @abstractmethod
    def is_pending(self, key: int) -> bool:
        """Whether a prefetch of this key is under way or waiting."""

    @abstractmethod
    def without_pending(self, keys: Sequence[int]) -> list[int]:
        """Return the keys of which no prefetch is under way or waiting, in their order."""

    def submit(
        self, keys: Sequence[int], due: int, now: float, batch: int | None = None
    ) -> Sequence[int]:
        """Queue prefetches of those keys that are not on their way already; return these.

        The earliest `due` event goes first, then the order of submission. Prefetches of one `batch`
        that follow each other without a gap pay one latency together.
        """
        fresh = self.without_pending(keys)
        if fresh:
            self._queued.update(dict.fromkeys(fresh, (due, now, batch)))
            queue = self._queues.get(due)
            if queue is None:
                self._queues[due] = dict.fromkeys(fresh)
                heapq.heappush(self._dues, due)
            else:
                queue.update(dict.fromkeys(fresh))
        return fresh

    def head(self) -> int | None:
        """Return the key of the next queued prefetch, or None."""
        dues, queues = self._dues, self._queues
        while dues:
            for key in queues[dues[0]]:
                return key
            del queues[heapq.heappop(dues)]
        return None

    def withdraw(self, key: int) -> tuple[int, float, int | None]:
        """Take a queued prefetch back: it is demanded now, or not wanted any more, or begins.

        Returns (event that it is due at, earliest start, batch).
        """
        entry = self._queued.pop(key)
        del self._queues[entry[0]][key]
        return entry

    def withdraw_queued(self, keys: Iterable[int]) -> None:
        """Take those of the keys back that are queued: they are demanded now."""
        queued, queues = self._queued, self._queues
        for key in keys:
            if key in queued:
                del queues[queued.pop(key)[0]][key]

    def cancel_due(self, due: int) -> int:
        """Drop the queued prefetches of events up to `due`; return how many."""
        dues, queued, dropped = self._dues, self._queued, 0
        while dues and dues[0] <= due:
            for key in self._queues.pop(heapq.heappop(dues)):
                del queued[key]
                dropped += 1
        return dropped

    def clear(self) -> None:
        """Drop every queued prefetch (what is under way still lands)."""
        self._queued.clear()
        self._queues.clear()
        self._dues.clear()

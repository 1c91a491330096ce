"""The link between where all experts are stored and where residents lie: what both clocks share.

On-demand transfers go before queued prefetches and never interrupt the one in flight. On-demand
loads are awaited by the compute, so none of them is ever left waiting between events: the queue
holds prefetches only.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod


class Link(ABC):
    """The queue of prefetches that wait for the link, and what the link has counted."""

    def __init__(self) -> None:
        self.busy_s = 0.0
        self.bytes_moved = 0
        self.transfers = 0
        self._heap: list[tuple[int, int, int]] = []
        self._queued: dict[int, tuple[int, float, int | None]] = {}
        """Key -> (sequence number of its live heap entry, time of submission, batch)."""
        self._sequence = 0

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

    def submit(self, key: int, due: int, now: float, batch: int | None = None) -> None:
        """Queue a prefetch. The earliest `due` event goes first, then the order of submission.

        Prefetches of one `batch` that follow each other without a gap pay one latency together.
        """
        assert not self.is_pending(key), f"key {key} is already on its way"
        self._queued[key] = (self._sequence, now, batch)
        heapq.heappush(self._heap, (due, self._sequence, key))
        self._sequence += 1

    def head(self) -> int | None:
        """Return the key of the next queued prefetch, or None."""
        heap = self._heap
        while heap and not self._is_live(heap[0]):
            heapq.heappop(heap)
        return heap[0][2] if heap else None

    def withdraw(self, key: int) -> None:
        """Take a queued prefetch back: it is demanded now, or not wanted any more."""
        del self._queued[key]

    def cancel_due(self, due: int) -> int:
        """Drop the queued prefetches of events up to `due`; return how many."""
        heap, queued, dropped = self._heap, self._queued, 0
        while heap:
            event, sequence, key = heap[0]
            is_live = key in queued and queued[key][0] == sequence
            if is_live and event > due:
                break
            heapq.heappop(heap)
            if is_live:
                del queued[key]
                dropped += 1
        return dropped

    def clear(self) -> None:
        """Drop every queued prefetch (what is under way still lands)."""
        self._heap.clear()
        self._queued.clear()

    def _is_live(self, entry: tuple[int, int, int]) -> bool:
        # A key may have been withdrawn and submitted again: only its last heap entry counts.
        _, sequence, key = entry
        return key in self._queued and self._queued[key][0] == sequence

"""The link between where experts are stored and where they are near: one server, two classes.

On-demand transfers go before queued prefetches and never interrupt the one in flight. On-demand
loads are awaited by the compute, so none of them is ever left waiting between events: the queue
holds prefetches only.
"""

from __future__ import annotations

import heapq

from lm_eval_moecache.records.hardware import Hardware


class Link:
    """One transfer at a time; each takes latency + bytes / bandwidth seconds."""

    def __init__(self, hardware: Hardware) -> None:
        self._latency_s = hardware.link_latency_s
        self._bytes_per_s = hardware.link_bytes_per_s
        self.busy_until = 0.0
        self.busy_s = 0.0
        self.bytes_moved = 0
        self.transfers = 0
        self.inflight: int | None = None
        """Key of the prefetch in flight, which lands at `busy_until`."""
        self._heap: list[tuple[int, int, int]] = []
        self._queued: dict[int, tuple[int, float, int | None]] = {}
        """Key -> (sequence number of its live heap entry, time of submission, batch)."""
        self._sequence = 0
        self._open_batch: int | None = None
        """Batch of the last transfer, which the next one joins if nothing comes between."""

    @property
    def num_issued(self) -> int:
        """Prefetches that hold bytes of a cache and are not counted as transfers yet."""
        return 0

    @property
    def active(self) -> bool:
        """Whether a prefetch is in flight or waiting."""
        return self.inflight is not None or bool(self._queued)

    def is_pending(self, key: int) -> bool:
        return key == self.inflight or key in self._queued

    def transfer(self, nbytes: int, now: float, joins: bool = False) -> float:
        """Move `nbytes` as soon as the link is free, not before `now`; return when they land.

        A transfer that `joins` the one before it, in one batch, pays no latency of its own.
        """
        start = now if now > self.busy_until else self.busy_until
        duration = nbytes / self._bytes_per_s
        if not joins:
            duration += self._latency_s
            self._open_batch = None
        self.busy_until = start + duration
        self.busy_s += duration
        self.bytes_moved += nbytes
        self.transfers += 1
        return self.busy_until

    def submit(self, key: int, due: int, now: float, batch: int | None = None) -> None:
        """Queue a prefetch. The earliest `due` event goes first, then the order of submission.

        Prefetches of one `batch` that follow each other without a gap pay one latency together.
        """
        assert not self.is_pending(key), f"key {key} is already on its way"
        self._queued[key] = (self._sequence, now, batch)
        heapq.heappush(self._heap, (due, self._sequence, key))
        self._sequence += 1

    def peek(self) -> tuple[int, float] | None:
        """Return (key, earliest start) of the next queued prefetch, or None."""
        while self._heap and not self._is_live(self._heap[0]):
            heapq.heappop(self._heap)
        if not self._heap:
            return None
        key = self._heap[0][2]
        submitted = self._queued[key][1]
        return key, submitted if submitted > self.busy_until else self.busy_until

    def withdraw(self, key: int) -> None:
        """Take a queued prefetch back: it is demanded now, or not wanted any more."""
        del self._queued[key]

    def postpone(self, key: int, until: float) -> None:
        """Keep a queued prefetch from starting before `until`."""
        sequence, _, batch = self._queued[key]
        self._queued[key] = (sequence, until, batch)

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
        """Drop every queued prefetch (the one in flight still lands)."""
        self._heap.clear()
        self._queued.clear()

    def start(self, key: int, nbytes: int, now: float) -> None:
        """Begin a queued prefetch; the link must be free of another one in flight."""
        assert self.inflight is None, f"key {self.inflight} is still in flight"
        batch = self._queued.pop(key)[2]
        joins = batch is not None and batch == self._open_batch and now <= self.busy_until
        self.transfer(nbytes, now, joins)
        self._open_batch = batch
        self.inflight = key

    def land(self) -> int:
        """Take the arrived prefetch off the link and return its key."""
        assert self.inflight is not None, "nothing is in flight"
        key, self.inflight = self.inflight, None
        return key

    def _is_live(self, entry: tuple[int, int, int]) -> bool:
        # A key may have been withdrawn and submitted again: only its last heap entry counts.
        _, sequence, key = entry
        return key in self._queued and self._queued[key][0] == sequence

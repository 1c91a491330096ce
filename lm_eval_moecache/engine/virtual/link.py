"""The virtual link: one server of the hardware profile's latency and bandwidth."""

from __future__ import annotations

from collections.abc import Sequence

from lm_eval_moecache.engine.link import Link
from lm_eval_moecache.engine.virtual.lanes import arrivals, read_shares
from lm_eval_moecache.records.hardware import Hardware


class VirtualLink(Link):
    """One transfer at a time; each takes latency + bytes / bandwidth seconds.

    With `fifo` everything moves in the order in which it was asked for: prefetches are neither
    overtaken by demands nor withdrawn when their event is over. That is CommitMoE's premise, of
    transfers that "cannot be canceled once initiated".

    Where the profile has lanes, or experts are read by their projections, an event's demands move
    as one `batch` over them. Prefetches go one at a time, at what one request gets.
    """

    def __init__(self, hardware: Hardware, fifo: bool = False, reads_per_expert: int = 1) -> None:
        super().__init__()
        self.fifo = fifo
        self._lanes, self._lane_rate = hardware.link_lanes, hardware.lane_rate
        self._shares = read_shares(reads_per_expert)
        self._latency_s = hardware.link_latency_s
        self._bytes_per_s = hardware.lane_rate
        self._link_rate = hardware.link_rate
        self.busy_until = 0.0
        self.inflight: int | None = None
        """Key of the prefetch in flight, which lands at `busy_until`."""
        self._open_batch: int | None = None
        """Batch of the last transfer, which the next one joins if nothing comes between."""

    @property
    def num_issued(self) -> int:
        return 0

    @property
    def active(self) -> bool:
        return self.inflight is not None or bool(self._queued)

    def is_pending(self, key: int) -> bool:
        return key == self.inflight or key in self._queued

    def without_pending(self, keys: Sequence[int]) -> list[int]:
        queued, inflight = self._queued, self.inflight
        return [key for key in keys if key not in queued and key != inflight]

    def batch(self, sizes: Sequence[int], now: float) -> list[list[float]]:
        """Move an event's demands over the lanes, not before `now`.

        Read by projections, the first ones of all experts go first. Returns for each expert when
        each of its reads lands.
        """
        start = now if now > self.busy_until else self.busy_until
        count = len(sizes)
        times = arrivals(
            tuple([size * share for share in self._shares for size in sizes]),
            lanes=self._lanes,
            lane_rate=self._lane_rate,
            link_rate=self._link_rate,
            latency_s=self._latency_s,
        )
        self._open_batch = None
        self.busy_until = start + max(times)
        self.busy_s += self.busy_until - start
        self.bytes_moved += sum(sizes)
        self.transfers += count
        return [[start + at_s for at_s in times[i::count]] for i in range(count)]

    def duration_s(self, nbytes: int) -> float:
        """Return how long a transfer of its own takes on a free link."""
        return self._latency_s + nbytes / self._bytes_per_s

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

    def submit(
        self, keys: Sequence[int], due: int, now: float, batch: int | None = None
    ) -> Sequence[int]:
        return super().submit(keys, 0 if self.fifo else due, now, batch)

    def cancel_due(self, due: int) -> int:
        return 0 if self.fifo else super().cancel_due(due)

    def carry(self, nbytes: int, now: float) -> float:
        """Move activations, which are no expert: as `transfer`, and not counted among those."""
        self.transfers -= 1
        return self.transfer(nbytes, now)

    def peek(self) -> tuple[int, float] | None:
        """Return (key, earliest start) of the next queued prefetch, or None."""
        key = self.head()
        if key is None:
            return None
        submitted = self._queued[key][1]
        return key, submitted if submitted > self.busy_until else self.busy_until

    def postpone(self, key: int, until: float) -> None:
        """Keep a queued prefetch from starting before `until`."""
        due, _, batch = self._queued[key]
        self._queued[key] = (due, until, batch)

    def start(self, key: int, nbytes: int, now: float) -> None:
        """Begin a queued prefetch; the link must be free of another one in flight."""
        assert self.inflight is None, f"key {self.inflight} is still in flight"
        batch = self.withdraw(key)[2]
        joins = batch is not None and batch == self._open_batch and now <= self.busy_until
        self.transfer(nbytes, now, joins)
        self._open_batch = batch
        self.inflight = key

    def land(self) -> int:
        """Take the arrived prefetch off the link and return its key."""
        assert self.inflight is not None, "nothing is in flight"
        key, self.inflight = self.inflight, None
        return key

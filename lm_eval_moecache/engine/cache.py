"""Where a run's experts are: resident in the cache, or queued for the link.

The cache records which experts are resident, at which precision, and the bytes they take. The
virtual and the wall clock share the link's prefetch queue. On-demand transfers go ahead of it but
never interrupt the transfer in flight; the compute awaits them, so none is ever left waiting
between events.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Protocol

from lm_eval_moecache.algorithms.eviction.base import EvictionAlgorithm
from lm_eval_moecache.records.geometry import Geometry


class ExpertCache:
    """One pool of bytes. It asks the eviction algorithm for victims and evicts them.

    A key is absent, arriving (its bytes are reserved, its weights not yet usable) or resident.
    Arriving and resident bytes together never exceed the capacity. Weights are immutable, so an
    eviction costs no transfer.
    """

    def __init__(
        self, capacity_bytes: int, eviction: EvictionAlgorithm, geometry: Geometry
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.eviction = eviction
        self._sizes = geometry.expert_bytes
        eviction.capacity_bytes = capacity_bytes
        total_size = sum(levels[0] for levels in geometry.expert_bytes)
        eviction.num_slots = max(1, capacity_bytes * geometry.num_layers // total_size)
        self.num_experts = geometry.num_experts
        self.resident: dict[int, int] = {}
        """Resident key -> level of the precision ladder."""
        self.arriving: dict[int, int] = {}
        """Key of a prefetch in flight -> level."""
        self.unused_prefetches: set[int] = set()
        """Resident keys that a prefetch loaded and no event has used yet."""
        self.used_bytes = 0
        self.peak_bytes = 0
        self.loads = 0
        self.warmed = 0
        """Residents present before the first request; not counted as loads."""
        self.evictions = 0
        self.replaced = 0
        """Residents released because the same expert was demanded at a better level."""
        self.lifetime_tokens = 0
        """Sum over evicted experts of the tokens processed while they were resident."""
        self.tokens = 0
        """Tokens processed so far: the unit of `lifetime_tokens`."""
        self._loaded_at: dict[int, int] = {}
        self._evicted_in: dict[int, int] = {}
        self._upgrading: set[int] = set()
        """Keys released for an upgrade and not loaded again yet."""
        self._pass_index = -1

    def begin_pass(self, pass_index: int, num_tokens: int) -> None:
        """Advance the cache's time by `num_tokens`, and tell the eviction algorithm of the pass."""
        self._pass_index = pass_index
        self.tokens += num_tokens
        self.eviction.on_pass(pass_index)

    def size_of(self, key: int, level: int = 0) -> int:
        """Return the bytes of an expert at a precision level."""
        return self._sizes[key // self.num_experts][level]

    def count_evicted_in_this_pass(self, keys: Iterable[int]) -> int:
        """Count the keys evicted earlier in this pass: misses on them are collisions."""
        evicted_in, now = self._evicted_in, self._pass_index
        # A list: for a handful of keys a generator costs twice as much.
        return sum([evicted_in.get(key) == now for key in keys])

    def use_prefetched(self, keys: Sequence[int]) -> int:
        """Mark these keys as used by an event; return how many were unused prefetches."""
        fresh = self.unused_prefetches.intersection(keys)
        self.unused_prefetches -= fresh
        return len(fresh)

    def make_room(
        self, nbytes: int, pinned: Container[int], layer: int, key: int | None = None
    ) -> bool:
        """Evict until `nbytes` fit, for `key`; False once only pinned or arriving keys are left.

        Evictions made on the way to a False are not undone.
        """
        limit, eviction = self.capacity_bytes - nbytes, self.eviction
        if key is not None and self.used_bytes > limit:
            eviction.on_miss(key)
        while self.used_bytes > limit:
            victim = eviction.victim(pinned, layer)
            if victim is None:
                return False
            assert victim not in pinned, f"eviction chose the pinned key {victim}"
            self._evict(victim)
        return True

    def insert(self, key: int, level: int = 0) -> None:
        """Make a demanded key resident at once: the compute awaits its transfer before all else."""
        self._take(key, level)
        self.resident[key] = level
        self._loaded_at[key] = self.tokens
        if key in self._upgrading:
            self._upgrading.remove(key)
        else:
            self.eviction.on_insert(key, False)

    def warm(self, hottest: Iterable[int]) -> None:
        """Make these keys resident as far as they fit, hottest first, without loads or evictions.

        Keys too large for the space left are skipped. They are inserted hottest last, so that rules
        that go by order of arrival favour the hottest, too.
        """
        room = self.capacity_bytes - self.used_bytes
        warmed: list[int] = []
        for key in hottest:
            if self.size_of(key) <= room:
                warmed.append(key)
                room -= self.size_of(key)
        for key in reversed(warmed):
            self.insert(key)
        self.loads -= len(warmed)
        self.warmed += len(warmed)

    def reserve(self, key: int, level: int = 0) -> None:
        """Reserve the bytes of a prefetch whose transfer begins."""
        self._take(key, level)
        self.arriving[key] = level

    def land(self, key: int) -> None:
        """Make an arriving key resident."""
        self.resident[key] = self.arriving.pop(key)
        self._loaded_at[key] = self.tokens
        self.eviction.on_insert(key, True)
        self.unused_prefetches.add(key)

    def release_for_upgrade(self, key: int) -> None:
        """Release the bytes of a resident, about to be loaded again at a better level.

        The eviction algorithm is not told: to it the expert has never left.
        """
        self._release(key)
        self._upgrading.add(key)
        self.replaced += 1

    def take_over(self, loaded_at: Mapping[int, int]) -> None:
        """Adopt the residents of a compiled replay, in order of loading, at the best level.

        `loaded_at` maps each key to the tokens processed before its load. The caller sets bytes and
        counters.
        """
        for key in self.resident.keys() - loaded_at.keys():
            self.eviction.on_evict(key)
        for key in loaded_at:
            if key not in self.resident:
                self.eviction.on_insert(key, False)
        self.resident = dict.fromkeys(loaded_at, 0)
        self._loaded_at = dict(loaded_at)

    def clear(self) -> None:
        """Evict all residents; prefetches in flight still arrive."""
        for key in list(self.resident):
            self._evict(key)

    def check_integrity(self) -> None:
        """Assert the conservation laws: bytes add up, and loads match residents and departures."""
        held_bytes = sum(self.size_of(k, r) for k, r in (self.resident | self.arriving).items())
        assert held_bytes == self.used_bytes <= self.capacity_bytes, (
            f"bytes held {held_bytes}, counted {self.used_bytes}, capacity {self.capacity_bytes}"
        )
        settled = self.loads + self.warmed - self.evictions - self.replaced
        assert settled == len(self.resident) + len(self.arriving), (
            f"loads {self.loads} + warmed {self.warmed} - evictions {self.evictions} - "
            f"replaced {self.replaced} != "
            f"residents {len(self.resident)} + arriving {len(self.arriving)}"
        )

    def _take(self, key: int, level: int) -> None:
        self.used_bytes += self._sizes[key // self.num_experts][level]
        assert self.used_bytes <= self.capacity_bytes, (
            f"{self.used_bytes} bytes in a cache of {self.capacity_bytes}"
        )
        if self.used_bytes > self.peak_bytes:
            self.peak_bytes = self.used_bytes
        self.loads += 1

    def _evict(self, key: int) -> None:
        self.evictions += 1
        self.lifetime_tokens += self.tokens - self._loaded_at[key]
        self._evicted_in[key] = self._pass_index
        self._release(key)
        self.eviction.on_evict(key)

    def _release(self, key: int) -> None:
        level = self.resident.pop(key)
        self.used_bytes -= self._sizes[key // self.num_experts][level]
        del self._loaded_at[key]
        if self.unused_prefetches:
            self.unused_prefetches.discard(key)


class Clock(Protocol):
    """The time of a run in seconds, monotonic."""

    @property
    def now(self) -> float: ...

    def synchronize(self) -> None:
        """Return once all work that the pass has launched is done, so that `now` includes it."""


class Link(ABC):
    """The queue of prefetches waiting for the link, and the link's counters.

    There is one queue per due event, because a prefetcher proposes many experts at a time and most
    of them are withdrawn together once their event comes.
    """

    def __init__(self) -> None:
        self.busy_s = 0.0
        self.bytes_moved = 0
        self.transfers = 0
        self._queued: dict[int, tuple[int, float, int | None]] = {}
        """Key -> (due event, earliest start in seconds, batch)."""
        self._queues: dict[int, dict[int, None]] = {}
        """Due event -> its queued keys, in order of submission."""
        self._dues: list[int] = []
        """Heap of the events in `_queues`."""

    @property
    def num_issued(self) -> int:
        """Prefetches that hold cache bytes but are not yet counted as transfers."""
        return 0

    @property
    @abstractmethod
    def active(self) -> bool:
        """Whether a prefetch is in flight or queued."""

    def is_pending(self, key: int) -> bool:
        """Whether a prefetch of this key is in flight or queued."""
        return not self.without_pending([key])

    @abstractmethod
    def without_pending(self, keys: Sequence[int]) -> list[int]:
        """Return those keys, in their order, of which no prefetch is in flight or queued."""

    def submit(
        self, keys: Sequence[int], due: int, now: float, batch: int | None = None
    ) -> Sequence[int]:
        """Queue prefetches of those keys that are not pending already; return the queued keys.

        They are served by earliest `due` event, then in order of submission. Consecutive prefetches
        of one `batch` with no gap between them share one latency.
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
        """Take a prefetch off the queue: it is demanded, no longer wanted, or begins to move.

        Returns (due event, earliest start in seconds, batch).
        """
        entry = self._queued.pop(key)
        del self._queues[entry[0]][key]
        return entry

    def withdraw_queued(self, keys: Iterable[int]) -> None:
        """Take those keys that are queued off the queue: they are demanded now."""
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
        """Drop every queued prefetch; transfers in flight still land."""
        self._queued.clear()
        self._queues.clear()
        self._dues.clear()

"""What moves on the real link: prefetches, when each is issued, withdrawn and settled; and trials.

A trial is a transfer that no pass counts: of a cache that is warmed, or one that is only timed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Hashable, Sequence, Set

from lm_eval_moecache.engine.prefetches import Prefetches
from lm_eval_moecache.engine.wall.link import WEIGHT, WallLink
from lm_eval_moecache.engine.wall.slots import PlacedCache
from lm_eval_moecache.engine.wall.worker import Transfer

TRIALS = 3


def transfer_of(cache: PlacedCache, key: int, level: int) -> Transfer:
    """Return what brings a key, which has been given a slot, there."""
    nbytes = cache.size_of(key, level)
    return Transfer(key, cache.slots[key], nbytes, level=level, drops=cache.take_dropped())


class Traffic:
    """Issues those prefetches whose turn on the link comes before the next visit.

    An issued prefetch has taken another expert's place already, so one that does not begin before
    its event is cancelled has evicted for nothing; where too few are issued the link stands idle.
    Each kind of visit learns when the next one follows, and the link how fast it is.
    """

    def __init__(
        self,
        caches: Sequence[PlacedCache],
        link: WallLink,
        prefetches: Prefetches,
        num_experts: int,
    ) -> None:
        self._caches = caches
        self._link = link
        self._prefetches = prefetches
        self._num_experts = num_experts
        self._gaps: dict[Hashable, float] = {}
        """Kind of visit -> seconds to the next one, those left out that the compute waits in."""
        self._last: tuple[Hashable, float] | None = None

    def drain(
        self, pinned: Set[int], layer: int, visit: Hashable = None, awaited: bool = False
    ) -> None:
        """Land what has arrived, then issue what begins to move before the next visit.

        `awaited` is whether the compute waits for what was given to the link before.
        """
        link = self._link
        self.settle(link.arrivals())
        now = time.perf_counter()
        if self._last is not None:
            before, since_s = self._last
            known = self._gaps.get(before, now - since_s)
            self._gaps[before] = known + (now - since_s - known) * WEIGHT
        self._last = (visit, now)
        begins_s = link.free_s(now) if awaited else now
        self._issue(pinned, layer, now, begins_s + self._gaps.get(visit, 0.0))

    def stood_still(self, seconds: float) -> None:
        """Note that the compute waited since the last visit."""
        if self._last is not None:
            self._last = (self._last[0], self._last[1] + seconds)

    def _issue(self, pinned: Set[int], layer: int, now: float, until_s: float) -> None:
        """Issue what begins until then; of a batch, all that is left of it."""
        link, batch = self._link, None
        while True:
            key, before = link.head(), batch
            if key is None:
                return
            batch = link.batch_of_head()
            if link.free_s(now) > until_s and (batch is None or batch != before):
                return
            cache = self._caches[key // self._num_experts]
            level = self._prefetches.level_of(key)
            if key in cache.resident:
                link.withdraw(key)
            elif cache.make_room(cache.size_of(key, level), pinned, layer, key):
                cache.reserve(key, level)
                link.issue(transfer_of(cache, key, level))
            else:
                return

    def settle(self, keys: Sequence[int]) -> None:
        """Make arrived keys resident."""
        for key in keys:
            self._caches[key // self._num_experts].land(key)

    def cancel(self, due: int, wanted: Set[int]) -> None:
        """Drop the prefetches of events up to `due`, also issued ones that have not begun."""
        self._link.cancel_due(due)
        for key in self._link.withdraw_issued(due, wanted):
            self._caches[key // self._num_experts].withdraw(key)


def bring(cache: PlacedCache, link: WallLink, places: Sequence[tuple[int, int]]) -> None:
    """Move keys into their slots, at the best level, and wait for all of them."""
    # A pass that broke off may have left kernels behind that read these slots.
    link.launched()
    for key, slot in places:
        drops = cache.take_dropped() if cache.slots else ()
        link.move(Transfer(key, slot, cache.size_of(key), drops=drops))
    if places:
        link.wait_for({key for key, _ in places}, len(places))


def time_load(cache: PlacedCache, link: WallLink, count: int) -> float:
    """Return the median seconds of loading `count` experts of the first layer together.

    Where fewer fit into the cache, as many as do, and their time for each. What is resident is
    loaded once more to where it lies.
    """
    size = cache.size_of(0)
    fits = max(1, min(count, len(cache.slots) or cache.capacity_bytes // size))
    seconds, moved = [], 0
    for _ in range(TRIALS):
        places = list(cache.slots.items())[:fits]
        if not places:
            places = list(enumerate(cache.trial_slots(fits)))
        moved = sum(cache.size_of(key) for key, _ in places)
        start_s = time.perf_counter()
        bring(cache, link, places)
        seconds.append(time.perf_counter() - start_s)
    return statistics.median(seconds) * count * size / moved

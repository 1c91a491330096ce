"""Transfers that no pass counts: of a cache that is warmed, and those that are only timed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

from lm_eval_moecache.engine.wall.link import WallLink
from lm_eval_moecache.engine.wall.slots import PlacedCache
from lm_eval_moecache.engine.wall.worker import Transfer

TRIALS = 3


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

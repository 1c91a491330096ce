"""Transfers that are only timed: into an empty cache, which stays empty."""

from __future__ import annotations

import statistics
import time

from lm_eval_moecache.engine.wall.link import WallLink
from lm_eval_moecache.engine.wall.slots import PlacedCache
from lm_eval_moecache.engine.wall.worker import Transfer

TRIALS = 3


def time_load(cache: PlacedCache, link: WallLink, count: int) -> float:
    """Return the median seconds of loading `count` experts of the first layer together.

    Where fewer fit into the cache, as many as do, and their time for each.
    """
    assert not cache.slots, "tried with experts in the cache"
    size = cache.size_of(0)
    fits = max(1, min(count, cache.capacity_bytes // size))
    seconds = []
    for _ in range(TRIALS):
        start_s = time.perf_counter()
        for key, slot in enumerate(cache.trial_slots(fits)):
            link.move(Transfer(key, slot, size))
        link.wait_for(set(range(fits)), fits)
        seconds.append(time.perf_counter() - start_s)
    return statistics.median(seconds) * count / fits

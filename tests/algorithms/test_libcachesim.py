"""The textbook rules against libCacheSim, an independent implementation.

The traces have one layer and one expert an event, so that an event is one request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from lm_eval_moecache.records.arrays import IntArray
from tests.engine.traces import decode_trace, misses

THEIRS: Mapping[str, str] = {
    "arc": "ARC",
    "clock": "Clock",
    "fifo": "FIFO",
    "lru": "LRU",
    "s3_fifo": "S3FIFO",
    "sieve": "Sieve",
    "slru": "SLRU",
    "two_q": "TwoQ",
}
"""Our name -> libCacheSim's. Its LFU forgets evicted keys' counts; its W-TinyLFU uses a sketch."""


def plain_trace(num_experts: int, length: int, seed: int) -> IntArray:
    """Draw requests of uneven popularity; the favourites differ in each fifth."""
    rng = np.random.default_rng(seed)
    shares = 1 / np.arange(1, num_experts + 1) ** 0.9
    drawn = rng.choice(num_experts, length, p=shares / shares.sum())
    return np.asarray((drawn + np.arange(length) // (length // 5) * 7) % num_experts)


def their_misses(libcachesim: Any, name: str, trace: IntArray, size: int) -> int:
    cache = getattr(libcachesim, name)(cache_size=size)
    requests = (libcachesim.Request(obj_id=key + 1, obj_size=1) for key in trace.tolist())
    return sum(not cache.get(request) for request in requests)


@pytest.mark.parametrize("name", THEIRS)
@pytest.mark.parametrize(("num_experts", "size"), [(200, 52), (128, 40), (64, 24)])
def test_a_textbook_rule_misses_as_often_as_libcachesims(
    name: str, num_experts: int, size: int
) -> None:
    libcachesim = pytest.importorskip("libcachesim", reason="no wheel of it for this platform")
    trace = plain_trace(num_experts, 4000, seed=size)
    our_count = misses(decode_trace(trace[:, np.newaxis, np.newaxis], num_experts), name, size)
    their_count = their_misses(libcachesim, THEIRS[name], trace, size)
    assert our_count == their_count, (
        f"{name} misses {our_count} times, libCacheSim's {THEIRS[name]} {their_count}"
    )

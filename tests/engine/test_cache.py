"""The caches' accounting that no event shows: lifetimes, peaks, invalid victims."""

from __future__ import annotations

import pytest

from lm_eval_moecache.engine.kernel import cache
from lm_eval_moecache.engine.kernel.link import hint, reserve
from lm_eval_moecache.records.errors import AlgorithmError
from tests.engine.scripted import OldestFirst, decode, fill, make_engine


def test_a_victim_that_is_pinned_is_named_with_its_number() -> None:
    class Wrong(OldestFirst):
        def victim(self, pinned: object, layer: int) -> int | None:
            return 0

    engine = make_engine(capacity=1, eviction=Wrong)
    with pytest.raises(AlgorithmError, match="pinned key 0"):
        decode(engine, [0, 1])


def test_lifetime_counts_tokens_between_arrival_and_eviction() -> None:
    engine = make_engine(capacity=1)
    run = engine.memory.run
    run.tokens = 7
    fill(engine, [0])
    run.tokens += 2
    assert cache.make_room(run, 1, 100, -1)
    assert engine.pools[0]["lifetime"] == 2


def test_a_reset_evicts_what_is_resident_and_keeps_the_books_and_the_peak() -> None:
    engine = make_engine(capacity=3)
    fill(engine, [0])
    hint(engine.memory.run, 1, 0, 0, 0, 0.0, -1)
    assert reserve(engine.memory.run, 1, -1)
    fill(engine, [])
    (pool,) = engine.pools
    assert (pool.resident, list(pool.arriving), pool["evictions"]) == ({}, [1], 1)
    assert (pool["peak"], pool["used"]) == (200, 100)
    pool.check_integrity()

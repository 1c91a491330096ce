"""The caches' accounting that no event shows: lifetimes, peaks, invalid victims."""

from __future__ import annotations

import pytest

from lm_eval_moecache.engine import core
from tests.engine.scripted import OldestFirst, decode, make_engine


def test_a_victim_that_is_pinned_is_a_bug_with_its_number() -> None:
    class Wrong(OldestFirst):
        def victim(self, pinned: object, layer: int) -> int | None:
            return 0

    engine = make_engine(capacity=1, eviction=Wrong)
    with pytest.raises(AssertionError, match="pinned key 0"):
        decode(engine, [0, 1])


def test_lifetime_counts_tokens_between_arrival_and_eviction() -> None:
    engine = make_engine(capacity=1)
    core.begin_pass(engine.state, 0, 7)
    core.fill(engine.state, [0])
    core.begin_pass(engine.state, 1, 1)
    core.begin_pass(engine.state, 2, 1)
    assert core.make_room(engine.state, None, 1, 100, 0, -1, 0)  # type: ignore[arg-type]
    assert engine.pools[0].lifetime_tokens == 2


def test_a_reset_evicts_what_is_resident_and_keeps_the_books_and_the_peak() -> None:
    engine = make_engine(capacity=3)
    core.fill(engine.state, [0])
    core.submit_keys(engine.state, core.Keys([1], 0, 1), [0], 0, 0, 0.0, -1)
    core.reserve(engine.state, 1)
    core.reset(engine.state, [])
    (pool,) = engine.pools
    assert (pool.resident, list(pool.arriving), pool.evictions) == ({}, [1], 1)
    assert (pool.peak_bytes, pool.used_bytes) == (200, 100)
    pool.check_integrity()

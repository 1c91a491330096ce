"""The cache's accounting that no event shows: sizes, lifetimes, peaks, invalid victims."""

from __future__ import annotations

import pytest

from lm_eval_moecache.engine.cache import ExpertCache
from lm_eval_moecache.records.geometry import Geometry
from tests.engine.scripted import OldestFirst, make_geometry


def make_cache(slots: int = 2, geometry: Geometry | None = None) -> ExpertCache:
    geometry = geometry or make_geometry()
    return ExpertCache(slots * 100, OldestFirst(geometry), geometry)


def test_an_overfull_cache_and_a_victim_that_is_pinned_are_bugs_with_their_numbers() -> None:
    class Wrong(OldestFirst):
        def victim(self, pinned: object, layer: int) -> int | None:
            return 0

    geometry = make_geometry()
    cache = ExpertCache(100, Wrong(geometry), geometry)
    cache.insert(0)
    with pytest.raises(AssertionError, match="pinned key 0"):
        cache.make_room(100, {0}, 0)
    with pytest.raises(AssertionError, match="200 bytes in a cache of 100"):
        cache.insert(1)


def test_lifetime_counts_tokens_between_arrival_and_eviction() -> None:
    cache = make_cache(1)
    cache.begin_pass(0, 7)
    cache.insert(0)
    cache.begin_pass(1, 1)
    cache.begin_pass(2, 1)
    assert cache.make_room(100, frozenset(), 0)
    assert cache.lifetime_tokens == 2


def test_clearing_evicts_what_is_resident_and_keeps_the_books_and_the_peak() -> None:
    cache = make_cache(3)
    cache.insert(0)
    cache.reserve(1)
    cache.clear()
    assert (cache.resident, list(cache.arriving), cache.evictions) == ({}, [1], 1)
    assert (cache.peak_bytes, cache.used_bytes) == (200, 100)
    cache.check_integrity()

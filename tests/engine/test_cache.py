"""The cache's books: bytes, loads, evictions, lifetimes and collisions."""

from __future__ import annotations

import pytest

from lm_eval_moecache.engine.cache import ExpertCache
from lm_eval_moecache.records.geometry import Geometry
from tests.engine.scripted import TWO_LEVELS, OldestFirst, make_geometry


def make_cache(slots: int = 2, geometry: Geometry | None = None) -> ExpertCache:
    geometry = geometry or make_geometry()
    return ExpertCache(slots * 100, OldestFirst(geometry), geometry)


def test_room_is_made_only_when_bytes_are_short() -> None:
    cache = make_cache()
    cache.insert(0)
    assert cache.make_room(100, frozenset(), 0)
    assert list(cache.resident) == [0]
    cache.insert(1)
    assert cache.make_room(100, frozenset(), 0)
    assert list(cache.resident) == [1]
    cache.check_integrity()


def test_pinned_and_arriving_experts_stay() -> None:
    cache = make_cache()
    cache.insert(0)
    cache.reserve(1)
    assert not cache.make_room(100, {0}, 0)
    assert list(cache.resident) == [0]
    assert cache.make_room(100, frozenset(), 0)
    assert list(cache.arriving) == [1]
    cache.check_integrity()


def test_an_arriving_expert_takes_its_bytes_and_is_not_usable_before_it_lands() -> None:
    cache = make_cache()
    cache.reserve(3)
    assert (cache.used_bytes, 3 in cache.resident) == (100, False)
    cache.land(3)
    assert (cache.used_bytes, 3 in cache.resident, cache.unused_prefetches) == (100, True, {3})


def test_experts_of_different_sizes_push_out_as_many_as_they_need() -> None:
    geometry = make_geometry(2, expert_bytes=((100,), (250,)))
    cache = ExpertCache(300, OldestFirst(geometry), geometry)
    for key in (0, 1, 2):
        cache.insert(key)
    assert cache.make_room(cache.size_of(4), frozenset(), 1)
    assert cache.used_bytes == 0
    cache.insert(4)
    assert cache.used_bytes == 250
    cache.check_integrity()


def test_a_level_of_lower_precision_takes_fewer_bytes() -> None:
    geometry = make_geometry(1, **TWO_LEVELS)
    cache = ExpertCache(125, OldestFirst(geometry), geometry)
    cache.insert(0, level=1)
    cache.insert(1)
    assert cache.used_bytes == 125
    assert cache.resident == {0: 1, 1: 0}
    cache.check_integrity()


def test_overfilling_is_a_bug_with_its_numbers() -> None:
    cache = make_cache(1)
    cache.insert(0)
    with pytest.raises(AssertionError, match="200 bytes in a cache of 100"):
        cache.insert(1)


def test_a_victim_that_is_pinned_is_a_bug() -> None:
    class Wrong(OldestFirst):
        def victim(self, pinned: object, layer: int) -> int | None:
            return 0

    geometry = make_geometry()
    cache = ExpertCache(100, Wrong(geometry), geometry)
    cache.insert(0)
    with pytest.raises(AssertionError, match="pinned key 0"):
        cache.make_room(100, {0}, 0)


def test_lifetime_counts_tokens_between_arrival_and_eviction() -> None:
    cache = make_cache(1)
    cache.begin_pass(0, 7)
    cache.insert(0)
    cache.begin_pass(1, 1)
    cache.begin_pass(2, 1)
    assert cache.make_room(100, frozenset(), 0)
    assert cache.lifetime_tokens == 2


def test_an_eviction_counts_as_collision_only_in_its_own_pass() -> None:
    cache = make_cache(1)
    cache.begin_pass(0, 1)
    cache.insert(0)
    cache.make_room(100, frozenset(), 0)
    assert cache.count_evicted_in_this_pass([0, 1]) == 1
    cache.begin_pass(1, 1)
    assert cache.count_evicted_in_this_pass([0, 1]) == 0


def test_clearing_evicts_what_is_resident_and_keeps_the_books() -> None:
    cache = make_cache(3)
    cache.insert(0)
    cache.reserve(1)
    cache.clear()
    assert (cache.resident, list(cache.arriving), cache.evictions) == ({}, [1], 1)
    cache.check_integrity()


def test_the_peak_is_the_most_bytes_ever_held() -> None:
    cache = make_cache(3)
    cache.insert(0)
    cache.reserve(1)
    cache.clear()
    assert (cache.peak_bytes, cache.used_bytes) == (200, 100)

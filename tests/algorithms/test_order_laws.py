"""Laws that hold between evictions: Belady's bound, LRU's inclusion, FIFO's anomaly."""

from __future__ import annotations

import numpy as np
import pytest

from lm_eval_moecache.algorithms.eviction.base import EvictionAlgorithm
from lm_eval_moecache.algorithms.registry import algorithm_names, find_algorithm
from lm_eval_moecache.records.event import DECODE, Event
from lm_eval_moecache.testing.streams import Pass, StreamFuture, make_geometry

GEOMETRY = make_geometry(num_layers=2, num_experts=5, top_k=2)


def decode_stream(seed: int, passes: int = 40) -> list[Pass]:
    """Single tokens whose experts are drawn with unequal probabilities."""
    rng = np.random.default_rng(seed)
    shares = rng.dirichlet(np.ones(GEOMETRY.num_experts), size=GEOMETRY.num_layers)
    stream = []
    for index in range(passes):
        events = []
        for layer in range(GEOMETRY.num_layers):
            experts = rng.choice(5, size=(1, 2), replace=False, p=0.9 * shares[layer] + 0.02)
            keys = (experts[0] + layer * 5).tolist()
            weights = np.array([[0.6, 0.3]], dtype=np.float32)
            logits = rng.normal(size=(1, 5)).astype(np.float32)
            events.append(Event(index, layer, DECODE, 1, keys, experts, weights, logits))
        stream.append(events)
    return stream


def count_misses(eviction: EvictionAlgorithm, stream: list[Pass], size: int) -> int:
    """Serve a stream in a cache of `size` experts, at least one event's."""
    resident: set[int] = set()
    misses = 0
    for events in stream:
        eviction.on_pass(events[0].pass_index)
        for event in events:
            pinned = set(event.keys)
            for key in [k for k in event.keys if k not in resident]:
                misses += 1
                if len(resident) == size:
                    victim = eviction.victim(pinned, event.layer)
                    assert victim is not None
                    resident.remove(victim)
                    eviction.on_evict(victim)
                resident.add(key)
                eviction.on_insert(key, False)
            eviction.on_event(event)
    return misses


@pytest.mark.parametrize("name", algorithm_names("eviction"))
def test_nobody_beats_belady(name: str) -> None:
    for seed in range(6):
        stream = decode_stream(seed)
        for size in (2, 4, 7):
            bound = find_algorithm("eviction", "belady")(GEOMETRY)
            bound.prepare(StreamFuture(GEOMETRY, stream))
            other = find_algorithm("eviction", name)(GEOMETRY, seed=seed)
            if other.is_offline:
                other.prepare(StreamFuture(GEOMETRY, stream))
            assert count_misses(bound, stream, size) <= count_misses(other, stream, size)


def test_lru_misses_never_rise_with_capacity() -> None:
    for seed in range(12):
        stream = decode_stream(seed)
        misses = [
            count_misses(find_algorithm("eviction", "lru")(GEOMETRY), stream, size)
            for size in range(2, 11)
        ]
        assert misses == sorted(misses, reverse=True)


@pytest.mark.parametrize(("name", "expected"), [("fifo", [9, 10]), ("lru", [10, 8])])
def test_fifo_has_beladys_anomaly_where_lru_has_not(name: str, expected: list[int]) -> None:
    geometry = make_geometry(num_layers=1, num_experts=6, top_k=1)
    classic = [1, 2, 3, 4, 1, 2, 5, 1, 2, 3, 4, 5]
    stream = [[Event(i, 0, DECODE, 1, [key])] for i, key in enumerate(classic)]
    misses = [
        count_misses(find_algorithm("eviction", name)(geometry), stream, size) for size in (3, 4)
    ]
    assert misses == expected

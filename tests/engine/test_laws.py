"""A slow, obvious oracle of the path without prefetch. Laws of all runs: tests/soak/shadow.py."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from lm_eval_moecache.records.event import PREFILL, Event
from tests.engine.scripted import OldestFirst, make_engine


@dataclass
class Counted:
    hits: int = 0
    misses: int = 0
    collisions: int = 0
    evictions: int = 0
    now: float = 0.0


def obvious(events: list[list[list[int]]], slots: int) -> list[Counted]:
    """Serve passes (layers of keys) from plain lists, first in, first out; times of `scripted`.

    A dense part takes 2 s, an expert 1 s, a transfer 5 s.
    """
    resident: list[int] = []
    now = 0.0
    counts = []
    for layers in events:
        count = Counted()
        evicted: list[int] = []
        for keys in layers:
            now += 2
            count.hits += len([key for key in keys if key in resident])
            missing = [key for key in keys if key not in resident]
            count.misses += len(missing)
            count.collisions += len([key for key in missing if key in evicted])
            waiting = list(keys)
            for key in missing:
                if len(resident) == slots:
                    free = [old for old in resident if old not in waiting]
                    if not free:
                        ready = [k for k in waiting if k in resident]
                        now += 1 * len(ready)
                        waiting = [k for k in waiting if k not in ready]
                        free = list(resident)
                    resident.remove(free[0])
                    evicted.append(free[0])
                    count.evictions += 1
                now += 5
                resident.append(key)
            now += 1 * len(waiting)
        count.now = now
        counts.append(count)
    return counts


keys_of_a_layer = st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True)


@settings(max_examples=100, deadline=None)
@given(
    passes=st.lists(st.lists(keys_of_a_layer, min_size=3, max_size=3), min_size=1, max_size=6),
    slots=st.integers(1, 12),
)
def test_without_prefetch_counts_and_times_are_those_of_the_obvious_way(
    passes: list[list[list[int]]], slots: int
) -> None:
    by_key = [[[4 * i + e for e in experts] for i, experts in enumerate(p)] for p in passes]
    engine = make_engine(capacity=slots)
    for layers, expected in zip(by_key, obvious(by_key, slots), strict=True):
        record = engine.begin_pass(PREFILL, 1)
        for layer, keys in enumerate(layers):
            engine.enter(layer, 1)
            engine.run(Event(record.index, layer, PREFILL, 1, list(keys)))
        engine.end_pass()
        engine.check_integrity()
        actual = Counted(
            record.hits, record.misses, record.collisions, record.evictions, record.end_s
        )
        assert actual == expected
    assert isinstance(engine.pools[0].eviction, OldestFirst)

"""Cached-first execution against hand calculations, on the machine of `scripted.py`."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm_eval_moecache.algorithms.miss.fetch_cached_first import FetchCachedFirst
from lm_eval_moecache.engine.virtual.clock import EXPERT_KERNELS, GATE_KERNELS
from tests.engine.scripted import Always, ScriptedPolicy, decode, make_engine, make_hardware


def cached_first() -> ScriptedPolicy:
    return ScriptedPolicy(miss=Always(FetchCachedFirst))


def test_the_resident_expert_runs_while_the_absent_one_is_loaded() -> None:
    engine = make_engine(cached_first())
    decode(engine, [0])  # dense 0-2, key 0 2-7, expert 7-8
    record = decode(engine, [0, 1])
    # dense 8-10; key 1 moves 10-15 while expert 0 runs 10-11: stall 11-15; expert 1 15-16.
    assert (record.end_s, record.stall_s, record.hits, record.misses) == (16.0, 4.0, 1, 1)


def test_where_nothing_is_resident_or_nothing_absent_it_is_plain_fetch() -> None:
    plain, reordered = make_engine(), make_engine(cached_first())
    for keys in ([0, 1], [1, 0], [2, 3]):
        assert decode(reordered, keys) == decode(plain, keys)


def test_a_split_event_launches_its_kernels_twice_and_predicts_before_it_runs() -> None:
    hardware = make_hardware(kernel_overhead_s=0.01)
    ends = []
    for policy in (ScriptedPolicy(), cached_first()):
        engine = make_engine(policy, hardware=hardware)
        decode(engine, [0])
        start_s = engine.clock.now
        ends.append(decode(engine, [0, 1], gates=1).end_s - start_s)
    # Plainly: the load of 5 s hides the gate; then two experts. Cached first: the gate and one
    # expert hide in it, and the other launches its kernels once more.
    assert ends[0] - ends[1] == pytest.approx(1.0)
    assert GATE_KERNELS * 0.01 + 1.0 + EXPERT_KERNELS * 0.01 < 5.0


def test_an_event_larger_than_the_cache_still_runs_each_expert_once() -> None:
    engine = make_engine(cached_first(), capacity=2)
    decode(engine, [0, 1])
    start_s = engine.clock.now
    record = decode(engine, [0, 2, 3])
    # dense 2 s; key 0 stays pinned: key 2 moves 5 s into the place of 1; no room for 3: both run
    # 2 s in a wave; key 3 moves 5 s, nothing is left to run meanwhile; it runs 1 s.
    assert record.end_s - start_s == 2 + 5 + 2 + 5 + 1


@given(
    events=st.lists(
        st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True), min_size=1, max_size=8
    ),
    capacity=st.integers(1, 4),
)
def test_it_counts_and_moves_as_fetch_does_and_is_never_slower(
    events: list[list[int]], capacity: int
) -> None:
    plain = make_engine(capacity=capacity)
    reordered = make_engine(cached_first(), capacity=capacity)
    for keys in events:
        a, b = decode(plain, keys), decode(reordered, keys)
        times = {"start_s": 0.0, "end_s": 0.0, "stall_s": 0.0}
        assert dataclasses.replace(a, **times) == dataclasses.replace(b, **times)
        assert b.duration_s <= a.duration_s + 1e-9

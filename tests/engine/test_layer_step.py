"""A few events worked by hand, to read; `test_oracle.py` compares every rule of time.

The machine of `scripted.py`: the dense part of a layer takes 2 s, an expert 1 s, a transfer 5 s
(1 s latency + 100 bytes / 25 bytes/s). Four experts a layer: keys 0-3, 4-7, 8-11.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.engine.scripted import (
    Always,
    OldestFirst,
    ScriptedPolicy,
    decode,
    make_engine,
    make_geometry,
    prefetching,
)


def test_a_prefetch_in_flight_is_late_and_only_its_rest_is_awaited() -> None:
    engine = make_engine(prefetching({(0, 0): [4]}))
    record = decode(engine, [0, 1], [4])
    # dense 0-2; keys 0, 1 move 2-12; experts 12-14; key 4 moves 12-17 behind them.
    # Next layer: dense 14-16; key 4 is in flight: stall 16-17; expert 17-18.
    assert (record.end_s, record.stall_s) == (18.0, 10.0 + 1.0)
    assert (record.requests, record.late, record.misses) == (3, 1, 2)
    assert record.prefetch_hits == 0
    assert (record.bytes_moved, record.link_busy_s) == (300, 15.0)


def test_a_prefetch_that_arrived_in_time_is_a_hit_counted_apart() -> None:
    engine = make_engine(prefetching({(1, 0): [4]}))
    decode(engine, [0])  # dense 0-2; key 0 moves 2-7; expert 7-8
    first = decode(engine, [0], [5])
    # dense 8-10; hit; key 4, issued at 10, moves 10-15; expert 10-11; dense 11-13;
    # key 5 moves 15-20 behind the transfer in flight; expert 20-21. Key 4 was not needed.
    assert (first.end_s, first.stall_s, first.misses, first.late) == (21.0, 7.0, 1, 0)
    second = decode(engine, [0], [4])
    # dense 21-23; expert 23-24; dense 24-26; key 4 is resident; expert 26-27.
    assert (second.end_s, second.stall_s) == (27.0, 0.0)
    assert (second.requests, second.hits, second.prefetch_hits) == (2, 2, 1)
    third = decode(engine, [0], [4])
    assert (third.hits, third.prefetch_hits) == (2, 0)  # one arrival is one prefetch hit


def test_a_demand_overtakes_queued_prefetches_but_not_the_transfer_in_flight() -> None:
    engine = make_engine(prefetching({(0, 0): [8, 9]}), capacity=8)
    record = decode(engine, [0], [4], [8, 9])
    # layer 0: dense 0-2; key 0 moves 2-7; expert 7-8; key 8 moves 7-12, 9 waits.
    # layer 1: dense 8-10; key 4 waits for 8, overtakes 9: 12-17; expert 17-18; key 9 moves 17-22.
    # layer 2: dense 18-20; 8 has arrived (hit), 9 is in flight until 22 (late); experts 22-24.
    assert record.end_s == 24.0
    assert record.stall_s == 5.0 + 7.0 + 2.0
    assert (record.requests, record.hits, record.late, record.misses) == (4, 1, 1, 2)
    assert record.prefetch_hits == 1


def test_an_eviction_learns_between_waves_what_each_has_executed() -> None:
    executed: list[tuple[int, list[int]]] = []

    class Logged(OldestFirst):
        def on_executed(self, layer: int, keys: Sequence[int]) -> None:
            executed.append((layer, list(keys)))

    engine = make_engine(ScriptedPolicy(eviction=Always(Logged)), 2, make_geometry(2, 8, 5))
    decode(engine, [3, 1, 0, 2, 4], [8])
    # Room for two at a time: 3 and 1, then 0 and 2; after the last wave `on_event` tells of all.
    assert executed == [(0, [3, 1]), (0, [0, 2])]
    decode(engine, [], [9, 10, 11])
    assert executed[2:] == [(1, [9, 10])]


def test_the_time_of_loads_is_told_and_nothing_moves() -> None:
    engine = make_engine()
    assert engine.time_load(3) == 15.0
    record = decode(engine, [0, 1])
    assert (record.end_s, record.bytes_moved) == (14.0, 200)


def test_a_victim_that_is_pinned_is_a_bug_with_its_number() -> None:
    class Wrong(OldestFirst):
        def victim(self, pinned: object, layer: int) -> int | None:
            return 0

    engine = make_engine(ScriptedPolicy(eviction=Always(Wrong)), 1)
    with pytest.raises(AssertionError, match="pinned key 0"):
        decode(engine, [0, 1])

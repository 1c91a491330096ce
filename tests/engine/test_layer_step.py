"""Events against hand calculations.

The machine of `scripted.py`: the dense part of a layer takes 2 s, an expert 1 s, a transfer 5 s
(1 s latency + 100 bytes / 25 bytes/s). Four experts a layer: keys 0-3, 4-7, 8-11.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np

from lm_eval_moecache.algorithms.miss.lossless import FetchCachedFirst
from lm_eval_moecache.records.artifact import DATA_AWARE
from lm_eval_moecache.records.event import DECODE, PASS_START, Event
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.testing.streams import artifact_for
from tests.engine.scripted import (
    FixedPrefetch,
    Script,
    decode,
    expect,
    make_engine,
    make_geometry,
    make_hardware,
    run_layer,
)


def test_a_prefetch_in_flight_is_late_and_only_its_rest_is_awaited() -> None:
    engine = make_engine({(0, 0): [4]})
    # dense 0-2; keys 0, 1 move 2-12; experts 12-14; key 4 moves 12-17 behind them.
    # Next layer: dense 14-16; key 4 is in flight: stall 16-17; expert 17-18.
    decode(engine, [0, 1], [4], says="end_s=18 stall_s=10+1 requests=3 late=1 misses=2")
    expect(engine.ledger.passes[-1], "prefetch_hits=0 bytes_moved=300 link_busy_s=15")


def test_a_prefetch_that_arrived_in_time_is_a_hit_counted_apart() -> None:
    engine = make_engine({(1, 0): [4]})
    decode(engine, [0])  # dense 0-2; key 0 moves 2-7; expert 7-8
    # dense 8-10; hit; key 4, issued at 10, moves 10-15; expert 10-11; dense 11-13;
    # key 5 moves 15-20 behind the transfer in flight; expert 20-21. Key 4 was not needed.
    decode(engine, [0], [5], says="end_s=21 stall_s=7 misses=1 late=0")
    # dense 21-23; expert 23-24; dense 24-26; key 4 is resident; expert 26-27.
    decode(engine, [0], [4], says="end_s=27 stall_s=0 requests=2 hits=2 prefetch_hits=1")
    # One arrival is one prefetch hit.
    decode(engine, [0], [4], says="hits=2 prefetch_hits=0")


def test_a_queued_prefetch_that_is_demanded_is_late_and_moves_as_a_demand() -> None:
    engine = make_engine({(0, 0): [4, 5]}, 8)
    # dense 0-2; key 0 moves 2-7; expert 7-8; key 4 moves 7-12, key 5 waits in the queue.
    # dense 8-10; event 6, 5: 6 is a miss, 5 is late. 4 is in flight until 12, then 6 (demanded
    # first) 12-17, then 5 17-22: stall 12; experts 22-24.
    decode(engine, [0], [6, 5], says="end_s=24 stall_s=5+12 requests=3 late=1 misses=2")
    assert engine.ledger.passes[-1].bytes_moved == 400 and not engine.memory.run.queued


def test_a_demand_overtakes_queued_prefetches_but_not_the_transfer_in_flight() -> None:
    engine = make_engine({(0, 0): [8, 9]}, 8)
    # layer 0: dense 0-2; key 0 moves 2-7; expert 7-8; key 8 moves 7-12, 9 waits.
    # layer 1: dense 8-10; key 4 waits for 8, overtakes 9: 12-17; expert 17-18; key 9 moves 17-22.
    # layer 2: dense 18-20; 8 has arrived (hit), 9 is in flight until 22 (late); experts 22-24.
    decode(engine, [0], [4], [8, 9], says="end_s=24 stall_s=5+7+2")
    expect(engine.ledger.passes[-1], "requests=4 hits=1 late=1 misses=2 prefetch_hits=1")


def test_a_demand_goes_before_a_prefetch_that_could_start_at_its_instant() -> None:
    # The link is free since 12, as the dense part ends: layer 1's takes 4 s here.
    engine = make_engine({(0, 0): [8, 9]}, 8, make_geometry(dense_bytes=(200, 400, 200)))
    # dense 0-2; key 0 2-7; expert 7-8; key 8 moves 7-12. dense 8-12; key 4 12-17; expert 17-18.
    # 9 moves 17-22; dense 18-20; 8 is a hit, 9 late by 2 s; experts 22-24.
    decode(engine, [0], [4], [8, 9], says="end_s=24 stall_s=5+5+2 prefetch_hits=1")
    # The prediction is ready at 8, as the dense part ends: layer 1's takes no time here.
    prefetch = partial(FixedPrefetch, script={(0, 0): [8]}, after_layer=True)
    geometry = make_geometry(dense_bytes=(200, 0, 200))
    engine = make_engine(None, 8, geometry, prefetch=prefetch)
    # dense 0-2; key 0 2-7; expert 7-8; key 4 8-13; expert 13-14; 8 moves 13-18, late by 2 s.
    decode(engine, [0], [4], [8], says="end_s=19 stall_s=5+5+2 late=1")


def test_prefetches_that_are_no_longer_of_use_are_cancelled_before_they_move() -> None:
    engine = make_engine({(0, 0): [4, 5, 6, 8]}, 8)
    # dense 0-2; key 0 2-7; expert 7-8; key 4 moves 7-12. dense 8-10; key 7 12-17; expert 17-18.
    # 5 and 6 were for the past event; 8 is for the next layer and starts at 17.
    decode(engine, [0], [7], says="end_s=18 bytes_moved=400")
    assert engine.memory.run.inflight == 8
    assert engine.memory.slots["due"].max() < 0


def test_a_prefetch_evicts_when_it_starts_and_not_what_is_being_executed() -> None:
    engine = make_engine({(0, 0): [4]}, 2)
    engine.begin_pass(DECODE, 1)
    run_layer(engine, [[0, 1]])
    # Keys 0, 1 fill the cache and execute 12-14: key 4 finds no room until 14.
    assert (list(engine.pools[0].resident), engine.memory.run.inflight) == ([0, 1], -1)
    run_layer(engine, [[0, -1]], layer=1)
    engine.end_pass()
    # Key 4 starts at 14, with the dense part 14-16, and evicts key 0, the oldest. It lands at 19:
    # stall 3; expert 19-20.
    assert list(engine.pools[0].resident) == [1, 4]
    expect(engine.ledger.passes[-1], "end_s=20 stall_s=10+3 evictions=1 late=1")
    engine.check_integrity()


def test_a_prefetch_for_an_earlier_layer_is_meant_for_the_next_pass() -> None:
    engine = make_engine({(0, 1): [1]}, 8)
    decode(engine, [0], [4])
    # layer 0 as before 0-8; layer 1: dense 8-10; key 4 10-15; expert 15-16; key 1 moves 15-20.
    # dense 16-18; key 1 is late until 20; expert 20-21.
    decode(engine, [1], says="end_s=21 stall_s=2 late=1")


def test_a_flight_that_lands_executes_and_leaves_in_a_wave_is_not_fetched_again() -> None:
    engine, spans = make_engine({(0, 0): [5]}, 1), list[tuple[Any, ...]]()
    engine.callbacks.record_spans(lambda *span: spans.append(span))
    # layer 0: dense 0-2; key 0 2-7; expert 7-8; key 5 moves 8-13 in its place. Dense 8-10.
    # layer 1: 4 is a miss, 5 is late and fills the cache at 13 (stall 3); its wave 13-14 makes
    # room for key 4: 14-19 (stall 5); expert 19-20.
    decode(engine, [0], [4, 5], says="end_s=20 stall_s=5+3+5 late=1 misses=2 bytes_moved=300")
    # Each wave is of one expert.
    waves = [span for span in spans if span[0] == "experts"]
    assert waves == [("experts", 7, 8, 0, 1), ("experts", 13, 14, 1, 1), ("experts", 19, 20, 1, 1)]


def test_an_eviction_learns_between_waves_what_each_has_executed() -> None:
    engine = make_engine(None, 2, make_geometry(2, 8, 5))
    decode(engine, [3, 1, 0, 2, 4], [8])
    # Room for two at a time: 3 and 1, then 0 and 2; after the last wave `on_event` tells of all.
    decode(engine, [], [9, 10, 11])
    waves = [("executed", 0, [3, 1]), ("executed", 0, [0, 2]), ("executed", 1, [9, 10])]
    assert engine.eviction.told("executed") == waves


def test_every_wait_for_the_link_is_paid_for_and_the_link_goes_on_meanwhile() -> None:
    hardware = make_hardware(wait_overhead_s=0.5)
    engine = make_engine({(0, 0): [5]}, hardware=hardware)
    # Layer 0: dense 0-2, key 0 moves 2-7, half a second more, expert 7.5-8.5; key 5 moves 7-12.
    # Layer 1: dense until 10.5; key 4 after key 5: 12-17; expert 17.5-18.5.
    # Layer 2: dense until 20.5; key 8 moves until 25.5; expert 26-27.
    # The half second per wait is not stall.
    decode(engine, [0], [4], [8], says="end_s=27 stall_s=5+6.5+5")
    decode(engine, [0], [4], [8], says="hits=3 duration_s=9")
    # Waves pay for each of their waits: dense 0-2; 0 and 1 move 2-12; they run 12.5-14.5; 2 moves
    # 14.5-19.5 and runs 20-21.
    waves = make_engine(None, 2, make_geometry(top_k=3), hardware)
    decode(waves, [0, 1, 2], says="end_s=21 stall_s=15")


def test_the_predictor_costs_time_where_the_compute_does_not_wait_anyway() -> None:
    hardware = make_hardware(kernel_overhead_s=0.125)
    engine = make_engine(hardware=hardware, prefetch=partial(FixedPrefetch, script={}, depth=1))
    # dense 2 + 30/8 = 5.75; key 0 moves 5.75-10.75, which hides the gate's 3/8 s;
    # expert 1 + 15/8 = 2.875.
    decode(engine, [0], says="end_s=13.625 stall_s=5")
    # dense 5.75, gate 0.375, expert 2.875: the predictor takes time, which is not stall.
    decode(engine, [0], says="duration_s=9 stall_s=0")


def test_a_delayed_prefetch_is_hidden_by_the_next_layer_s_attention_alone() -> None:
    """SP-MoE section 3.3, on AdapMoE: the prefetch starts after the layer that predicted it.

    Four experts of layer 0 take 4 s, the dense part of layer 1 takes 2 s, a transfer 5 s.
    """
    for is_delayed, says in (
        # dense 26-28; experts 28-32, while 4 moves from 28; dense 32-34; arrived at 33: 34-35.
        (False, "end_s=35 stall_s=0 late=0 misses=0"),
        # Delayed, it moves 32-37: stall 3 s, expert 37-38.
        (True, "end_s=38 stall_s=3 late=1 misses=0"),
    ):
        prefetch = partial(FixedPrefetch, script={(1, 0): [4]}, after_layer=is_delayed)
        engine = make_engine(None, 12, make_geometry(top_k=4), prefetch=prefetch)
        # dense 0-2; four transfers 2-22; experts 22-26.
        decode(engine, [0, 1, 2, 3], says="end_s=26")
        decode(engine, [0, 1, 2, 3], [4], says=says)


def test_the_time_of_loads_is_told_and_nothing_moves() -> None:
    engine = make_engine()
    assert engine.time_load(3) == 15.0
    decode(engine, [0, 1], says="end_s=14 bytes_moved=200")


# --- cached-first execution ---


def test_the_resident_expert_runs_while_the_absent_one_is_loaded() -> None:
    engine = make_engine(miss=FetchCachedFirst)
    decode(engine, [0])  # dense 0-2, key 0 2-7, expert 7-8
    # dense 8-10; key 1 moves 10-15 while expert 0 runs 10-11: stall 11-15; expert 1 15-16.
    decode(engine, [0, 1], says="end_s=16 stall_s=4 hits=1 misses=1")


# --- prefetching for a whole pass before it begins ---


class Foreseeing(FixedPrefetch):
    """Proposes a script's keys at (pass, PASS_START); its network has 100 bytes, read in 1 s."""

    predicts_pass: ClassVar[bool] = True

    def __init__(self, geometry: Geometry, script: Script) -> None:
        super().__init__(geometry, script)
        self.seen: list[tuple[int, int, int]] = []
        artifact = artifact_for(DATA_AWARE, geometry)
        arrays = {"all": np.zeros(100, dtype=np.uint8)}
        self.artifact = dataclasses.replace(artifact, arrays=arrays)

    def propose(self, event: Event) -> Sequence[int]:
        self.seen.append((event.pass_index, event.layer, len(event.experts)))
        return super().propose(event)


def test_a_pass_is_predicted_before_its_first_layer() -> None:
    script = {(0, PASS_START): (1, 5)}
    engine = make_engine(capacity=6, prefetch=partial(Foreseeing, script=script))
    # The network reads the tokens 0-1. Expert 1 moves 1-6: dense 1-3, stall 3 s, expert 6-7.
    # Expert 5 moves 6-11: dense 7-9, stall 2 s, expert 11-12. Expert 8 was not predicted:
    # dense 12-14, transfer 14-19, expert 19-20.
    decode(engine, [1], [5], [8], says="start_s=0 end_s=20 stall_s=10 late=2 misses=1")
    expect(engine.ledger.passes[-1], "predicted=2 predicted_right=2 predictable=2")

"""The virtual link by hand: one transfer at a time, lanes that share it, and FIFO."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from lm_eval_moecache.engine.kernel import lanes, link
from lm_eval_moecache.engine.replay import replay
from lm_eval_moecache.records.event import PASS_START
from lm_eval_moecache.records.memory import address_of
from lm_eval_moecache.trace.future import Future
from tests.engine import traces
from tests.engine.scripted import decode, make_engine, make_geometry, make_hardware
from tests.engine.traces import decode_trace

# --- prefetches of a batch ---


@pytest.mark.parametrize(
    ("between", "batches", "arrivals_s"),
    [
        # A transfer takes 1 s + 4 s; one that joins the batch before it only 4 s.
        ("nothing", (7, 7, 8), (5.0, 9.0, 14.0)),
        ("no batch", (-1, -1, -1), (5.0, 10.0, 15.0)),
        ("another batch", (7, 8, 7), (5.0, 10.0, 15.0)),
        ("a demand", (7, 7, 7), (5.0, 15.0, 19.0)),
        ("a pause", (7, 7, 7), (5.0, 11.0, 15.0)),
    ],
)
def test_a_batch_that_moves_without_a_gap_pays_one_latency(
    between: str, batches: Sequence[int], arrivals_s: Sequence[float]
) -> None:
    engine = make_engine(geometry=make_geometry(8, 1, 1), capacity=8)
    run, slots, landed = engine.memory.run, engine.memory.slots, []
    for key, batch in enumerate(batches, 1):
        link.hint(run, key, 0, 0, PASS_START, 0.0, batch)
    while (key := link.head(run)) >= 0:
        if key == 2 and between == "a demand":
            assert link.transfer(run, 0, 0, 0.0, False, -1) == 10.0
        elif key == 2 and between == "a pause":
            slots[key]["earliest_s"] = 6.0
        assert link.begin(run, key, max(slots[key]["earliest_s"], run.busy_until), -1)
        link.land(run)
        landed.append(run.busy_until)
    assert landed == [*arrivals_s]


# --- lanes, reads by projections, experts that run as they arrive ---


def arrivals(sizes: Sequence[float], num_lanes: int, **rates: float) -> list[float]:
    """Return when requests of so many bytes arrive."""
    run = make_engine().memory.run
    requests = np.zeros(3 * len(sizes))
    requests[: len(sizes)] = sizes
    run.requests, run.lanes = address_of(requests), num_lanes
    for name, rate in rates.items():
        setattr(run, name, rate)
    lanes.serve_requests(run, len(sizes))
    return list(requests[: len(sizes)])


def test_two_lanes_share_the_link_and_one_alone_gets_no_more_than_its_own() -> None:
    times_s = arrivals((60, 30, 30), 2, lane_rate=20, link_rate=30, latency_s=0.5)
    # After 0.5 s both move at 15 bytes/s. The second arrives at 2.5 s with 30 bytes of the first
    # left, which has 20 bytes/s for 0.5 s, the third's latency: 20 and 30 bytes left at 15 each.
    assert times_s == pytest.approx([0.5 + 2 + 0.5 + 20 / 15, 2.5, 2.5 + 0.5 + 20 / 15 + 10 / 20])


def test_two_reads_are_gate_and_up_together_then_down() -> None:
    """Two lanes of 1 byte/s, two experts of 3 bytes: gate and up of both, then down of both."""
    figures = {"link_lanes": 2, "link_lane_bytes_per_s": 1.0}
    hardware = replace(traces.HARDWARE, link_bytes_per_s=2.0, link_latency_s=0.0, **figures)
    geometry = make_geometry(expert_bytes=((3,),) * 3)
    for reads, expected in ((2, [2, 3]), (3, [1, 2, 3])):
        # Three equal reads an expert: two lanes serve the six in turn.
        engine = make_engine(None, 4, geometry, hardware, reads_per_expert=reads)
        now = engine.now
        decode(engine, [0, 1])
        assert engine.memory.run.busy_s == pytest.approx(3)
        arrived = engine.memory.scratch["arrivals"][: 2 * reads].reshape(2, reads)
        begun = arrived[0, 0] - expected[0]
        assert begun > now
        assert arrived - begun == pytest.approx(np.array([expected] * 2))


# --- link=fifo: in order of issue, nothing overtaken, nothing withdrawn ---


FREE = float("inf")
SECOND_EACH = make_hardware(
    **{"peak_flops": FREE, "memory_bytes_per_s": FREE, "layer_overhead_s": 0.5},
    **{"link_bytes_per_s": 1.0, "link_latency_s": 0.0},
)
"""One second to move an expert of one byte; the only other cost is 0.5 s a layer."""


def test_a_demand_waits_behind_what_was_asked_for_before_it() -> None:
    """Three layers of one expert, each predicted two layers ahead; a second a transfer.

    At 0.5 s layer 0 demands its expert (arrives at 1.5 s) and prefetches those of layers 1 and 2.
    Layer 1, at 2 s, needs its expert, whose transfer started at 1.5 s: it waits until 2.5 s.
    """
    trace = decode_trace(np.array([[[0], [1], [2]]]), 8)
    prefetch = {"prefetch": "oracle", "prefetch.horizon": 2}
    for order in ("fifo", "priority"):
        setting = traces.setting_for(trace, "100%", prefetch, hardware=SECOND_EACH, link=order)
        engine = replay(trace, setting, future=Future(trace), cache_reset="never")
        assert engine.now == pytest.approx(3.5)

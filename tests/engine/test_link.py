"""The virtual link by hand: one transfer at a time, lanes that share it, and FIFO."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

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

Queue = tuple[Any, Any]
"""A run, and the table of its experts' slots."""


def make_queue(num_layers: int = 8, num_experts: int = 1) -> Queue:
    """A transfer of 100 bytes takes 1 s + 4 s; there are eight keys, one a layer."""
    geometry = make_geometry(num_layers, num_experts, 1)
    engine = make_engine(geometry=geometry, capacity=8)
    _kept.append(engine)
    return engine.memory.run, engine.memory.slots


_kept: list[Any] = []
"""Engines whose memory is in use."""


def submit(queue: Queue, key: int, now: float = 0.0, first: int = 0, batch: int = -1) -> None:
    """Queue a prefetch for its layer's event after event `first`."""
    link.hint(queue[0], key, 0, first, PASS_START, now, batch)


def start(queue: Queue, now: float) -> tuple[int, float]:
    """Move the next prefetch; return its key and when it lands."""
    run, slots = queue
    key = link.head(run)
    assert link.begin(run, key, max(slots[key]["earliest_s"], now), -1)
    link.land(run)
    return key, run.busy_until


def test_the_earliest_due_prefetch_goes_first_then_the_order_of_submission() -> None:
    queue = make_queue(3, 4)
    for key in (8, 5, 4, 9):
        submit(queue, key)
    order = []
    while (key := link.head(queue[0])) >= 0:
        order.append(key)
        link.withdraw(queue[0], key)
    assert order == [5, 4, 8, 9]
    assert not link.is_active(queue[0])


def test_a_key_withdrawn_and_submitted_again_has_its_new_place() -> None:
    run, slots = queue = make_queue(2, 4)
    for key in (1, 2):
        submit(queue, key)
    link.withdraw(run, 1)
    submit(queue, 1, now=3.0, first=2)
    assert link.head(run) == 2
    link.cancel_due(run, 0)
    assert (link.head(run), slots[1]["earliest_s"]) == (1, 3.0)
    link.cancel_due(run, 7)  # events that were skipped
    assert link.head(run) == -1


def test_a_batch_that_moves_without_a_gap_pays_one_latency() -> None:
    queue = make_queue()
    for key, batch in ((1, 7), (2, 7), (3, 8)):
        submit(queue, key, batch=batch)
    # 1 + 4, then 4, then a batch of its own
    landed = [start(queue, queue[0].busy_until) for _ in range(3)]
    assert landed == [(1, 5.0), (2, 9.0), (3, 14.0)]
    assert queue[0].busy_s == 14.0


@pytest.mark.parametrize("gap", ["a demand between", "a pause", "another batch", "no batch"])
def test_whatever_comes_between_ends_a_batch(gap: str) -> None:
    run, slots = queue = make_queue()
    batch = -1 if gap == "no batch" else 7
    submit(queue, 1, batch=batch)
    submit(queue, 4, batch=batch)
    assert start(queue, 0.0) == (1, 5.0)
    if gap == "a demand between":
        assert link.transfer(run, 0, 0, 0.0, False, -1) == 10.0
    elif gap == "a pause":
        slots[4]["earliest_s"] = 10.0
    elif gap == "another batch":
        submit(queue, 2, batch=8)
        assert start(queue, 5.0) == (2, 10.0)
    before = 5.0 if gap == "no batch" else 10.0
    assert start(queue, run.busy_until) == (4, before + 5.0)


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
        now = engine.clock.now
        decode(engine, [0, 1])
        assert engine.link.busy_s == pytest.approx(3)
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
        assert engine.clock.now == pytest.approx(3.5)

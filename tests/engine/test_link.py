"""The virtual link by hand: one transfer at a time, lanes that share it, and FIFO."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lm_eval_moecache.engine import core
from lm_eval_moecache.engine.core.link import begin
from lm_eval_moecache.engine.replay import replay
from lm_eval_moecache.engine.virtual.costs import arrivals
from lm_eval_moecache.records.event import PASS_START
from lm_eval_moecache.trace.future import Future
from tests.engine import traces
from tests.engine.scripted import make_engine, make_geometry, make_hardware
from tests.engine.traces import decode_trace


def make_queue() -> core.State:
    """A transfer of 100 bytes takes 1 s + 4 s; there are eight keys, one a layer."""
    return make_engine(geometry=make_geometry(8, 1, 1), capacity=8).state


def submit(state: core.State, key: int, now: float = 0.0, first: int = 0, batch: int = -1) -> None:
    """Queue a prefetch of a layer's only expert for that layer's event after event `first`."""
    core.submit_keys(state, core.Keys([key], 0, 1), [0], first, PASS_START, now, batch)


def start(state: core.State, now: float) -> tuple[int, float]:
    """Move the next prefetch; return its key and when it lands."""
    key = core.head(state)
    assert begin(state, None, key, max(state.slots[key].earliest_s, now), -1, 0)  # type: ignore[arg-type]
    core.land(state)
    return key, state.run[0].busy_until


def test_the_earliest_due_prefetch_goes_first_then_the_order_of_submission() -> None:
    state = make_engine(geometry=make_geometry(3, 4, 1), capacity=8).state
    for key in (8, 5, 4, 9):
        submit(state, key)
    order = []
    while (key := core.head(state)) >= 0:
        order.append(key)
        core.withdraw(state, key)
    assert order == [5, 4, 8, 9]
    assert not core.is_active(state.run[0])


def test_a_key_withdrawn_and_submitted_again_has_its_new_place() -> None:
    state = make_engine(geometry=make_geometry(2, 4, 1), capacity=8).state
    for key in (1, 2):
        submit(state, key)
    core.withdraw(state, 1)
    submit(state, 1, now=3.0, first=2)
    assert core.head(state) == 2
    core.cancel_due(state, 0)
    assert (core.head(state), state.slots[1].earliest_s) == (1, 3.0)
    core.cancel_due(state, 7)  # events that were skipped
    assert core.head(state) == -1


def test_a_batch_that_moves_without_a_gap_pays_one_latency() -> None:
    state = make_queue()
    for key, batch in ((1, 7), (2, 7), (3, 8)):
        submit(state, key, batch=batch)
    # 1 + 4, then 4, then a batch of its own
    assert [start(state, state.run[0].busy_until) for _ in range(3)] == [
        (1, 5.0),
        (2, 9.0),
        (3, 14.0),
    ]
    assert state.run[0].busy_s == 14.0


@pytest.mark.parametrize("gap", ["a demand between", "a pause", "another batch", "no batch"])
def test_whatever_comes_between_ends_a_batch(gap: str) -> None:
    state = make_queue()
    batch = -1 if gap == "no batch" else 7
    submit(state, 1, batch=batch)
    submit(state, 4, batch=batch)
    assert start(state, 0.0) == (1, 5.0)
    if gap == "a demand between":
        assert core.transfer(state, 0, 0, 0.0, False, -1) == 10.0
    elif gap == "a pause":
        state.slots[4].earliest_s = 10.0
    elif gap == "another batch":
        submit(state, 2, batch=8)
        assert start(state, 5.0) == (2, 10.0)
    before = 5.0 if gap == "no batch" else 10.0
    assert start(state, state.run[0].busy_until) == (4, before + 5.0)


# --- lanes, reads by projections, experts that run as they arrive ---


def test_two_lanes_share_the_link_and_one_alone_gets_no_more_than_its_own() -> None:
    times_s = arrivals((60, 30, 30), lanes=2, lane_rate=20, link_rate=30, latency_s=0.5)
    # After 0.5 s both move at 15 bytes/s. The second arrives at 2.5 s with 30 bytes of the first
    # left, which has 20 bytes/s for 0.5 s, the third's latency: 20 and 30 bytes left at 15 each.
    assert times_s == pytest.approx([0.5 + 2 + 0.5 + 20 / 15, 2.5, 2.5 + 0.5 + 20 / 15 + 10 / 20])


def test_two_reads_are_gate_and_up_together_then_down() -> None:
    """Two lanes of 1 byte/s, two experts of 3 bytes: gate and up of both, then down of both."""
    lane_figures = {"link_lanes": 2, "link_lane_bytes_per_s": 1.0}
    lanes = replace(traces.HARDWARE, link_bytes_per_s=2.0, link_latency_s=0.0, **lane_figures)
    for reads, arrivals_s in ((2, [2, 3]), (3, [1, 2, 3])):
        # Three equal reads an expert: two lanes serve the six in turn.
        engine = make_engine(hardware=lanes, reads_per_expert=reads)
        engine.outside.moving = [(0, 3), (1, 3)]
        assert engine.outside.move_together(engine.state, 0.0) == pytest.approx(3)
        assert [*engine.outside._arrivals.values()] == [pytest.approx(arrivals_s)] * 2


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
    for link in ("fifo", "priority"):
        setting = traces.setting_for(trace, "100%", prefetch, hardware=SECOND_EACH, link=link)
        engine = replay(trace, setting, future=Future(trace), cache_reset="never")
        assert engine.clock.now == pytest.approx(3.5)

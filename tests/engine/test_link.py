"""The virtual link: one transfer at a time, lanes that share it, and FIFO; by hand and by laws."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lm_eval_moecache.algorithms.registry import find_algorithm
from lm_eval_moecache.engine import core
from lm_eval_moecache.engine.core.link import begin
from lm_eval_moecache.engine.replay import replay
from lm_eval_moecache.engine.setting import AS_THEY_ARRIVE
from lm_eval_moecache.engine.virtual.costs import arrivals
from lm_eval_moecache.engine.virtual.engine import VirtualEngine
from lm_eval_moecache.records.event import PASS_START
from lm_eval_moecache.records.ledger import Counters, total
from lm_eval_moecache.trace.future import Future
from lm_eval_moecache.trace.trace import Trace
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


def replay_lanes(
    trace: Trace, execute: str = "together", reads: int = 1, eviction: str = "lru", **link: float
) -> Counters:
    hardware = replace(traces.HARDWARE, **link)
    options = {"hardware": hardware, "execute": execute, "reads_per_expert": reads}
    engine = replay(trace, traces.setting_for(trace, "12kB", {"eviction": eviction}, **options))
    counters = total(engine.ledger.passes)
    counters.host_s = engine.ledger.passes[-1].end_s  # the end of the run
    return counters


# A lane gets a quarter of the link, so that four lanes use all of it. Two experts a token.
ONE: dict[str, Any] = {"link_lane_bytes_per_s": 2.5e6}
FOUR: dict[str, Any] = {**ONE, "link_lanes": 4}


def test_lanes_that_give_nothing_change_nothing_and_management_is_the_computes(
    trace: Trace,
) -> None:
    """One lane in batches is one server: equal counts and, up to rounding, equal times."""
    plain = replay_lanes(trace)
    for overhead_s in (1e-30, 1e-6):
        batched = replay_lanes(trace, load_overhead_s_per_byte=overhead_s)
        assert (batched.misses, batched.bytes_moved) == (plain.misses, plain.bytes_moved)
        assert batched.stall_s == pytest.approx(plain.stall_s, rel=1e-6)
        management_s = overhead_s * plain.bytes_moved
        assert batched.host_s == pytest.approx(plain.host_s + management_s, rel=1e-9)


@pytest.mark.parametrize(
    "eviction",
    [
        name
        for name in traces.ON_DEMAND_EVICTIONS
        if not (found := find_algorithm("eviction", name)).is_offline and not found.uses_logits
    ],
)
def test_lanes_show_a_rule_what_a_queue_shows_it(trace: Trace, eviction: str) -> None:
    """Ghost lists and waves included: the link decides when experts move, never which."""
    plain, fast = (replay_lanes(trace, eviction=eviction, **link) for link in ({}, FOUR))
    assert (fast.misses, fast.evictions) == (plain.misses, plain.evictions)


def test_lanes_and_the_order_of_execution_move_time_and_no_counts(trace: Trace) -> None:
    slow, fast = replay_lanes(trace, **ONE), replay_lanes(trace, **FOUR)
    arriving = replay_lanes(trace, AS_THEY_ARRIVE, **FOUR)
    assert slow.bytes_moved == fast.bytes_moved == arriving.bytes_moved
    assert slow.misses == fast.misses == arriving.misses
    assert slow.stall_s > fast.stall_s > 1.02 * arriving.stall_s > 0
    assert slow.host_s > fast.host_s > arriving.host_s
    # Two reads an expert use lanes that one leaves idle.
    assert replay_lanes(trace, reads=2, **FOUR).stall_s < fast.stall_s


def test_an_effective_rate_is_the_nominal_times_its_share(trace: Trace) -> None:
    half = {"link_bytes_per_s": traces.HARDWARE.link_bytes_per_s / 2}
    assert replay_lanes(trace, link_efficiency=0.5) == replay_lanes(trace, **half)


# --- link=fifo: in order of issue, nothing overtaken, nothing withdrawn ---


FREE = float("inf")
SECOND_EACH = make_hardware(
    **{"peak_flops": FREE, "memory_bytes_per_s": FREE, "layer_overhead_s": 0.5},
    **{"link_bytes_per_s": 1.0, "link_latency_s": 0.0},
)
"""One second to move an expert of one byte; the only other cost is 0.5 s a layer."""


def replay_steps(link: str, experts: list[list[list[int]]], **prefetch: object) -> VirtualEngine:
    """Serve decode steps of experts [passes, layers, top_k] from a cache that holds them all."""
    trace = decode_trace(np.array(experts), 8)
    overrides = {"prefetch": "oracle"} | {f"prefetch.{k}": v for k, v in prefetch.items()}
    setting = traces.setting_for(trace, "100%", overrides, hardware=SECOND_EACH, link=link)
    engine = replay(trace, setting, future=Future(trace))
    engine.check_integrity()
    return engine


def test_a_demand_waits_behind_what_was_asked_for_before_it() -> None:
    """Three layers of one expert, each predicted two layers ahead; a second a transfer.

    At 0.5 s layer 0 demands its expert (arrives at 1.5 s) and prefetches those of layers 1 and 2.
    Layer 1, at 2 s, needs its expert, whose transfer started at 1.5 s: it waits until 2.5 s.
    """
    for link in ("fifo", "priority"):
        assert replay_steps(link, [[[0], [1], [2]]], horizon=2).clock.now == pytest.approx(3.5)


def test_wrong_prefetches_are_moved_under_fifo_and_withdrawn_under_priority() -> None:
    experts = [[[0, 1], [2, 3], [4, 5]], [[6, 7], [0, 1], [2, 3]]]
    fifo, priority = (
        replay_steps(link, experts, recall=0.5, precision=0.25) for link in ("fifo", "priority")
    )
    assert fifo.link.bytes_moved > priority.link.bytes_moved
    assert fifo.clock.now > priority.clock.now


def test_without_prefetches_the_discipline_changes_nothing(trace: Trace) -> None:
    plain, fifo = (
        replay(trace, traces.setting_for(trace, "30%", link=link)) for link in ("priority", "fifo")
    )
    assert plain.ledger.passes == fifo.ledger.passes

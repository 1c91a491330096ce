"""A link of lanes, reads by projections, experts that run as they arrive: by hand, and as laws."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lm_eval_moecache.algorithms.policy import load_policy
from lm_eval_moecache.algorithms.registry import algorithm_names, find_algorithm
from lm_eval_moecache.engine.replay import replay
from lm_eval_moecache.engine.setting import AS_THEY_ARRIVE, Setting
from lm_eval_moecache.engine.virtual.lanes import arrivals
from lm_eval_moecache.engine.virtual.link import VirtualLink
from lm_eval_moecache.records.hardware import Hardware
from lm_eval_moecache.records.ledger import Counters, total
from lm_eval_moecache.records.sizes import parse_capacity
from lm_eval_moecache.trace.importers import load_trace
from tests.engine import traces


def test_two_lanes_share_the_link_and_one_alone_gets_no_more_than_its_own() -> None:
    found = arrivals((60, 30, 30), lanes=2, lane_rate=20, link_rate=30, latency_s=0.5)
    # Half a second, then 15 each: the second is there after 2.5 and leaves 30 of the first, which
    # has 20 for half a second (10) until the third moves too: 20 and 30 at 15 each.
    assert found == pytest.approx([0.5 + 2 + 0.5 + 20 / 15, 2.5, 2.5 + 0.5 + 20 / 15 + 10 / 20])


def test_one_lane_is_a_queue() -> None:
    found = arrivals((10, 20, 5), lanes=1, lane_rate=10, link_rate=10, latency_s=0.1)
    assert found == pytest.approx([1.1, 3.2, 3.8])


def test_two_reads_are_gate_and_up_together_then_down() -> None:
    """Two lanes of 1 byte/s, two experts of 3 bytes: both have gate and up first, then down."""
    lanes = replace(
        traces.HARDWARE,
        link_bytes_per_s=2.0,
        link_lanes=2,
        link_lane_bytes_per_s=1.0,
        link_latency_s=0.0,
    )
    found = VirtualLink(lanes, reads_per_expert=2).batch([3, 3], 0.0)
    assert found == [pytest.approx([2, 3]), pytest.approx([2, 3])]
    # Three reads are alike: two lanes take the six of them in turn.
    found = VirtualLink(lanes, reads_per_expert=3).batch([3, 3], 0.0)
    assert found == [pytest.approx([1, 2, 3]), pytest.approx([1, 2, 3])]


@pytest.mark.parametrize("seed", range(5))
def test_arrivals_are_those_of_small_steps(seed: int) -> None:
    """The oracle: time in steps of a ten-thousandth of a second."""
    rng = np.random.default_rng(seed)
    sizes = rng.uniform(1, 20, size=7).tolist()
    lanes, lane_rate, link_rate, latency_s = 3, 10.0, 22.0, 0.05
    step_s, now = 1e-4, 0.0
    active: list[list[float]] = []
    slow, waiting = [0.0] * 7, list(range(7))
    while waiting or active:
        while waiting and len(active) < lanes:
            request = waiting.pop(0)
            active.append([request, latency_s, sizes[request]])
        moving = [each for each in active if each[1] <= 1e-9]
        now += step_s
        for each in active:
            if each in moving:
                each[2] -= min(lane_rate, link_rate / len(moving)) * step_s
            else:
                each[1] -= step_s
        for each in [each for each in active if each[2] <= 0]:
            slow[int(each[0])] = now
            active.remove(each)
    fast = arrivals(
        tuple(sizes), lanes=lanes, lane_rate=lane_rate, link_rate=link_rate, latency_s=latency_s
    )
    assert fast == pytest.approx(slow, abs=0.003)


def run(
    path: Path,
    hardware: Hardware,
    execute: str = "together",
    reads: int = 1,
    eviction: str = "lru",
) -> Counters:
    trace = load_trace(str(path))
    setting = Setting(
        policy=load_policy("on_demand", {"eviction": eviction}),
        capacity=parse_capacity("12kB", trace.geometry),
        hardware=hardware,
        execute=execute,
        reads_per_expert=reads,
    )
    engine = replay(trace, setting)
    found = total(engine.ledger.passes)
    found.host_s = engine.ledger.passes[-1].end_s  # the end of the run
    return found


def test_lanes_that_give_nothing_change_nothing(tmp_path: Path) -> None:
    """One lane in batches is one server: the counts and, but for rounding, the times."""
    path, _ = traces.record(tmp_path)
    plain = run(path, traces.HARDWARE)
    batched = run(path, replace(traces.HARDWARE, load_overhead_s_per_byte=1e-30))
    assert (batched.misses, batched.bytes_moved) == (plain.misses, plain.bytes_moved)
    assert batched.stall_s == pytest.approx(plain.stall_s, rel=1e-9)
    assert batched.host_s == pytest.approx(plain.host_s, rel=1e-9)


@pytest.mark.parametrize(
    "eviction",
    [
        name
        for name in algorithm_names("eviction")
        if not (found := find_algorithm("eviction", name)).is_offline
        and not found.uses_logits
        and "fetch" in found.pairs_with.get("miss", ["fetch"])
    ],
)
def test_lanes_show_a_rule_what_a_queue_shows_it(tmp_path: Path, eviction: str) -> None:
    """Ghost lists and waves included: the link decides when, never what."""
    path, _ = traces.record(tmp_path)
    four = replace(traces.HARDWARE, link_lane_bytes_per_s=2.5e6, link_lanes=4)
    plain, fast = (run(path, each, eviction=eviction) for each in (traces.HARDWARE, four))
    assert (fast.misses, fast.evictions) == (plain.misses, plain.evictions)


def test_lanes_and_the_order_of_execution_move_time_and_no_counts(tmp_path: Path) -> None:
    path, _ = traces.record(tmp_path)
    # Two experts a token: what a lane gets is what the link has for four.
    one = replace(traces.HARDWARE, link_lane_bytes_per_s=2.5e6)
    four = replace(one, link_lanes=4)
    slow, fast = run(path, one), run(path, four)
    arriving = run(path, four, AS_THEY_ARRIVE)
    assert slow.bytes_moved == fast.bytes_moved == arriving.bytes_moved
    assert slow.misses == fast.misses == arriving.misses
    assert slow.stall_s > fast.stall_s > 1.02 * arriving.stall_s > 0
    assert slow.host_s > fast.host_s > arriving.host_s
    # An expert in two requests uses lanes that one alone leaves idle.
    assert run(path, four, reads=2).stall_s < fast.stall_s


def test_what_is_loaded_costs_the_compute_its_management(tmp_path: Path) -> None:
    path, _ = traces.record(tmp_path)
    plain = run(path, traces.HARDWARE)
    managed = run(path, replace(traces.HARDWARE, load_overhead_s_per_byte=1e-6))
    assert managed.host_s - plain.host_s == pytest.approx(1e-6 * plain.bytes_moved, rel=1e-6)
    assert managed.stall_s == pytest.approx(plain.stall_s, rel=1e-6)


def test_an_effective_rate_is_the_nominal_times_its_share(tmp_path: Path) -> None:
    path, _ = traces.record(tmp_path)
    half = replace(traces.HARDWARE, link_efficiency=0.5)
    same = replace(traces.HARDWARE, link_bytes_per_s=traces.HARDWARE.link_bytes_per_s / 2)
    assert run(path, half) == run(path, same)


@pytest.mark.parametrize(
    ("field", "value"),
    [("link_efficiency", 1.2), ("link_efficiency", 0.0), ("link_lanes", 0)],
)
def test_a_link_that_cannot_be_is_refused(field: str, value: float) -> None:
    changes: dict[str, float] = {field: value}
    with pytest.raises(ValueError, match=field):
        replace(traces.HARDWARE, **changes)

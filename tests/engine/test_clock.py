"""The virtual clock's roofline and attention to the context, each time worked by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lm_eval_moecache.analysis import plan
from lm_eval_moecache.engine.replay import replay
from lm_eval_moecache.engine.setting import CONTEXT
from lm_eval_moecache.engine.virtual.clock import (
    DENSE_KERNELS,
    EXPERT_KERNELS,
    GATE_KERNELS,
    VirtualClock,
    attention_s,
)
from lm_eval_moecache.records.emulation import LayerCaches, load_real_model
from lm_eval_moecache.records.event import DECODE, PREFILL
from lm_eval_moecache.records.hardware import load_hardware
from lm_eval_moecache.records.sizes import parse_capacity
from lm_eval_moecache.trace.importers import load_trace
from tests.engine import traces
from tests.engine.scripted import HUGE, TWO_LEVELS, make_geometry, make_hardware


def test_dense_part_reads_its_weights_once_however_many_tokens() -> None:
    clock = VirtualClock(make_hardware(), make_geometry())
    clock.dense(0, 1)
    assert clock.now == 2.0  # 200 bytes / 100 bytes/s
    clock.dense(1, 1000)
    assert clock.now == 4.0


def test_dense_part_of_many_tokens_is_bound_by_compute() -> None:
    # 200 bytes are 100 weights; a token takes 2 FLOP a weight: 200 FLOP / 50 FLOP/s = 4 s.
    clock = VirtualClock(make_hardware(peak_flops=50.0), make_geometry())
    clock.dense(0, 3)
    assert clock.now == pytest.approx(12.0)


def test_roofline_takes_the_slower_of_reading_and_computing() -> None:
    # One expert: 50 weights, 100 FLOP per assignment. At 100 FLOP/s an assignment computes 1 s;
    # reading the expert takes 1 s. Two experts with three assignments: max(3 s, 2 s) = 3 s.
    clock = VirtualClock(make_hardware(peak_flops=100.0), make_geometry())
    clock.experts(0, 2, 3)
    assert clock.now == pytest.approx(3.0)
    # Three experts with one assignment between them (others dropped): max(1 s, 3 s) = 3 s.
    clock.experts(0, 3, 1)
    assert clock.now == pytest.approx(6.0)


def test_low_precision_reads_fewer_bytes_and_computes_as_much() -> None:
    geometry = make_geometry(1, **TWO_LEVELS)
    reading = VirtualClock(make_hardware(), geometry)
    reading.experts(0, 2, 2, level=1)
    assert reading.now == 0.5  # 2 x 25 bytes / 100 bytes/s
    computing = VirtualClock(make_hardware(peak_flops=100.0, memory_bytes_per_s=HUGE), geometry)
    computing.experts(0, 2, 2, level=1)
    assert computing.now == pytest.approx(2.0)  # 2 assignments x 100 FLOP / 100 FLOP/s


def test_element_size_turns_bytes_into_multiply_adds() -> None:
    geometry = make_geometry(1, element_bytes=4.0)
    clock = VirtualClock(make_hardware(peak_flops=10.0, memory_bytes_per_s=HUGE), geometry)
    clock.experts(0, 1, 1)
    assert clock.now == pytest.approx(5.0)  # 25 weights x 2 FLOP / 10 FLOP/s


def test_every_part_pays_for_its_kernels() -> None:
    clock = VirtualClock(make_hardware(kernel_overhead_s=0.5), make_geometry())
    clock.dense(0, 1)
    assert clock.now == 2.0 + DENSE_KERNELS * 0.5
    before = clock.now
    clock.experts(0, 1, 1)
    assert clock.now - before == 1.0 + EXPERT_KERNELS * 0.5
    assert clock.gates(2) == 2 * GATE_KERNELS * 0.5


def test_what_is_outside_the_layers_is_paid_once_a_pass() -> None:
    clock = VirtualClock(make_hardware(pass_overhead_s=0.75), make_geometry())
    ends = []
    for layer in range(3):
        clock.dense(layer, 1)
        ends.append(clock.now)
    assert ends == [2.75, 4.75, 6.75]  # 200 bytes / 100 bytes/s each
    assert clock.overhead_s == 0.25  # over three layers


def test_to_have_waited_for_the_link_costs_more_than_the_wait() -> None:
    clock = VirtualClock(make_hardware(wait_overhead_s=0.5), make_geometry())
    assert (clock.await_link(3.0), clock.now) == (3.0, 3.5)
    # What is there already is not waited for.
    assert (clock.await_link(3.5), clock.now) == (0.0, 3.5)


def test_no_experts_take_no_time() -> None:
    clock = VirtualClock(make_hardware(kernel_overhead_s=0.5), make_geometry())
    clock.experts(0, 0, 0)
    assert clock.now == 0.0


def test_waiting_for_the_past_neither_stalls_nor_turns_time_back() -> None:
    clock = VirtualClock(make_hardware(), make_geometry())
    assert clock.wait_until(3.0) == 3.0
    assert clock.wait_until(1.0) == 0.0
    assert clock.now == 3.0


# --- attention to the context ---


QWEN = load_real_model("Qwen3-30B-A3B")


def test_each_token_attends_as_far_as_its_window_and_a_cache_is_read_once() -> None:
    full, windowed = LayerCaches(1, 10, 1000), LayerCaches(3, 10, 1000, window=2)
    model = replace(QWEN, num_layers=4, caches=(full, windowed), state_bytes=0)
    # 1 + 2 + 3 tokens in one layer, 1 + 2 + 2 in three: 21 times 1000 multiply-adds.
    slow = replace(traces.HARDWARE, peak_flops=1e6)
    assert attention_s(model, slow, PREFILL, np.arange(3)) == pytest.approx(42e3 / 1e6 / 4)
    # Read: 3 tokens of one layer and 2 of three, 10 bytes each.
    fast = replace(traces.HARDWARE, peak_flops=1e30, memory_bytes_per_s=90.0)
    assert attention_s(model, fast, PREFILL, np.arange(3)) == pytest.approx(1.0 / 4)
    # Two sequences of a batch have two caches, in a prefill and in a decode pass alike.
    both = np.array([0, 1, 2, 0, 1, 2])
    assert attention_s(model, fast, PREFILL, both) == pytest.approx(2.0 / 4)
    assert attention_s(model, fast, DECODE, np.array([2, 3])) == pytest.approx((90 + 100) / 90 / 4)


def test_a_decoded_token_takes_what_plan_says() -> None:
    hardware = load_hardware("rtx-4090")
    for context in (1, 5000, 100_000):
        found = attention_s(QWEN, hardware, DECODE, np.array([context - 1]))
        assert found * QWEN.num_layers == pytest.approx(plan.attention_s(QWEN, hardware, context))


@pytest.mark.parametrize("policy", ["on_demand", "specmd"])
def test_compiled_or_not_a_replay_is_charged_alike(tmp_path: Path, policy: str) -> None:
    path, _ = traces.record(tmp_path)
    trace = load_trace(str(path), predicted=True, logits=True)
    flat = replace(
        traces.setting(policy, "25%"),
        capacity=parse_capacity("25%", QWEN.emulated_by(trace.geometry)),
        emulate=QWEN,
        hardware=load_hardware("rtx-4090"),
    )
    setting = replace(flat, attention=CONTEXT)
    fast, slow = (replay(trace, setting, compiled=each).ledger.passes for each in (True, False))
    assert fast == slow
    usual = replay(trace, flat).ledger.passes
    assert [p.misses for p in usual] == [p.misses for p in fast]
    added = [
        p.duration_s - p.stall_s - (u.duration_s - u.stall_s)
        for p, u in zip(fast, usual, strict=True)
    ]
    decoded = [s for s, p in zip(added, fast, strict=True) if p.phase == DECODE]
    own = trace.row_bounds[:: trace.geometry.num_layers]
    ends = trace.columns.token[own[:-1]][[p.phase == DECODE for p in fast]] + 1
    layers = trace.geometry.num_layers
    expected = [attention_s(QWEN, setting.hardware, DECODE, np.array([e - 1])) for e in ends]
    assert decoded == pytest.approx([layers * each for each in expected], rel=1e-6)
    assert len({*ends.tolist()}) > 1


def test_without_a_model_there_is_nothing_to_charge() -> None:
    with pytest.raises(ValueError, match="attention='context' needs emulate="):
        replace(traces.setting("on_demand", "25%"), attention=CONTEXT)

"""The virtual clock's roofline, each time worked by hand."""

from __future__ import annotations

import pytest

from lm_eval_moecache.engine.virtual.clock import (
    DENSE_KERNELS,
    EXPERT_KERNELS,
    GATE_KERNELS,
    VirtualClock,
)
from lm_eval_moecache.records.geometry import Geometry
from tests.engine.scripted import HUGE, make_geometry, make_hardware


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
    geometry = Geometry(
        model="ladder",
        num_layers=1,
        num_experts=2,
        top_k=1,
        expert_bytes=((100, 25),),
        dense_bytes=(0,),
        precision=("bf16", "int4"),
    )
    reading = VirtualClock(make_hardware(), geometry)
    reading.experts(0, 2, 2, level=1)
    assert reading.now == 0.5  # 2 x 25 bytes / 100 bytes/s
    computing = VirtualClock(make_hardware(peak_flops=100.0, memory_bytes_per_s=HUGE), geometry)
    computing.experts(0, 2, 2, level=1)
    assert computing.now == pytest.approx(2.0)  # 2 assignments x 100 FLOP / 100 FLOP/s


def test_element_size_turns_bytes_into_multiply_adds() -> None:
    geometry = Geometry(
        model="fp32",
        num_layers=1,
        num_experts=1,
        top_k=1,
        expert_bytes=((100,),),
        dense_bytes=(0,),
        element_bytes=4.0,
    )
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

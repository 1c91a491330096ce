"""The virtual clock's roofline and attention, and the regime of a run: worked by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lm_eval_moecache.emulate.models import load_real_model
from lm_eval_moecache.engine.costs import (
    DENSE_KERNELS,
    EXPERT_KERNELS,
    Costs,
    attention_s,
)
from lm_eval_moecache.engine.regime import (
    COMPUTE,
    HOST,
    LAUNCHES,
    LINK,
    Waits,
    decode_waits,
    regime_of,
)
from lm_eval_moecache.engine.replay import replay
from lm_eval_moecache.engine.setting import CONTEXT
from lm_eval_moecache.records.event import DECODE, PREFILL
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.hardware import load_hardware
from lm_eval_moecache.records.real_model import LayerCaches
from lm_eval_moecache.trace.trace import Trace
from tests.engine import traces
from tests.engine.scripted import HUGE, TWO_LEVELS, make_geometry, make_hardware

LADDER = make_geometry(1, **TWO_LEVELS)
COMPUTE_ALONE = {"memory_bytes_per_s": HUGE}


@pytest.mark.parametrize(
    ("geometry", "figures", "part", "amount", "seconds"),
    [
        # 200 bytes / 100 bytes/s, however many tokens.
        (make_geometry(), {}, "dense_s", (0, 1), 2.0),
        (make_geometry(), {}, "dense_s", (1, 1000), 2.0),
        (make_geometry(), {"layer_overhead_s": 0.5}, "dense_s", (2, 1), 2.5),
        # 200 bytes are 100 weights; a token takes 2 FLOP a weight: 200 FLOP / 50 FLOP/s = 4 s.
        (make_geometry(), {"peak_flops": 50.0}, "dense_s", (0, 3), 12.0),
        # One expert: 50 weights, 100 FLOP per assignment. At 100 FLOP/s an assignment computes 1 s;
        # reading the expert takes 1 s. Two experts with three assignments: max(3 s, 2 s) = 3 s.
        (make_geometry(), {"peak_flops": 100.0}, "experts_s", (0, 2, 3), 3.0),
        # Three experts with one assignment between them (others dropped): max(1 s, 3 s) = 3 s.
        (make_geometry(), {"peak_flops": 100.0}, "experts_s", (0, 3, 1), 3.0),
        (make_geometry(), {"kernel_overhead_s": 0.5}, "experts_s", (0, 0, 0), 0.0),
        # Low precision reads fewer bytes, 2 x 25, and computes as much, 2 x 100 FLOP.
        (LADDER, {}, "experts_s", (0, 2, 2, 1), 0.5),
        (LADDER, {"peak_flops": 100.0, **COMPUTE_ALONE}, "experts_s", (0, 2, 2, 1), 2.0),
        # 100 bytes of 4 bytes each are 25 weights x 2 FLOP / 10 FLOP/s.
        (
            make_geometry(1, element_bytes=4.0),
            {"peak_flops": 10.0, **COMPUTE_ALONE},
            "experts_s",
            (0, 1, 1),
            5.0,
        ),
    ],
)
def test_each_part_takes_the_slower_of_reading_and_computing(
    geometry: Geometry,
    figures: dict[str, float],
    part: str,
    amount: tuple[int, ...],
    seconds: float,
) -> None:
    costs = Costs(make_hardware(**figures), geometry)
    assert getattr(costs, part)(*amount) == pytest.approx(seconds)


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
    # Two sequences of a batch have two caches, in prefill and decode passes alike.
    both = np.array([0, 1, 2, 0, 1, 2])
    assert attention_s(model, fast, PREFILL, both) == pytest.approx(2.0 / 4)
    assert attention_s(model, fast, DECODE, np.array([2, 3])) == pytest.approx((90 + 100) / 90 / 4)


def test_without_a_model_there_is_nothing_to_charge() -> None:
    with pytest.raises(ValueError, match="attention='context' needs emulate="):
        replace(traces.setting("on_demand", "25%"), attention=CONTEXT)


# --- the regime of a run, and emulated sizes ---


FREE = float("inf")
LINK_ONLY = make_hardware(
    peak_flops=FREE, memory_bytes_per_s=FREE, link_bytes_per_s=1e9, link_latency_s=0.0
)


@pytest.mark.parametrize("name", ["OLMoE-1B-7B", "Mixtral-8x7B", "gpt-oss-20b"])
def test_an_on_demand_run_takes_the_emulated_bytes_over_the_link(trace: Trace, name: str) -> None:
    model = load_real_model(name)
    engine, seven_experts = (
        replay(
            trace,
            traces.setting_for(trace, capacity, hardware=LINK_ONLY, emulate=model),
            cache_reset="never",
        )
        for capacity in ("30%", "7experts")
    )
    # 30% of 24 experts are seven; each takes an emulated expert's bytes over the link.
    misses = sum(p.misses for p in engine.ledger.passes)
    assert misses == sum(p.misses for p in seven_experts.ledger.passes)
    assert engine.now == pytest.approx(misses * model.expert_bytes / 1e9, rel=1e-12)


def test_the_numbers_of_a_regime_by_hand() -> None:
    geometry = make_geometry(2, 8, expert_bytes=((1000,), (1000,)), dense_bytes=(3000, 5000))
    figures = {"peak_flops": 1e12, "memory_bytes_per_s": 1e6, "link_bytes_per_s": 1e5}
    overheads = {"link_latency_s": 0.002, "kernel_overhead_s": 1e-5, "layer_overhead_s": 0.003}
    hardware = make_hardware(**figures, **overheads)
    regime = regime_of(geometry, 6000, hardware)
    assert regime.cycles == 6000 / (2 * 2 * 1000)
    assert regime.transfer_s == pytest.approx(0.002 + 1000 / 1e5)
    # Reading is the bound: (3000 + 5000) / 2 dense bytes and two experts, a microsecond a byte.
    assert regime.compute_s == pytest.approx(0.004 + 0.002)
    assert regime.launches_s == pytest.approx((DENSE_KERNELS + EXPERT_KERNELS) * 1e-5 + 0.003)
    assert regime.transfer_per_layer == pytest.approx(0.012 / (0.006 + regime.launches_s))
    assert regime.bound(Waits(0.0)) == COMPUTE
    assert regime.bound(Waits(0.007)) == LINK
    assert regime.bound(Waits(0.007, host_s=0.008)) == HOST
    slow = replace(hardware, layer_overhead_s=0.03)
    assert regime_of(geometry, 6000, slow).bound(Waits(0.007)) == LAUNCHES


def test_the_calibrated_profile_takes_the_papers_time_a_token() -> None:
    """SpecMD Table 1: 1.91 tokens/s, whatever the profile's link adds in waits."""
    hardware = load_hardware("specmd-a100")
    olmoe = load_real_model("OLMoE-1B-7B").geometry()
    regime = regime_of(olmoe, olmoe.total_expert_bytes // 20, hardware)
    per_token_s = 16 * (regime.compute_s + regime.launches_s)
    assert 0.8 / 1.91 < per_token_s < 1 / 1.91
    assert hardware.link_bytes_per_s == 5e9 and regime.transfer_per_layer < 0.1


def test_a_slow_host_is_what_bounds_a_run_that_computes_there(trace: Trace) -> None:
    axes = {"miss": "host", "miss.rule": "always"}
    fast = replace(traces.HARDWARE, link_bytes_per_s=1e15, link_latency_s=0.0)
    for flops, bound in ((1e3, HOST), (1e15, COMPUTE)):
        hardware = replace(fast, host_flops=flops, host_memory_bytes_per_s=1e15)
        engine = replay(trace, traces.setting_for(trace, "10%", axes, hardware=hardware))
        waits = decode_waits(engine.ledger.requests, trace.geometry.num_layers)
        assert waits is not None and waits.host_s > 0
        summary = regime_of(trace.geometry, 6000, hardware).as_dict(waits)
        assert (summary["bound"], summary["layer_host_wait_s"]) == (bound, waits.host_s)

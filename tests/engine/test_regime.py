"""The regime and emulated sizes, by hand and through whole runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from lm_eval_moecache.cli.main import main
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
from lm_eval_moecache.engine.virtual.clock import DENSE_KERNELS, EXPERT_KERNELS
from lm_eval_moecache.harness.arguments import read_config
from lm_eval_moecache.records.emulation import load_real_model
from lm_eval_moecache.records.hardware import Hardware, load_hardware
from lm_eval_moecache.records.sizes import parse_capacity
from lm_eval_moecache.trace.importers import load_trace
from tests.engine.scripted import make_geometry

from . import traces

LINK_ONLY = Hardware(
    name="link only",
    peak_flops=float("inf"),
    memory_bytes_per_s=float("inf"),
    link_bytes_per_s=1e9,
    link_latency_s=0.0,
    kernel_overhead_s=0.0,
    memory_bytes=1e12,
)


@pytest.mark.parametrize("name", ["OLMoE-1B-7B", "Mixtral-8x7B", "gpt-oss-20b"])
def test_an_on_demand_run_takes_the_emulated_bytes_over_the_link(tmp_path: Path, name: str) -> None:
    path, _ = traces.record(tmp_path)
    trace, model = load_trace(str(path)), load_real_model(name)
    charged = model.emulated_by(trace.geometry)
    setting = dataclasses.replace(
        traces.setting("on_demand", "30%"),
        capacity=parse_capacity("30%", charged),
        hardware=LINK_ONLY,
        emulate=model,
    )
    engine = replay(trace, setting)
    counted = dataclasses.replace(setting, capacity=parse_capacity("7", charged))
    misses = sum(p.misses for p in engine.ledger.passes)
    # 30% of 24 experts are seven of them; each is an emulated one on the link.
    assert misses == sum(p.misses for p in replay(trace, counted).ledger.passes)
    assert engine.clock.now == pytest.approx(misses * model.expert_bytes / 1e9, rel=1e-12)


def test_a_capacity_in_bytes_counts_emulated_experts() -> None:
    charged = load_real_model("OLMoE-1B-7B").emulated_by(traces.GEOMETRY)
    assert parse_capacity("51", charged).total_bytes == 51 * 12_582_912
    with pytest.raises(ValueError, match="too small for one expert"):
        parse_capacity("12MB", charged)


def test_the_numbers_of_a_regime_by_hand() -> None:
    geometry = make_geometry(2, 8, expert_bytes=((1000,), (1000,)), dense_bytes=(3000, 5000))
    hardware = Hardware(
        name="hand",
        peak_flops=1e12,
        memory_bytes_per_s=1e6,
        link_bytes_per_s=1e5,
        link_latency_s=0.002,
        kernel_overhead_s=1e-5,
        memory_bytes=1e9,
        layer_overhead_s=0.003,
    )
    regime = regime_of(geometry, 6000, hardware)
    assert regime.cycles == 6000 / (2 * 2 * 1000)
    assert regime.transfer_s == pytest.approx(0.002 + 1000 / 1e5)
    # Reading bounds it: (3000 + 5000) / 2 dense bytes and two experts, a microsecond a byte.
    assert regime.compute_s == pytest.approx(0.004 + 0.002)
    assert regime.launches_s == pytest.approx((DENSE_KERNELS + EXPERT_KERNELS) * 1e-5 + 0.003)
    assert regime.transfer_per_layer == pytest.approx(0.012 / (0.006 + regime.launches_s))
    assert regime.bound(Waits(0.0)) == COMPUTE
    assert regime.bound(Waits(0.007)) == LINK
    assert regime.bound(Waits(0.007, host_s=0.008)) == HOST
    slow = dataclasses.replace(hardware, layer_overhead_s=0.03)
    assert regime_of(geometry, 6000, slow).bound(Waits(0.007)) == LAUNCHES


def test_layer_overhead_is_paid_once_a_layer_and_pass(tmp_path: Path) -> None:
    path, _ = traces.record(tmp_path)
    trace = load_trace(str(path))
    plain = traces.setting("on_demand", "100%")
    slow = dataclasses.replace(
        plain, hardware=dataclasses.replace(plain.hardware, layer_overhead_s=0.5)
    )
    fast_s, slow_s = (replay(trace, each).clock.now for each in (plain, slow))
    assert slow_s - fast_s == pytest.approx(0.5 * trace.num_passes * 3)


def test_the_calibrated_profile_takes_the_papers_time_a_token() -> None:
    """SpecMD Table 1: 1.91 tokens a second, whatever the profile's own link waits on top."""
    hardware = load_hardware("specmd-a100")
    olmoe = load_real_model("OLMoE-1B-7B").geometry()
    regime = regime_of(olmoe, olmoe.total_expert_bytes // 20, hardware)
    per_token_s = 16 * (regime.compute_s + regime.launches_s)
    assert 0.8 / 1.91 < per_token_s < 1 / 1.91
    assert hardware.link_bytes_per_s == 5e9 and regime.transfer_per_layer < 0.1


def test_replay_prints_the_regime_and_what_it_emulates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, _ = traces.record(tmp_path)
    assert (
        main(["replay", str(path), "--emulate", "OLMoE-1B-7B", "--capacity", "50%", "--all"]) == 0
    )
    out = capsys.readouterr().out
    assert "layers charged as: OLMoE-1B-7B" in out
    assert "| Cycles" in out.replace("|Cycles", "| Cycles") and "link" in out


def test_emulate_is_refused_with_the_machines_own_clock() -> None:
    with pytest.raises(ValueError, match="emulate='OLMoE-1B-7B' does not go with clock='wall'"):
        read_config({"emulate": "OLMoE-1B-7B", "clock": "wall", "policy": "on_demand"})


def test_a_slow_host_is_what_bounds_a_run_that_computes_there(tmp_path: Path) -> None:
    path, _ = traces.record(tmp_path)
    trace = load_trace(str(path))
    setting = traces.setting("on_demand", "10%", miss="host", miss__rule="always")
    for flops, bound in ((1e3, HOST), (1e15, COMPUTE)):
        hardware = dataclasses.replace(
            setting.hardware,
            host_flops=flops,
            host_memory_bytes_per_s=1e15,
            link_bytes_per_s=1e15,
            link_latency_s=0.0,
        )
        engine = replay(trace, dataclasses.replace(setting, hardware=hardware))
        waits = decode_waits(engine.ledger.requests, trace.geometry.num_layers)
        assert waits is not None and waits.host_s > 0
        regime = regime_of(trace.geometry, 6000, hardware)
        found = regime.as_dict(waits)
        assert (found["bound"], found["layer_host_wait_s"]) == (bound, waits.host_s)

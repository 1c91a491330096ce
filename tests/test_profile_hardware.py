"""Hardware profiles: every figure has a source, and decoding is charged its measured time."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import transformers

from lm_eval_moecache.cli.main import main
from lm_eval_moecache.engine.costs import DENSE_KERNELS, EXPERT_KERNELS, Costs
from lm_eval_moecache.engine.setting import check_host
from lm_eval_moecache.profiling import _measure
from lm_eval_moecache.profiling._measure import (
    MOST_LAYERS,
    NOBODYS,
    Parts,
    Step,
    _weights,
    measure_on_wall,
    model_like,
    parts_of,
    prefill_s,
    profile_of,
    with_prefill_rate,
)
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.hardware import (
    OF_THE_MACHINE,
    Hardware,
    load_hardware,
    profile_names,
)
from tests.engine.scripted import make_hardware
from tests.model.wrapped import loader_of
from tests.models import random_model


def test_no_figure_of_a_shipped_profile_has_an_empty_source() -> None:
    for name in profile_names():
        assert all(source.strip() for source in load_hardware(name).sources.values()), name


@pytest.mark.parametrize("given", [(), ("--policy=specmd", "--bandwidth=50MB/s")], ids=str)
def test_a_measured_profile_has_a_source_for_each_figure_and_can_be_loaded(
    given: tuple[str, ...], tmp_path: Path
) -> None:
    out = tmp_path / "here.yaml"
    if given:
        random_model("olmoe").save_pretrained(tmp_path / "model")
        given += (f"--pretrained={tmp_path / 'model'}",)
    sizes = ["--size=1MiB", "--matmul=64", "--device=cpu"]
    assert main(["profile", "hardware", f"--out={out}", *sizes, *given]) == 0
    profile = load_hardware(str(out))
    fields = (f for f in dataclasses.fields(Hardware) if f.name not in ("name", "source"))
    figures = {f.name for f in fields if getattr(profile, f.name) != f.default}
    assert profile.name == "here"
    # A cost measured as zero has its source, too.
    assert isinstance(profile.source, dict)
    assert figures <= profile.source.keys() and (given or figures == profile.source.keys())
    # `miss=host` needs these two: a profile without them is refused.
    assert {"host_flops", "host_memory_bytes_per_s"} <= figures
    check_host(profile)
    assert profile.memory_bytes_per_s > 1e6
    if given:
        assert profile.link_bytes_per_s == 50e6 and "wait_overhead_s" in profile.source
        assert "specmd" in profile.source["layer_overhead_s"]


def test_a_host_is_measured_as_fast_as_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 x 64^3 FLOP in 1 ms, and 4 matrices of 4 MiB read once in 2 ms."""
    times = iter([2e-3, 1e-3])
    monkeypatch.setattr(_measure, "typical_s", lambda work, device: (work(), next(times))[1])
    monkeypatch.setattr(_measure, "_matmul_s", lambda *_: 1e-3)
    figures = _measure._measure_host(16 * 2**20, 64)
    assert figures["host_flops"][0] == pytest.approx(2 * 64**3 / 1e-3)
    rate, source = figures["host_memory_bytes_per_s"]
    assert rate == pytest.approx(16 * 2**20 / 2e-3)
    assert "with 4 float32 matrices" in source


@pytest.mark.parametrize(("small_s", "edge"), [(1e-4, 2048), (0.03, 512), (5.0, 256)])
def test_a_slow_device_multiplies_smaller_matrices(
    monkeypatch: pytest.MonkeyPatch, small_s: float, edge: int
) -> None:
    """A product of 256 in 0.03 s takes 0.24 s at 512 and 1.9 s at 1024: over a quarter second."""
    monkeypatch.setattr(_measure, "_matmul_s", lambda *_: small_s)
    assert _measure._edge_in_time(torch.device("cpu"), torch.bfloat16, 2048) == edge
    assert _measure._edge_in_time(torch.device("cpu"), torch.bfloat16, 64) == 64


def test_a_product_of_a_device_reads_enough_to_hide_its_launch() -> None:
    """At 5 TB/s, 128 MiB take 27 us; a launch takes 2 to 10 us."""
    on_device = _weights(torch.device("meta"), torch.bfloat16, 2**28)
    assert len(on_device) == 2 and on_device[0].nbytes == 128 * 2**20
    assert _weights(torch.device("cpu"), torch.bfloat16, 2**28)[0].nbytes == 2 * 2**20


GEOMETRY = Geometry(
    model="hand",
    num_layers=3,
    num_experts=4,
    top_k=2,
    expert_bytes=((100,),) * 3,
    dense_bytes=(200, 200, 600),
)
CALM = Step(20.0, (5.0, 7.0), (0.5, 0.5, 0.2), (0.0, 0.0))


def test_a_step_is_taken_apart_by_hand() -> None:
    # Layer 0's demands moved for 8 s: 18 - 8 = 10 s, 5 more than when calm.
    # Layer 1 demanded nothing in the first step; in the second 3 s: 13 - 3 = 10 s, 3 more.
    first = Step(40.0, (18.0, 9.0), (9.0, 9.0, 9.0), (8.0, 0.0))
    second = Step(40.0, (5.0, 13.0), (9.0, 9.0, 9.0), (0.0, 3.0))
    parts = parts_of([CALM], [first, second])
    assert parts.layer_s == 6.0
    assert parts.bookkeeping_s == pytest.approx(0.4)
    assert parts.outside_s == 20.0 - 3 * 6.0
    assert parts.wait_s == pytest.approx((5.0 + 3.0) / 2)
    odd = Step(400.0, (300.0, 7.0), (9.0, 9.0, 9.0), (8.0, 0.0))
    assert parts_of([CALM], [first, second, odd]).wait_s == 5.0


def test_without_waits_a_wait_costs_nothing_and_odd_steps_are_outvoted() -> None:
    odd = Step(900.0, (300.0, 300.0), (90.0, 90.0, 90.0), (0.0, 0.0))
    parts = parts_of([CALM, odd, CALM], [CALM])
    assert parts == parts_of([CALM], [])
    assert parts.wait_s == 0.0


@pytest.mark.parametrize("gates", [0.0, 2 / 3])
def test_a_profile_charges_what_was_measured(gates: float) -> None:
    # Reading takes (200 + 2 x 100) / 100 = 4 s a layer, and 400 / 100 = 4 s outside of them.
    measured = Parts(layer_s=6.0, bookkeeping_s=0.5, outside_s=5.0, wait_s=0.25)
    profile = profile_of(make_hardware(), measured, GEOMETRY, gates)
    assert profile.kernel_overhead_s * (DENSE_KERNELS + EXPERT_KERNELS) == pytest.approx(1.5)
    assert (profile.pass_overhead_s, profile.wait_overhead_s) == (1.0, 0.25)
    costs, seconds = Costs(profile, GEOMETRY), 0.0
    for layer in range(3):
        seconds += costs.dense_s(layer, 1) + costs.gates_s(1) * gates + costs.experts_s(layer, 2, 2)
    assert seconds == pytest.approx(3 * 6.0 + 5.0)


def test_a_prefill_is_charged_what_it_took() -> None:
    """By hand: a layer's 100 weights of a byte cost 2 x 10 tokens x 100 FLOP, its experts as much.

    10 tokens x top 2 of experts of 100 bytes: 2 x 20 x 100 FLOP a layer. The dense parts are of
    200, 200 and 600 bytes: 2 x 10 x 1000 FLOP. In all 32,000 FLOP, read in under 10 + 3 x 4 s.
    """
    slow = dataclasses.replace(make_hardware(), kernel_overhead_s=0.0, peak_flops=1e4)
    one_byte = dataclasses.replace(GEOMETRY, element_bytes=1)
    found = with_prefill_rate(slow, one_byte, 10, 3 * 4, 64.0)
    assert found.peak_flops == pytest.approx(32_000 / 64.0)
    assert prefill_s(found, one_byte, 10, 3 * 4) == pytest.approx(64.0)
    # Reading alone takes (1000 + 3 x 4 x 100) / 100 = 22 s: no FLOP/s makes it 21.
    assert with_prefill_rate(slow, one_byte, 10, 3 * 4, 21.0) == slow


def test_where_reading_takes_longer_than_the_whole_nothing_else_is_left() -> None:
    measured = Parts(layer_s=3.0, bookkeeping_s=0.5, outside_s=2.0, wait_s=0.0)
    profile = profile_of(make_hardware(), measured, GEOMETRY, 0.0)
    assert (profile.kernel_overhead_s, profile.pass_overhead_s) == (0.0, 0.0)
    assert profile.layer_overhead_s == 0.5


@pytest.mark.parametrize(("policy", "rate"), [("on_demand", None), ("specmd", 1e7)])
def test_every_part_is_measured_and_says_how(policy: str, rate: float | None) -> None:
    model = random_model("olmoe")
    hooks = [len(m._forward_hooks) for m in model.modules()]
    profile = measure_on_wall(NOBODYS, model, loader_of(model), policy, rate)
    replaced = {f.name for f in dataclasses.fields(profile)} - {"name", "source", *OF_THE_MACHINE}
    replaced -= {"memory_bytes", "host_flops", "host_memory_bytes_per_s", "link_efficiency"}
    replaced -= {"link_lanes", "link_lane_bytes_per_s", "load_overhead_s_per_byte"}
    assert isinstance(profile.source, dict) and profile.source.keys() == replaced
    assert all(f"policy {policy}" in text or "given" in text for text in profile.source.values())
    assert profile.memory_bytes_per_s > 1e6
    assert profile.link_bytes_per_s == rate if rate else profile.link_bytes_per_s > 1e5
    # How the rest is divided is too noisy to be tested here; `parts_of` is, by hand.
    parts = (profile.layer_overhead_s, profile.pass_overhead_s, profile.wait_overhead_s)
    assert all(0 <= part < 1 for part in parts)
    assert sum(parts) + profile.kernel_overhead_s > 0
    assert hooks == [len(m._forward_hooks) for m in model.modules()], "a hook was left"


def test_one_layer_says_nothing_of_layers() -> None:
    model = random_model("olmoe", num_hidden_layers=1)
    with pytest.raises(ValueError, match="one MoE layer"):
        measure_on_wall(NOBODYS, model, loader_of(model), "on_demand")


def test_a_model_of_a_shape_has_its_first_layers_and_no_weights_of_it(tmp_path: Path) -> None:
    random_model("olmoe", num_hidden_layers=6).save_pretrained(tmp_path)
    model = model_like(str(tmp_path), torch.bfloat16, torch.device("cpu"))
    assert len(model.model.layers) == MOST_LAYERS == model.config.num_hidden_layers
    assert model.model.layers[0].mlp.experts.down_proj.shape == (8, 32, 16)
    assert model.dtype == torch.bfloat16
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not torch.equal(model.lm_head.weight.float(), saved.lm_head.weight.float())

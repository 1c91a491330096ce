"""Hardware profiles: every figure has a source, and a measured profile can be loaded."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from lm_eval_moecache.cli.main import main
from lm_eval_moecache.engine.setting import check_host
from lm_eval_moecache.profiling import hardware
from lm_eval_moecache.profiling.hardware import _weights
from lm_eval_moecache.records.hardware import Hardware, load_hardware, profile_names


def figures_of(profile: Hardware) -> set[str]:
    """What the profile says: all figures but the optional ones that it leaves out."""
    fields = (f for f in dataclasses.fields(Hardware) if f.name not in ("name", "source"))
    return {f.name for f in fields if getattr(profile, f.name) != f.default}


@pytest.mark.parametrize("name", profile_names())
def test_every_figure_of_a_shipped_profile_has_a_source(name: str) -> None:
    profile = load_hardware(name)
    assert profile.name == name
    assert isinstance(profile.source, dict) and profile.source.keys() == figures_of(profile)
    assert all(str(source).strip() for source in profile.source.values())


def test_a_measured_profile_can_be_loaded(tmp_path: Path) -> None:
    out = tmp_path / "here.yaml"
    sizes = ["--size", "1MiB", "--matmul", "64"]
    assert main(["profile", "hardware", "--out", str(out), "--device", "cpu", *sizes]) == 0
    profile = load_hardware(str(out))
    assert profile.name == "here"
    assert isinstance(profile.source, dict) and profile.source.keys() == figures_of(profile)
    # With them it can serve `miss=host`, which a profile without them refuses.
    assert {"host_flops", "host_memory_bytes_per_s"} <= profile.source.keys()
    check_host(profile)


def test_a_host_is_measured_as_fast_as_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 x 64^3 FLOP in 1 ms, and 4 matrices of 4 MiB read once in 2 ms."""
    times = iter([2e-3, 1e-3])
    monkeypatch.setattr(hardware, "typical_s", lambda work, device: (work(), next(times))[1])
    monkeypatch.setattr(hardware, "_matmul_s", lambda *_: 1e-3)
    figures, source = hardware._measure_host(16 * 2**20, 64)
    assert figures["host_flops"] == pytest.approx(2 * 64**3 / 1e-3)
    assert figures["host_memory_bytes_per_s"] == pytest.approx(16 * 2**20 / 2e-3)
    assert "with 4 float32 matrices" in source["host_memory_bytes_per_s"]


@pytest.mark.parametrize(("small_s", "edge"), [(1e-4, 2048), (0.03, 512), (5.0, 256)])
def test_a_slow_device_multiplies_smaller_matrices(
    monkeypatch: pytest.MonkeyPatch, small_s: float, edge: int
) -> None:
    """A product of 256 in 0.03 s takes 0.24 s at 512 and 1.9 s at 1024: over a quarter second."""
    monkeypatch.setattr(hardware, "_matmul_s", lambda *_: small_s)
    assert hardware._edge_in_time(torch.device("cpu"), torch.bfloat16, 2048) == edge
    assert hardware._edge_in_time(torch.device("cpu"), torch.bfloat16, 64) == 64


def test_a_product_of_a_device_reads_enough_to_hide_its_launch() -> None:
    """At 5 TB/s, 128 MiB take 27 us; a launch takes 2 to 10 us."""
    on_device = _weights(torch.device("meta"), torch.bfloat16, 2**28)
    assert len(on_device) == 2 and on_device[0].nbytes == 128 * 2**20
    assert _weights(torch.device("cpu"), torch.bfloat16, 2**28)[0].nbytes == 2 * 2**20

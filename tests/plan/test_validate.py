"""`moecache validate` and `profile device`: by hand, on the clock itself, on a phone."""

from __future__ import annotations

import csv
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

from lm_eval_moecache.engine.validation import Series, setting_of, simulate
from lm_eval_moecache.records.hardware import Hardware, load_hardware
from lm_eval_moecache.trace.importers import load_trace
from moecache_lab.device import Measured, fit
from tests.conftest import Moecache
from tests.engine import traces

EXACT = {
    **{"tokens": 15, "bytes_ratio": 1, "bytes_correlation": 1, "hit_rate_difference": 0},
    **{"stall_ratio": 1, "stall_median_error": 0, "wall_ratio": 1, "wall_median_error": 0},
}
CAPACITY = "12kB"
ENGINE = SimpleNamespace(
    policy="on_demand", eviction="lru", capacity=CAPACITY, execute="as_they_arrive"
)


def profile(folder: Path, name: str = "device", **changes: object) -> Path:
    figures = {key: value for key, value in asdict(traces.HARDWARE).items() if value is not None}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({**figures, "name": name, **changes}))
    return path


def measured_by(trace: Path, hardware: Hardware) -> Series:
    """Measurements of a device that matches the clock exactly."""
    run = load_trace(str(trace))
    return simulate(run, setting_of(run, hardware, ENGINE, 2))


def write(path: Path, columns: dict[str, Any], comment: str = "") -> Path:
    with path.open("w", newline="") as file:
        file.write(comment)
        rows = csv.writer(file)
        rows.writerow(columns)
        rows.writerows(zip(*columns.values(), strict=True))
    return path


def validated(moecache: Moecache, *options: object) -> dict[str, Any]:
    settings = ("--capacity", CAPACITY, "--execute", "as_they_arrive", "--reads_per_expert", "2")
    comparison: dict[str, Any] = moecache.json("validate", *options, *settings)
    return comparison


def test_a_device_that_is_as_the_clock_says_is_met_in_everything(
    tmp_path: Path, trace: Path, moecache: Moecache
) -> None:
    device = profile(tmp_path, link_lanes=2, link_lane_bytes_per_s=4e6)
    measured = dict(measured_by(trace, load_hardware(str(device))).columns)
    table = write(tmp_path / "measured.csv", measured, "# a comment\n")
    comparison = validated(moecache, trace, table, "--hardware", device)
    assert list(comparison) == list(EXACT)
    assert comparison == pytest.approx(EXACT, abs=1e-9)


def test_ratios_and_errors_are_ours_to_theirs_under_other_names(
    tmp_path: Path, trace: Path, moecache: Moecache
) -> None:
    device = profile(tmp_path)
    predicted = measured_by(trace, load_hardware(str(device))).columns
    slower = {"total": 2 * predicted["wall_ms"], "hits": predicted["cache_hit_pct"] - 5}
    table = write(tmp_path / "measured.csv", slower)
    names = ["--columns", "{wall_ms: total, cache_hit_pct: hits}"]
    comparison = validated(moecache, trace, table, "--hardware", device, *names)
    assert comparison["wall_ratio"] == pytest.approx(0.5)
    assert comparison["wall_median_error"] == pytest.approx(0.5)
    assert comparison["hit_rate_difference"] == pytest.approx(0.05)
    assert comparison["bytes_ratio"] is None and comparison["stall_ratio"] is None
    part = validated(moecache, trace, table, "--hardware", device, *names, "--tokens", "5:8")
    assert part["tokens"] == 3


@pytest.mark.parametrize(
    ("columns", "options", "said"),
    [
        ({"wall_ms": range(3)}, [], "15 decoded tokens and the measured table 3 rows"),
        ({"wall_ms": ["fast"] * 15}, [], "row 1, wall_ms='fast'"),
        ({"time": range(15)}, [], "--columns"),
        (None, [], "there is no such file"),
        ({"wall_ms": range(15)}, ["--columns", "{wal_ms: time}"], "Did you mean 'wall_ms'"),
        ({"wall_ms": range(15)}, ["--tokens", "20:30"], "none of 15 tokens"),
        ({"wall_ms": range(15)}, ["--execute", "as_they_come"], "Did you mean 'as_they_arrive'"),
    ],
)
def test_tables_that_do_not_fit_are_refused(
    columns: Any, options: list[str], said: str, tmp_path: Path, trace: Path, moecache: Moecache
) -> None:
    table = tmp_path / "measured.csv"
    if columns is not None:
        write(table, columns)
    settings = ["--hardware", profile(tmp_path), "--capacity", CAPACITY]
    assert said in moecache("validate", trace, table, *settings, *options, code=2)


def test_a_fit_finds_the_figures_that_made_the_measurements(
    tmp_path: Path, trace: Path, moecache: Moecache
) -> None:
    link = {"link_lanes": 2, "link_bytes_per_s": 1e8}
    true = profile(tmp_path, **link, link_lane_bytes_per_s=3e6, memory_bytes_per_s=2e7)
    columns = dict(measured_by(trace, load_hardware(str(true))).columns)
    # Management has a column of its own, fitted per byte read.
    columns["mgmt_ms"] = columns["read_bytes"] * 1e-30
    table = write(tmp_path / "measured.csv", columns)
    start = profile(tmp_path, "start", **link, link_lane_bytes_per_s=5e6)
    out = tmp_path / "fitted.yaml"
    command = ["profile", "device", trace, table, "--out", out, "--base", start]
    command += ["--capacity", CAPACITY, "--execute", "as_they_arrive", "--reads", "2"]
    command += ["--fit", "link_lane_bytes_per_s,memory_bytes_per_s,link_bytes_per_s", "--json"]
    report = moecache.json(*list(map(str, command)))
    fitted = load_hardware(str(out))
    assert fitted.link_lane_bytes_per_s == pytest.approx(3e6, rel=0.01)
    assert fitted.memory_bytes_per_s == pytest.approx(2e7, rel=0.02)
    low, high = report["intervals"]["link_lane_bytes_per_s"]
    assert low <= 3e6 * 1.001 and high >= 3e6 * 0.999
    # Two lanes of 3 MB/s never saturate a link of 100 MB/s.
    assert report["says_nothing_of"] == ["link_bytes_per_s"]
    assert fitted.sources["link_lane_bytes_per_s"].startswith("fitted on 1 runs")
    (run,) = report["runs"].values()
    assert run["stall_median_error"] < 0.01


@pytest.mark.parametrize(("name", "reads"), [("qwen", "3"), ("gemma", "2")])
def test_the_shipped_phone_profile_predicts_the_phone(
    name: str, reads: str, moecache: Moecache
) -> None:
    trace = traces.published(f"{name}.route.csv")
    table = trace.parent.parent / "phone" / f"{name}.per_token.csv"
    command = ["validate", str(trace), str(table), "--hardware", "oneplus-15r", "--json"]
    command += ["--capacity", "4000MiB", "--execute", "as_they_arrive"]
    comparison = moecache.json(*command, "--reads_per_expert", reads)
    assert comparison["bytes_ratio"] == pytest.approx(1, abs=0.01)
    assert comparison["bytes_correlation"] >= 0.999
    assert abs(comparison["hit_rate_difference"]) < 0.001
    assert comparison["stall_median_error"] <= 0.08
    assert comparison["stall_ratio"] == pytest.approx(1, abs=0.06)
    assert comparison["wall_median_error"] <= 0.09


def test_a_tokens_wall_is_stall_management_and_compute(trace: Path) -> None:
    """A microsecond a loaded byte is a millisecond for each of an expert's 1,000 bytes."""
    slow = replace(traces.HARDWARE, load_overhead_s_per_byte=1e-6)
    columns, plain = measured_by(trace, slow).columns, measured_by(trace, traces.HARDWARE).columns
    assert columns["mgmt_ms"] == pytest.approx(1e-3 * columns["read_bytes"])
    assert columns["mgmt_ms"].any() and not plain["mgmt_ms"].any()
    parts = columns["stall_ms"] + columns["mgmt_ms"] + columns["compute_ms"]
    assert columns["wall_ms"] == pytest.approx(parts)
    assert columns["compute_ms"] == pytest.approx(plain["compute_ms"])


def test_management_is_fitted_on_the_tokens_that_are_asked_for(trace: Path) -> None:
    slow = replace(traces.HARDWARE, load_overhead_s_per_byte=1e-6)
    columns, run = dict(measured_by(trace, slow).columns), load_trace(str(trace))
    columns["mgmt_ms"] = columns["mgmt_ms"] * np.where(np.arange(15) < 10, 1, 9)
    setting = setting_of(run, traces.HARDWARE, ENGINE, 2)
    measured = Measured("run", run, setting, Series(columns), slice(0, 10))
    fitted, *_ = fit([measured], traces.HARDWARE, ["memory_bytes_per_s"])
    assert fitted.load_overhead_s_per_byte == pytest.approx(1e-6)

"""`moecache validate` of one run: by hand, on the clock itself, on a phone."""

from __future__ import annotations

import csv
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from pandas import DataFrame

from lm_eval_moecache.records.hardware import Hardware, load_hardware
from lm_eval_moecache.trace.importers import load_trace
from moecache_plan.validation import Ran, simulate
from tests.conftest import Moecache
from tests.engine import traces

EXACT = {
    **{"tokens": 15, "bytes_ratio": 1, "bytes_correlation": 1, "hit_rate_difference": 0},
    **{"stall_ratio": 1, "stall_median_error": 0, "wall_ratio": 1, "wall_median_error": 0},
}
CAPACITY = "12kB"
ENGINE = Ran(CAPACITY, execute="as_they_arrive", reads_per_expert=2)


def profile(folder: Path, name: str = "device", **changes: object) -> Path:
    figures = {key: value for key, value in asdict(traces.HARDWARE).items() if value is not None}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({**figures, "name": name, **changes}))
    return path


def measured_by(trace: Path, hardware: Hardware) -> DataFrame:
    """Measurements of a device that matches the clock exactly."""
    run = load_trace(str(trace))
    return simulate(run, ENGINE.setting(run, hardware))


def write(path: Path, columns: Any, comment: str = "") -> Path:
    with path.open("w", newline="") as file:
        file.write(comment)
        rows = csv.writer(file)
        rows.writerow(columns)
        rows.writerows(zip(*(columns[name] for name in columns), strict=True))
    return path


def validated(moecache: Moecache, *options: object) -> dict[str, Any]:
    settings = ("--capacity", CAPACITY, "--execute", "as_they_arrive", "--reads_per_expert", "2")
    comparison: dict[str, Any] = moecache.json("validate", *options, *settings)
    return comparison


def test_a_device_that_is_as_the_clock_says_is_met_in_everything(
    tmp_path: Path, trace: Path, moecache: Moecache
) -> None:
    device = profile(tmp_path, link_lanes=2, link_lane_bytes_per_s=4e6)
    measured = measured_by(trace, load_hardware(str(device)))
    table = write(tmp_path / "measured.csv", measured, "# a comment\n")
    comparison = validated(moecache, trace, table, "--hardware", device)
    assert list(comparison) == list(EXACT)
    assert comparison == pytest.approx(EXACT, abs=1e-9)


def test_ratios_and_errors_are_ours_to_theirs(
    tmp_path: Path, trace: Path, moecache: Moecache
) -> None:
    device = profile(tmp_path)
    predicted = measured_by(trace, load_hardware(str(device)))
    slower = {"wall_ms": 2 * predicted["wall_ms"], "cache_hit_pct": predicted["cache_hit_pct"] - 5}
    table = write(tmp_path / "measured.csv", slower)
    comparison = validated(moecache, trace, table, "--hardware", device)
    assert comparison["wall_ratio"] == pytest.approx(0.5)
    assert comparison["wall_median_error"] == pytest.approx(0.5)
    assert comparison["hit_rate_difference"] == pytest.approx(0.05)
    assert comparison["bytes_ratio"] is None and comparison["stall_ratio"] is None


@pytest.mark.parametrize(
    ("columns", "options", "said"),
    [
        ({"wall_ms": range(3)}, [], "15 decoded tokens and the measured table 3 rows"),
        ({"wall_ms": ["fast"] * 15}, [], "row 1, wall_ms='fast'"),
        ({"time": range(15)}, [], "it has time. Allowed: a column of one of these names"),
        (None, [], "there is no such file"),
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
    columns, plain = measured_by(trace, slow), measured_by(trace, traces.HARDWARE)
    assert columns["mgmt_ms"].to_numpy() == pytest.approx(1e-3 * columns["read_bytes"])
    assert columns["mgmt_ms"].any() and not plain["mgmt_ms"].any()
    parts = columns["stall_ms"] + columns["mgmt_ms"] + columns["compute_ms"]
    assert columns["wall_ms"].to_numpy() == pytest.approx(parts)
    assert columns["compute_ms"].to_numpy() == pytest.approx(plain["compute_ms"])

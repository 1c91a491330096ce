"""`moecache profile device`: figures that made measurements are found again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lm_eval_moecache.records.hardware import load_hardware
from lm_eval_moecache.trace.importers import load_trace
from moecache_lab.device import Measured, fit_to
from tests.conftest import Moecache
from tests.engine import traces
from tests.plan.test_validate import CAPACITY, ENGINE, measured_by, profile, write


def test_a_fit_finds_the_figures_that_made_the_measurements(
    tmp_path: Path, trace: Path, moecache: Moecache
) -> None:
    link = {"link_lanes": 2, "link_bytes_per_s": 1e8}
    true = profile(tmp_path, **link, link_lane_bytes_per_s=3e6, memory_bytes_per_s=2e7)
    columns = measured_by(trace, load_hardware(str(true)))
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


def test_management_is_fitted_on_the_tokens_that_are_asked_for(trace: Path) -> None:
    slow = replace(traces.HARDWARE, load_overhead_s_per_byte=1e-6)
    columns, run = measured_by(trace, slow), load_trace(str(trace))
    columns["mgmt_ms"] = columns["mgmt_ms"] * np.where(np.arange(15) < 10, 1, 9)
    setting = ENGINE.setting(run, traces.HARDWARE)
    measured = Measured("run", run, setting, columns, slice(0, 10))
    fitted, *_ = fit_to([measured], traces.HARDWARE, ["memory_bytes_per_s"])
    assert fitted.load_overhead_s_per_byte == pytest.approx(1e-6)

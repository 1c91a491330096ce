"""Compares the clock with a phone's serial runs, whose routing is unknown: docs/how_true.md.

    python benchmarks/phone.py TRACES MEASURED

TRACES holds `qwen.route.csv` and `gemma.route.csv`, MEASURED the measurements of one OnePlus 15R
(`docs/bench-data` of Helldez/BigMoeOnEdge): `0712_<model>_<setting>.csv` are the serial runs.

Each token's bytes are known but not the layers that missed, so its loads are spread evenly over the
layers. `moecache validate` handles runs whose routing is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from grid import arguments, text_table
from scipy import optimize

from lm_eval_moecache.engine.virtual.costs import Costs, arrivals, read_shares
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.hardware import Hardware, load_hardware
from lm_eval_moecache.trace.importers import load_trace
from moecache_plan.validation import HIT, READ, WALL, Series, read_measured

READS = {"qwen": 3, "gemma": 2}
SERIAL_TOP_K = 8
FITTED = ("link_bytes_per_s", "memory_bytes_per_s")


@dataclass(frozen=True, slots=True)
class SerialRun:
    """A run of unknown routing that reads first, then computes."""

    name: str
    geometry: Geometry
    series: Series
    lanes: int
    reads: int

    def tok_per_s(self) -> float:
        return 1e3 * len(self.series) / float(self.series.columns[WALL].sum())

    def predicted(self, hardware: Hardware) -> float:
        """Return the tokens per second that a profile predicts from each token's bytes."""
        has_cache = bool(self.series.columns[HIT][-1] >= 0)
        # Without a cache nothing is committed or released.
        overrides = {} if has_cache else {"load_overhead_s_per_byte": 0.0}
        hardware = replace(hardware, link_lanes=self.lanes, **overrides)
        geometry, costs, now = self.geometry, Costs(hardware, self.geometry), 0.0
        lanes: Any = {
            "lanes": hardware.link_lanes,
            "lane_rate": hardware.lane_rate,
            "link_rate": hardware.link_rate,
            "latency_s": hardware.link_latency_s,
        }
        sizes = [levels[0] for levels in geometry.expert_bytes]
        for nbytes in self.series.columns[READ]:
            loads = nbytes / np.mean(sizes)
            bounds = np.round(np.arange(geometry.num_layers + 1) * loads / geometry.num_layers)
            for layer, count in enumerate(np.diff(bounds).astype(int).tolist()):
                now += costs.dense_s(layer, 1)
                if count:
                    now += hardware.load_overhead_s_per_byte * count * sizes[layer]
                    reads = [sizes[layer] * share for share in read_shares(self.reads)]
                    now += max(arrivals(tuple(np.repeat(reads, count).tolist()), **lanes))
                    now += hardware.wait_overhead_s
                now += costs.experts_s(layer, SERIAL_TOP_K, SERIAL_TOP_K)
        return len(self.series) / now


def serial_runs(traces: Path, measured: Path) -> list[SerialRun]:
    runs = []
    for model, reads in READS.items():
        geometry = load_trace(str(traces / f"{model}.route.csv")).geometry
        for file in sorted(measured.glob(f"0712_{model}_*.csv")):
            if not file.stem.endswith("_ov"):
                lanes = 2 if file.stem.endswith("_l2") else 4
                name, series = file.stem.removeprefix("0712_"), read_measured(file)
                runs.append(SerialRun(name, geometry, series, lanes, reads))
    return runs


def fit_serial(runs: Sequence[SerialRun], base: Hardware) -> Hardware:
    """Return the profile whose link and memory rates best fit the speeds of these runs."""

    def profile(logs: np.ndarray) -> Hardware:
        return replace(base, **dict(zip(FITTED, map(float, np.exp(logs)), strict=True)))

    def residuals(logs: np.ndarray) -> np.ndarray:
        hardware = profile(logs)
        return np.array([np.log(run.predicted(hardware) / run.tok_per_s()) for run in runs])

    start = np.log([getattr(base, name) for name in FITTED])
    return profile(optimize.least_squares(residuals, start, diff_step=0.02, max_nfev=12).x)


def main() -> None:
    options = arguments(__doc__, "traces", "measured", hardware="oneplus-15r")
    runs = serial_runs(options.traces, options.measured)
    base = load_hardware(options.hardware)
    of_qwen = fit_serial([run for run in runs if run.name.startswith("qwen")], base)
    rates = ", ".join(f"{name} {getattr(of_qwen, name) / 1e9:.2f}e9" for name in FITTED)
    rows = []
    for run in runs:
        real, stock, fitted = run.tok_per_s(), run.predicted(base), run.predicted(of_qwen)
        figures = f"{stock:.2f}", f"{stock / real:.3f}", f"{fitted:.2f}", f"{fitted / real:.3f}"
        rows.append([run.name, f"{real:.2f}", *figures])
    headers = ["serial run", "theirs, tok/s", "shipped", "/ theirs", "fitted on Qwen's", "/ theirs"]
    print(f"Fitted on Qwen's serial runs: {rates}.\n\n{text_table(headers, rows, others='--:')}")


if __name__ == "__main__":
    main()

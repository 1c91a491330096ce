"""Hold the clock against a phone: every figure of docs/how_true.md that is of it.

    python benchmarks/phone.py TRACES MEASURED [--fits]

TRACES holds `qwen.route.csv` and `gemma.route.csv`, MEASURED what one OnePlus 15R measured
(`docs/bench-data` of Helldez/BigMoeOnEdge): `<model>.per_token.csv` of the very runs that are
routed so, and `0712_<model>_<setting>.csv` of serial runs three days before, without a routing.

Of a serial run each token's bytes are known and not where they were missed: its loads are spread
evenly over its layers. `--fits` adds the rows that are fitted on one part and held against another.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from grid import text_table
from scipy import optimize

from lm_eval_moecache.algorithms.policy import load_policy
from lm_eval_moecache.analysis.validation import (
    HIT,
    READ,
    WALL,
    Series,
    compare,
    foretell,
    read_measured,
)
from lm_eval_moecache.engine.setting import AS_THEY_ARRIVE, Setting
from lm_eval_moecache.engine.virtual.clock import VirtualClock
from lm_eval_moecache.engine.virtual.link import VirtualLink
from lm_eval_moecache.profiling._fit import DEFAULT, Measured, fit, with_figures
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.hardware import Hardware, load_hardware
from lm_eval_moecache.records.sizes import parse_capacity
from lm_eval_moecache.trace.importers import load_trace

READS = {"qwen": 3, "gemma": 2}
ALL, FIRST, LAST = slice(None), slice(0, 64), slice(64, None)
SERIAL_TOP_K = 8
FITTED_SERIALLY = ("link_bytes_per_s", "memory_bytes_per_s")


def routed(model: str, traces: Path, measured: Path, hardware: Hardware, part: slice) -> Measured:
    """Return one run of which the routing is known, as its engine ran."""
    trace = load_trace(str(traces / f"{model}.route.csv"))
    setting = Setting(
        policy=load_policy("on_demand", {"eviction": "lru"}),
        capacity=parse_capacity("4000MiB", trace.geometry),
        hardware=hardware,
        execute=AS_THEY_ARRIVE,
        reads_per_expert=READS[model],
    )
    series = read_measured(measured / f"{model}.per_token.csv", {})
    return Measured(name=model, trace=trace, setting=setting, series=series, tokens=part)


def row(words: str, run: Measured, hardware: Hardware) -> str:
    """Return a row: stall and wall of the run's tokens, under a profile."""
    ours = foretell(run.trace, replace(run.setting, hardware=hardware)).part(run.tokens)
    found = compare(ours, run.series.part(run.tokens))
    figures = [
        found[f"{what}_{key}"] for what in ("stall", "wall") for key in ("ratio", "median_error")
    ]
    total, median, wall, wall_median = map(float, figures)  # type: ignore[arg-type]
    cells = f"{median:.1%} | {total:.3f} | {wall_median:.1%} | {wall:.3f}"
    return f"| {words} | {cells} |"


def fitted_rows(traces: Path, measured: Path, base: Hardware) -> list[str]:
    """Return the rows of profiles that were fitted on one part and held against another."""
    rows = []
    for model, other in (("qwen", "gemma"), ("gemma", "qwen")):
        runs = {
            part.start: routed(model, traces, measured, base, part) for part in (FIRST, LAST, ALL)
        }
        half = fit([runs[FIRST.start]], base, DEFAULT).hardware
        rows.append(row(f"fitted on {model}'s tokens 0 to 63, the other 64", runs[64], half))
        whole = fit([runs[None]], base, DEFAULT).hardware
        apart = routed(other, traces, measured, base, ALL)
        rows.append(row(f"fitted on {model}, foretelling {other}", apart, whole))
    return rows


@dataclass(frozen=True, kw_only=True, slots=True)
class SerialRun:
    """A run without a routing: reads first, then computes."""

    name: str
    geometry: Geometry
    series: Series
    lanes: int
    reads: int

    def tok_per_s(self) -> float:
        return 1e3 * len(self.series) / float(self.series.columns[WALL].sum())

    def foretold(self, hardware: Hardware) -> float:
        """Return the tokens a second that a profile foretells from each token's bytes."""
        has_cache = bool(self.series.columns[HIT][-1] >= 0)
        # Without a cache nothing is committed or released.
        managed = {} if has_cache else {"load_overhead_s_per_byte": 0.0}
        hardware = replace(hardware, link_lanes=self.lanes, **managed)
        geometry, clock = self.geometry, VirtualClock(hardware, self.geometry)
        link = VirtualLink(hardware, reads_per_expert=self.reads)
        sizes = [levels[0] for levels in geometry.expert_bytes]
        for nbytes in self.series.columns[READ]:
            loads = nbytes / np.mean(sizes)
            bounds = np.round(np.arange(geometry.num_layers + 1) * loads / geometry.num_layers)
            for layer, count in enumerate(np.diff(bounds).astype(int).tolist()):
                clock.dense(layer, 1)
                if count:
                    clock.load(count * sizes[layer])
                    link.batch([sizes[layer]] * count, clock.now)
                    clock.await_link(link.busy_until)
                clock.experts(layer, SERIAL_TOP_K, SERIAL_TOP_K)
        return len(self.series) / clock.now


def serial_runs(traces: Path, measured: Path) -> list[SerialRun]:
    found = []
    for model, reads in READS.items():
        geometry = load_trace(str(traces / f"{model}.route.csv")).geometry
        for file in sorted(measured.glob(f"0712_{model}_*.csv")):
            if not file.stem.endswith("_ov"):
                found.append(
                    SerialRun(
                        name=file.stem.removeprefix("0712_"),
                        geometry=geometry,
                        series=read_measured(file, {}),
                        lanes=2 if file.stem.endswith("_l2") else 4,
                        reads=reads,
                    )
                )
    return found


def fit_serial(runs: Sequence[SerialRun], base: Hardware) -> Hardware:
    """Return a profile whose link and memory come nearest to the speeds of these runs."""

    def profile(logs: np.ndarray) -> Hardware:
        return with_figures(base, dict(zip(FITTED_SERIALLY, map(float, np.exp(logs)), strict=True)))

    def residuals(logs: np.ndarray) -> np.ndarray:
        hardware = profile(logs)
        return np.array([np.log(run.foretold(hardware) / run.tok_per_s()) for run in runs])

    start = np.log([getattr(base, name) for name in FITTED_SERIALLY])
    return profile(optimize.least_squares(residuals, start, diff_step=0.02, max_nfev=12).x)


def serial_table(traces: Path, measured: Path, base: Hardware) -> str:
    runs = serial_runs(traces, measured)
    of_qwen = fit_serial([run for run in runs if run.name.startswith("qwen")], base)
    rates = ", ".join(f"{name} {getattr(of_qwen, name) / 1e9:.2f}e9" for name in FITTED_SERIALLY)
    rows = []
    for run in runs:
        theirs = run.tok_per_s()
        ours, fitted = run.foretold(base), run.foretold(of_qwen)
        figures = f"{ours:.2f}", f"{ours / theirs:.3f}", f"{fitted:.2f}", f"{fitted / theirs:.3f}"
        rows.append([run.name, f"{theirs:.2f}", *figures])
    headers = ["serial run", "theirs, tok/s", "shipped", "/ theirs", "fitted on Qwen's", "/ theirs"]
    told = text_table(headers, rows, others="--:")
    return f"Fitted on Qwen's serial runs: {rates}.\n\n{told}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", type=Path)
    parser.add_argument("measured", type=Path)
    parser.add_argument("--hardware", default="oneplus-15r")
    parser.add_argument("--fits", action="store_true", help="also what is fitted: some minutes")
    options = parser.parse_args()
    base = load_hardware(options.hardware)
    print("| | stall, median error | all stalls | wall, median error | all walls |")
    print("|---|--:|--:|--:|--:|")
    for model in READS:
        run = routed(model, options.traces, options.measured, base, ALL)
        print(row(f"`{base.name}`, {model}", run, base), flush=True)
    for line in fitted_rows(options.traces, options.measured, base) if options.fits else ():
        print(line, flush=True)
    print("\n" + serial_table(options.traces, options.measured, base))


if __name__ == "__main__":
    main()

"""Fits a profile's few effective figures to what a device measured, with intervals.

Each figure has a physical meaning and is one for all tokens and models; nothing is fitted per
token. The clock itself is the model: every guess replays the routings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from jsonargparse import Namespace
from scipy import optimize, stats

from lm_eval_moecache.analysis.validation import (
    MANAGEMENT,
    READ,
    STALL,
    WALL,
    Series,
    Values,
    compare,
    foretell,
    read_measured,
    read_tokens,
    same_tokens,
    setting_of,
)
from lm_eval_moecache.engine.setting import MOST_READS, Setting
from lm_eval_moecache.records.hardware import Hardware, load_hardware
from lm_eval_moecache.records.numbers import finite, read_count, unknown
from lm_eval_moecache.trace.importers import load_trace
from lm_eval_moecache.trace.trace import Trace

FITTED = (
    "link_bytes_per_s",
    "link_lane_bytes_per_s",
    "link_latency_s",
    "memory_bytes_per_s",
    "kernel_overhead_s",
    "layer_overhead_s",
)
DEFAULT = ("link_lane_bytes_per_s", "memory_bytes_per_s")
BY_COLUMN = "load_overhead_s_per_byte"
"""Not fitted: where the engine measures its management, it is that over the bytes read."""
ALIKE, WIDE = 0.9, 2.0
_MOST, _STEP = 30, 0.03


class Measured(NamedTuple):
    """One measured run: its routing, how its engine ran, and the tokens that are fitted on."""

    name: str
    trace: Trace
    setting: Setting
    series: Series
    tokens: slice

    def beside(self, hardware: Hardware) -> tuple[Series, Series]:
        """Return those tokens as this hardware would take them, and as they were measured."""
        ours = foretell(self.trace, replace(self.setting, hardware=hardware))
        return same_tokens(ours, self.series, self.tokens)


def fit_to_files(profile_name: str, arguments: Namespace) -> tuple[Hardware, dict[str, Any]]:
    """Fit to measured tables; return the profile, and how certain each figure is.

    `cannot_tell_apart` are pairs of figures, and how their errors go together; `says_nothing_of`
    those whose interval spans a factor of two and more.
    """
    runs, base = _measured_runs(arguments)
    names = DEFAULT if arguments.fit is None else tuple(arguments.fit.split(","))
    fitted, intervals, alike = fit(runs, base, names)
    where = f"{len(runs)} runs ({', '.join(run.name for run in runs)}), tokens {arguments.tokens}"
    sources = dict(base.sources)
    for name, (low, high) in intervals.items():
        sources[name] = f"fitted on {where}; 95% within {low:.3g} to {high:.3g}"
    if fitted.load_overhead_s_per_byte != base.load_overhead_s_per_byte:
        sources[BY_COLUMN] = f"measured on {where}: mgmt_ms over read_bytes"
    profile = replace(fitted, name=profile_name, source=sources)
    report = {
        "figures": {name: getattr(profile, name) for name in names},
        "intervals": intervals,
        "cannot_tell_apart": alike,
        "says_nothing_of": [name for name, (low, high) in intervals.items() if high > WIDE * low],
        "runs": {run.name: compare(*run.beside(profile)) for run in runs},
    }
    return profile, finite(report)


def _measured_runs(arguments: Namespace) -> tuple[list[Measured], Hardware]:
    files = getattr(arguments, "from")
    if len(files) % 2:
        raise ValueError(f"from={files!r} must be pairs: TRACE MEASURED [TRACE MEASURED ...].")
    for key in ("base", "capacity"):
        if getattr(arguments, key) is None:
            raise ValueError(f"--from needs --{key} with it.")
    given = arguments.reads.split(",")
    reads = [read_count("reads", each, least=1, most=MOST_READS) for each in given]
    pairs = list(zip(files[::2], files[1::2], strict=True))
    reads = reads * len(pairs) if len(reads) == 1 else reads
    if len(reads) != len(pairs):
        raise ValueError(f"reads={arguments.reads!r} must be one number or one for each pair.")
    base, tokens, runs = load_hardware(arguments.base), read_tokens(arguments.tokens), []
    engine = SimpleNamespace(**{**vars(arguments), "policy": arguments.policy_of})
    for (trace_file, table), each in zip(pairs, reads, strict=True):
        trace = load_trace(trace_file)
        setting, series = setting_of(trace, base, engine, each), read_measured(Path(table), {})
        runs.append(Measured(Path(trace_file).name.split(".")[0], trace, setting, series, tokens))
        runs[-1].beside(base)  # refuses a table of another run
    return runs, base


def fit(
    runs: Sequence[Measured], start: Hardware, names: Sequence[str]
) -> tuple[Hardware, dict[str, list[float]], list[list[Any]]]:
    """Return the profile that comes nearest to stall and wall of all runs' tokens.

    With it the 95% interval of each figure, from the curvature at the best fit, tokens taken as
    independent; and pairs of figures that the data cannot tell apart.

    What is made small is the logarithm of ours / measured, of each token and of all stalls
    together, robustly: a token that stalls for the device's own reasons counts little. Raises
    ValueError for a name that cannot be fitted.
    """
    for name in names:
        if name not in FITTED:
            raise unknown("fit", name, FITTED)
    # Where to begin with figures that the profile leaves out or has at 0.
    begun = {
        "link_lane_bytes_per_s": start.link_lane_bytes_per_s or start.link_rate / start.link_lanes,
        "link_latency_s": start.link_latency_s or 1e-5,
        "layer_overhead_s": start.layer_overhead_s or 1e-4,
        "kernel_overhead_s": start.kernel_overhead_s or 1e-6,
    }
    figures = {name: value for name, value in begun.items() if name in names}
    if all({MANAGEMENT, READ} <= run.series.columns.keys() for run in runs):
        parts = [run.series.part(run.tokens).columns for run in runs]
        spent = sum(float(part[MANAGEMENT].sum()) for part in parts) / 1e3
        figures[BY_COLUMN] = spent / sum(float(part[READ].sum()) for part in parts)
    start = with_figures(start, figures)

    def profile(logs: Values) -> Hardware:
        return with_figures(start, dict(zip(names, map(float, np.exp(logs)), strict=True)))

    def residuals(logs: Values) -> Values:
        return np.concatenate([_residuals(run, profile(logs)) for run in runs])

    def jacobian(logs: Values) -> Values:
        # Both ways, and by steps that a clock of discrete events feels.
        steps = _STEP * np.eye(len(logs))
        ups, downs = ([residuals(logs + sign * step) for step in steps] for sign in (1, -1))
        slopes: Values = (np.array(ups) - np.array(downs)).T / (2 * _STEP)
        return slopes

    best = optimize.least_squares(
        residuals,
        np.log([getattr(start, name) for name in names]),
        jac=jacobian,
        loss="soft_l1",
        f_scale=0.15,
        max_nfev=_MOST,
        xtol=1e-3,
        ftol=1e-4,
    )
    freedom = max(len(best.fun) - len(names), 1)
    covariance = np.linalg.pinv(best.jac.T @ best.jac) * (2 * best.cost / freedom)
    errors = np.sqrt(np.diag(covariance))
    # A figure that moves nothing has a curvature of nothing, which pinv would call certain.
    errors = np.where(np.abs(best.jac).sum(0) < 1e-6 * len(best.fun), np.inf, errors)
    width = float(stats.t.ppf(0.975, freedom)) * errors
    with np.errstate(over="ignore"):
        ends = np.exp([best.x - width, best.x + width]).T
    alike = []
    for (i, one), (j, other) in combinations(enumerate(names), 2):
        scale = errors[i] * errors[j]
        together = float(covariance[i, j] / scale) if 0 < scale < np.inf else 0.0
        if abs(together) > ALIKE:
            alike.append([one, other, together])
    return profile(best.x), dict(zip(names, ends.tolist(), strict=True)), alike


def with_figures(hardware: Hardware, figures: Mapping[str, float]) -> Hardware:
    """Return a profile with some of its figures replaced."""
    changes: dict[str, Any] = dict(figures)
    return replace(hardware, **changes)


def _residuals(run: Measured, hardware: Hardware) -> Values:
    ours, measured = run.beside(hardware)
    found = []
    for name in (STALL, WALL):
        if name in measured.columns and measured.columns[name].any():
            theirs = measured.columns[name]
            some = theirs > 0
            # What never stalls is as far off as a hundredth of the typical stall would be.
            least = 0.01 * float(np.median(theirs[some]))
            found.append(np.log(np.maximum(ours.columns[name][some], least) / theirs[some]))
            if name == STALL:
                # Their sum too, as one that weighs as half of them: most of a stall is in few.
                ratio = max(float(ours.columns[name].sum()), least) / float(theirs.sum())
                found.append(np.array([0.5 * np.sqrt(len(theirs)) * np.log(ratio)]))
    if not found:
        raise ValueError(f"{run.name}: there is neither stall_ms nor wall_ms to fit to.")
    return np.concatenate(found)

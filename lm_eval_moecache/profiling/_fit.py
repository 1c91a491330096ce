"""Fits a profile's few effective figures to what a device measured, with intervals.

Each figure has a physical meaning and is one for all tokens and models; nothing is fitted per
token. The clock itself is the model: every guess replays the routings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One measured run: its routing, how its engine ran, and the tokens that are fitted on."""

    name: str
    trace: Trace
    setting: Setting
    series: Series
    tokens: slice


@dataclass(frozen=True, kw_only=True, slots=True)
class Fitted:
    """A profile, and what the data say of each fitted figure."""

    hardware: Hardware
    intervals: dict[str, tuple[float, float]]
    """95% of each, from the curvature at the best fit; tokens taken as independent."""
    alike: list[tuple[str, str, float]]
    """Figures that the data cannot tell apart: pairs, and how their errors go together."""
    unknown: list[str]
    """Figures of which the data say nothing: their interval spans a factor of two and more."""


def fit_to_files(profile_name: str, arguments: Namespace) -> tuple[Hardware, dict[str, Any]]:
    """Fit to measured tables; return the profile, and how certain each figure is."""
    runs, base = _measured_runs(arguments)
    names = DEFAULT if arguments.fit is None else tuple(arguments.fit.split(","))
    fitted = fit(runs, base, names)
    where = f"{len(runs)} runs ({', '.join(run.name for run in runs)}), tokens {arguments.tokens}"
    sources = dict(base.sources)
    for name, (low, high) in fitted.intervals.items():
        sources[name] = f"fitted on {where}; 95% within {low:.3g} to {high:.3g}"
    if fitted.hardware.load_overhead_s_per_byte != base.load_overhead_s_per_byte:
        sources[BY_COLUMN] = f"measured on {where}: mgmt_ms over read_bytes"
    profile = replace(fitted.hardware, name=profile_name, source=sources)
    nearness = {}
    for run in runs:
        ours = foretell(run.trace, replace(run.setting, hardware=profile))
        nearness[run.name] = compare(*same_tokens(ours, run.series, run.tokens))
    report = {
        "figures": {name: getattr(profile, name) for name in names},
        "intervals": {name: list(pair) for name, pair in fitted.intervals.items()},
        "cannot_tell_apart": [list(pair) for pair in fitted.alike],
        "says_nothing_of": fitted.unknown,
        "runs": nearness,
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
    engine = SimpleNamespace(
        policy=arguments.policy_of,
        eviction=arguments.eviction,
        capacity=arguments.capacity,
        execute=arguments.execute,
    )
    for (trace_file, table), each in zip(pairs, reads, strict=True):
        trace = load_trace(trace_file)
        setting, series = setting_of(trace, base, engine, each), read_measured(Path(table), {})
        same_tokens(foretell(trace, setting), series, tokens)
        name = Path(trace_file).name.split(".")[0]
        runs.append(Measured(name=name, trace=trace, setting=setting, series=series, tokens=tokens))
    return runs, base


def fit(runs: Sequence[Measured], start: Hardware, names: Sequence[str]) -> Fitted:
    """Return the figures that come nearest to stall and wall of all runs' tokens.

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
    first = np.log([getattr(start, name) for name in names])

    def profile(logs: Values) -> Hardware:
        figures = np.exp(logs)
        return with_figures(start, dict(zip(names, map(float, figures), strict=True)))

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
        first,
        jac=jacobian,
        loss="soft_l1",
        f_scale=0.15,
        max_nfev=_MOST,
        xtol=1e-3,
        ftol=1e-4,
    )
    intervals, alike = _certainty(best, names)
    return Fitted(
        hardware=profile(best.x),
        intervals=intervals,
        alike=alike,
        unknown=[name for name, (low, high) in intervals.items() if high > WIDE * low],
    )


def with_figures(hardware: Hardware, figures: Mapping[str, float]) -> Hardware:
    """Return a profile with some of its figures replaced."""
    changes: dict[str, Any] = dict(figures)
    return replace(hardware, **changes)


def _residuals(run: Measured, hardware: Hardware) -> Values:
    ours = foretell(run.trace, replace(run.setting, hardware=hardware)).part(run.tokens)
    measured = run.series.part(run.tokens)
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


def _certainty(
    best: optimize.OptimizeResult, names: Sequence[str]
) -> tuple[dict[str, tuple[float, float]], list[tuple[str, str, float]]]:
    jacobian, freedom = best.jac, max(len(best.fun) - len(names), 1)
    spread = 2 * best.cost / freedom
    covariance = np.linalg.pinv(jacobian.T @ jacobian) * spread
    errors = np.sqrt(np.diag(covariance))
    # A figure that moves nothing has a curvature of nothing, which pinv would call certain.
    errors = np.where(np.abs(jacobian).sum(0) < 1e-6 * len(best.fun), np.inf, errors)
    width = float(stats.t.ppf(0.975, freedom)) * errors
    with np.errstate(over="ignore"):
        low, high = np.exp(best.x - width), np.exp(best.x + width)
    intervals = {name: (float(low[i]), float(high[i])) for i, name in enumerate(names)}
    alike = []
    for i, one in enumerate(names):
        for j in range(i + 1, len(names)):
            scale = errors[i] * errors[j]
            together = float(covariance[i, j] / scale) if 0 < scale < np.inf else 0.0
            if abs(together) > ALIKE:
                alike.append((one, names[j], together))
    return intervals, alike

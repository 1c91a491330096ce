"""The action `moecache profile device`: a profile's rates, fitted to measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pandas import DataFrame
from scipy import optimize, stats

from lm_eval_moecache.engine.setting import TOGETHER, Setting
from lm_eval_moecache.profiling.hardware import as_yaml, profile_path
from lm_eval_moecache.records.command import Report
from lm_eval_moecache.records.files import write_whole
from lm_eval_moecache.records.hardware import Hardware, load_hardware
from lm_eval_moecache.records.numbers import finite, read_count, unknown_name_error
from lm_eval_moecache.trace.importers import load_trace
from lm_eval_moecache.trace.trace import Trace
from moecache_plan.validation import (
    MANAGEMENT,
    READ,
    STALL,
    WALL,
    Ran,
    Values,
    closeness,
    read_measured,
    same_tokens,
    simulate,
)

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
"""Not fitted: where the engine measures its management time, that time per byte read."""
ALIKE, WIDE = 0.9, 2.0
_MOST, _STEP = 30, 0.03


class Measured(NamedTuple):
    """One measured run: its routing, its engine's setting and series, and the tokens to fit on."""

    name: str
    trace: Trace
    setting: Setting
    series: DataFrame
    tokens: slice

    def aligned(self, hardware: Hardware) -> tuple[DataFrame, DataFrame]:
        """Return those tokens as the clock predicts them on this hardware, and as measured."""
        ours = simulate(self.trace, replace(self.setting, hardware=hardware))
        return same_tokens(ours, self.series, self.tokens)


def profile_device(
    files: Sequence[str],
    *,
    out: str,
    base: str,
    capacity: str,
    reads: str = "1",
    tokens: str = ":",
    fit: str = ",".join(DEFAULT),
    policy: str = "on_demand",
    eviction: str = "lru",
    execute: str = TOGETHER,
) -> Report:
    """Fit a hardware profile's few effective rates to a device's measurements, with intervals.

    FILES are pairs: a routing trace, and the table of its tokens as `moecache validate` takes it.
    Each figure has a physical meaning and one value for all tokens and models; nothing is fitted
    per token. The clock itself is the model: every guess replays the routings.

    Tells how certain each fitted figure is: `cannot_tell_apart` lists pairs of figures with the
    correlation of their errors; `says_nothing_of` the figures whose interval spans more than a
    factor of two.

    Args:
        files: TRACE MEASURED [TRACE MEASURED ...]
        out: the fitted profile's file: NAME.yaml
        base: the profile to begin with
        capacity: the engine's cache capacity
        reads: reads an expert, or one number per pair, by commas
        tokens: FIRST:LAST to fit on
        fit: figures to fit, by commas
        policy: the engine's policy
        eviction: the engine's eviction
        execute: the engine's execution order
    """
    path, names = profile_path(out), tuple(fit.split(","))
    ran, begin = Ran(capacity, policy, eviction, execute), load_hardware(base)
    runs = _measured_runs(files, ran, begin, reads, read_tokens(tokens))
    fitted, intervals, confounded = fit_to(runs, begin, names)
    origin = f"{len(runs)} runs ({', '.join(run.name for run in runs)}), tokens {tokens}"
    sources = dict(begin.sources)
    for name, (low, high) in intervals.items():
        sources[name] = f"fitted on {origin}; 95% within {low:.3g} to {high:.3g}"
    if fitted.load_overhead_s_per_byte != begin.load_overhead_s_per_byte:
        sources[BY_COLUMN] = f"measured on {origin}: mgmt_ms over read_bytes"
    profile = replace(fitted, name=path.stem, source=sources)
    write_whole(path, as_yaml({k: v for k, v in asdict(profile).items() if v is not None}))
    report = {
        "figures": {name: getattr(profile, name) for name in names},
        "intervals": intervals,
        "cannot_tell_apart": confounded,
        "says_nothing_of": [name for name, (low, high) in intervals.items() if high > WIDE * low],
        "runs": {run.name: closeness(*run.aligned(profile)) for run in runs},
    }
    return Report(report, as_yaml(finite(report)))


def _measured_runs(
    files: Sequence[str], ran: Ran, base: Hardware, reads: str, tokens: slice
) -> list[Measured]:
    if len(files) % 2:
        raise ValueError(f"files={files!r} must be pairs: TRACE MEASURED [TRACE MEASURED ...].")
    counts = [read_count("reads", count, least=1) for count in reads.split(",")]
    pairs = list(zip(files[::2], files[1::2], strict=True))
    counts = counts * len(pairs) if len(counts) == 1 else counts
    if len(counts) != len(pairs):
        raise ValueError(f"reads={reads!r} must be one number or one for each pair.")
    runs = []
    for (trace_file, table), count in zip(pairs, counts, strict=True):
        trace, series = load_trace(trace_file), read_measured(Path(table))
        setting = ran._replace(reads_per_expert=count).setting(trace, base)
        runs.append(Measured(Path(trace_file).name.split(".")[0], trace, setting, series, tokens))
        runs[-1].aligned(base)  # refuses a table of another run
    return runs


def read_tokens(text: str) -> slice:
    """Read `FIRST:LAST` as a Python slice: from 0, the last one left out."""
    first, colon, last = text.partition(":")
    if not colon:
        raise ValueError(f"tokens={text!r} must be FIRST:LAST, as in 0:64 or 64: .")
    start = read_count("tokens", first) if first else None
    return slice(start, read_count("tokens", last) if last else None)


def fit_to(
    runs: Sequence[Measured], start: Hardware, names: Sequence[str]
) -> tuple[Hardware, dict[str, list[float]], list[list[Any]]]:
    """Return the profile that fits stall and wall of all runs' tokens best.

    With it the 95% interval of each field, from the curvature at the best fit, tokens taken as
    independent; and pairs of fields that the data cannot separate.

    Minimises the logarithm of ours / measured, of each token and of all stalls together, by a
    robust loss: a token that stalls for the device's own reasons counts little. Raises ValueError
    for a name that cannot be fitted.
    """
    for name in names:
        if name not in FITTED:
            raise unknown_name_error("fit", name, FITTED)
    # Starting values of fields that the profile leaves out or has at 0.
    initial = {
        "link_lane_bytes_per_s": start.link_lane_bytes_per_s or start.link_rate / start.link_lanes,
        "link_latency_s": start.link_latency_s or 1e-5,
        "layer_overhead_s": start.layer_overhead_s or 1e-4,
        "kernel_overhead_s": start.kernel_overhead_s or 1e-6,
    }
    figures: dict[str, Any] = {name: initial[name] for name in names if name in initial}
    if all({MANAGEMENT, READ} <= set(run.series) for run in runs):
        parts = [run.series.iloc[run.tokens] for run in runs]
        management_s = sum(float(part[MANAGEMENT].sum()) for part in parts) / 1e3
        figures[BY_COLUMN] = management_s / sum(float(part[READ].sum()) for part in parts)
    start = replace(start, **figures)

    def profile(logs: Values) -> Hardware:
        figures: dict[str, Any] = dict(zip(names, np.exp(logs).tolist(), strict=True))
        return replace(start, **figures)

    def residuals(logs: Values) -> Values:
        return np.concatenate([_residuals(run, profile(logs)) for run in runs])

    def jacobian(logs: Values) -> Values:
        # Central differences, by steps large enough for a clock of discrete events.
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
    dof = max(len(best.fun) - len(names), 1)
    covariance = np.linalg.pinv(best.jac.T @ best.jac) * (2 * best.cost / dof)
    errors = np.sqrt(np.diag(covariance))
    # A field without effect has no curvature, which pinv would turn into certainty.
    errors = np.where(np.abs(best.jac).sum(0) < 1e-6 * len(best.fun), np.inf, errors)
    width = float(stats.t.ppf(0.975, dof)) * errors
    with np.errstate(over="ignore"):
        ends = np.exp([best.x - width, best.x + width]).T
    confounded = []
    for (i, first), (j, second) in combinations(enumerate(names), 2):
        scale = errors[i] * errors[j]
        correlation = float(covariance[i, j] / scale) if 0 < scale < np.inf else 0.0
        if abs(correlation) > ALIKE:
            confounded.append([first, second, correlation])
    return profile(best.x), dict(zip(names, ends.tolist(), strict=True)), confounded


def _residuals(run: Measured, hardware: Hardware) -> Values:
    ours, measured = run.aligned(hardware)
    residuals = []
    for name in (STALL, WALL):
        if name in measured and measured[name].any():
            observed = measured[name].to_numpy()
            positive = observed > 0
            # Ours is at least a hundredth of the typical value, so that a stall of 0 has a log.
            floor = 0.01 * float(np.median(observed[positive]))
            residuals.append(
                np.log(np.maximum(ours[name].to_numpy()[positive], floor) / observed[positive])
            )
            if name == STALL:
                # Their sum too, weighted like a quarter of them: few tokens hold most of the stall.
                ratio = max(float(ours[name].sum()), floor) / float(observed.sum())
                residuals.append(np.array([0.5 * np.sqrt(len(observed)) * np.log(ratio)]))
    if not residuals:
        raise ValueError(f"{run.name}: there is neither stall_ms nor wall_ms to fit to.")
    return np.concatenate(residuals)

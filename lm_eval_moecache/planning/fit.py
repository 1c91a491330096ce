"""Fits the constants of mechanisms to published speeds, one machine left out at a time."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import permutations
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import yaml

from lm_eval_moecache.planning.placement import hit_rate
from lm_eval_moecache.planning.published import Row, compare, predict, scale_by, summary
from lm_eval_moecache.planning.runtimes import (
    CONSTANTS,
    MECHANISMS,
    PREFILL,
    READ,
    Mechanisms,
    Spread,
)
from lm_eval_moecache.trace.importers import load_trace
from lm_eval_moecache.trace.trace import Trace
from lm_eval_moecache.trace.use import touched

START = {
    **{"card_share": 0.5, "host_share": 0.5, "link_share": 0.9, "drive_share": 0.8},
    **{"layer_us": 30.0, "host_layer_us": 100.0, "copy_layer_us": 150.0, "read_layer_us": 300.0},
    **{"context_us": 0.2, "prefill_compute_share": 0.25, "prefill_link_share": 0.7},
    **{"prefill_card_share": 0.3, "prefill_chunk_ms": 30.0},
}
"""Where fits begin, and what they are held to where rows say little."""
_HELD = 0.3
"""Standard error of a constant's logarithm that a row's is weighed against, inverted."""
_ROBUST = 0.1
"""Errors of log speed beyond this count by their size, not by its square: a median is asked for."""
_CURVE = 0.1
_POINTS = 32
"""Shares of a layer's experts at which a replay's hits are written down."""
_LEAST_ROWS, _LEAST_MACHINES = 8, 3
"""A group of fewer has no spread of its own."""


def begin_at(traces: Iterable[Path]) -> Mechanisms:
    """Return the constants before any row is seen, with the hits of replayed traces."""
    routings = {path.stem: hits_of(load_trace(str(path))) for path in sorted(traces)}
    return Mechanisms(constants=START, curve=_CURVE, routings=routings)


# --- hits ---


def hits_of(trace: Trace) -> dict[str, Any]:
    """Return the hits of decoding with an LRU cache a layer, at `_POINTS` sizes up to all experts.

    By reuse distances: an expert hits where fewer others of its layer were used since.
    """
    geometry, experts = trace.geometry, trace.columns.experts
    counts = np.zeros(geometry.num_experts + 1)
    stacks: list[list[int]] = [[] for _ in range(geometry.num_layers)]
    bounds = trace.row_bounds
    for event in range(len(bounds) - 1):
        stack = stacks[event % geometry.num_layers]
        used = experts[bounds[event] : bounds[event + 1]]
        decodes = len(used) == 1
        for expert in dict.fromkeys(used.ravel().tolist()):
            if expert in stack:
                place = stack.index(expert)
                stack.pop(place)
            else:
                place = geometry.num_experts
            if decodes:
                counts[place] += 1
            stack.insert(0, expert)
    hits = np.cumsum(counts)[:-1] / counts.sum()
    sizes = np.arange(1, geometry.num_experts + 1) / geometry.num_experts
    points = np.arange(1, _POINTS + 1) / _POINTS
    found = np.interp(points, np.r_[0, sizes], np.r_[0, hits])
    return {
        "experts": geometry.num_experts,
        "top_k": geometry.top_k,
        "popularity_shape": _popularity_shape(trace),
        "hits": [round(float(hit), 4) for hit in found],
    }


def _popularity_shape(trace: Trace) -> float:
    """Return the shape with which `touched_share` is nearest to windows of the trace's tokens."""
    geometry = trace.geometry
    rows = int(np.bincount(trace.columns.layer).min())
    windows = [2**power for power in range(1, 13) if 2**power <= rows]
    share = geometry.top_k / geometry.num_experts
    shares = [touched(trace, window) for window in windows]

    def error(shape: float) -> float:
        found = 1 - (1 + np.array(windows) * share / shape) ** -shape
        return float(np.mean(np.log(found / shares) ** 2))

    return min((round(0.05 * 1.05**step, 4) for step in range(100)), key=error)


def known_hits(rows: Sequence[Row], known: Mechanisms) -> list[tuple[Row, float, float]]:
    """Return the rows whose hits and cache are both stated: (row, cached share, hit)."""
    found = []
    for row in rows:
        placed = row.placed(known)
        if row.hit is not None and placed.hit is not None and 0 < row.hit < 1 > placed.cached:
            found.append((row, placed.cached, row.hit))
    return found


def fit_curve(points: Sequence[tuple[Row, float, float]], known: Mechanisms) -> float:
    """Return the constant of the hit curve with the least median error of the misses."""
    if not points:
        return _CURVE

    def error(curve: float) -> float:
        trial = replace(known, curve=curve)
        return float(
            np.mean([abs(_log_misses(row, share, hit, trial)) for row, share, hit in points])
        )

    return min((round(0.02 * 1.05**step, 4) for step in range(60)), key=error)


def _log_misses(row: Row, share: float, hit: float, known: Mechanisms) -> float:
    return math.log((1 - hit_rate(row.model, share, known)) / (1 - hit))


# --- constants ---


def fit(rows: Sequence[Row], begin: Mechanisms) -> Mechanisms:
    """Return `begin` with its curve and constants fitted to rows.

    Least squares on the logarithm of the speed, robust against outliers; each machine weighs by
    the square root of its rows.
    """
    curve = fit_curve(known_hits(rows, begin), begin)
    known = replace(begin, curve=curve)
    constants = dict(begin.constants)
    decode = [name for name in CONSTANTS if name not in PREFILL]
    placed = [row.placed(known) for row in rows]
    works = [
        (row, row.work(where))
        for row, where in zip(rows, placed, strict=True)
        if row.decode is not None and not row.runtime.is_ideal
    ]
    constants |= _least_squares(
        decode,
        [(row, row.decode or 1.0) for row, _ in works],
        lambda index, values: (
            works[index][0].runtime.factor / sum(works[index][1].seconds(values).values())
        ),
        begin.constants,
    )
    prompts = [
        (row, work)
        for row, where in zip(rows, placed, strict=True)
        if (work := row.prompt_work(where, known)) is not None and row.prefill and row.prompt
    ]
    constants |= _least_squares(
        list(PREFILL),
        [(row, row.prefill or 1.0) for row, _ in prompts],
        lambda index, values: (prompts[index][0].prompt or 1) / prompts[index][1].seconds(values),
        # Reads of the drive are fitted on decoding.
        {**begin.constants, **constants},
    )
    return replace(known, constants=constants)


def _least_squares(
    names: Sequence[str],
    measured: Sequence[tuple[Row, float]],
    speed: Any,
    begin: Mapping[str, float],
) -> dict[str, float]:
    from scipy.optimize import least_squares

    if not measured:
        return {name: begin[name] for name in names}
    machines = Counter(row.key for row, _ in measured)
    weights = np.array([machines[row.key] ** -0.25 for row, _ in measured])
    logs = np.log([value for _, value in measured])
    start = np.log([START[name] for name in names])

    def errors(point: Any) -> Any:
        values = {**begin, **dict(zip(names, np.exp(point).tolist(), strict=True))}
        found = np.log([speed(index, values) for index in range(len(measured))])
        return np.concatenate([weights * (found - logs), _HELD * (point - start)])

    point = least_squares(errors, start, loss="soft_l1", f_scale=_ROBUST).x
    return {name: float(value) for name, value in zip(names, np.exp(point), strict=True)}


def fit_all(rows: Sequence[Row], begin: Mechanisms) -> tuple[Mechanisms, dict[str, Any]]:
    """Return the constants of all rows with their spreads, and every row as forecast without it.

    A row is forecast by the constants of the other machines' rows; ranges are of all of them.
    """
    predicted: list[dict[str, Any]] = [{} for _ in rows]
    misses = []
    for key in sorted({row.key for row in rows}):
        others = fit([row for row in rows if row.key != key], begin)
        mine = [index for index, row in enumerate(rows) if row.key == key]
        for index in mine:
            predicted[index] = predict(rows[index], others)
        points = known_hits([rows[index] for index in mine], others)
        misses += [math.exp(abs(_log_misses(*point, others))) for point in points]
    known = replace(fit(rows, begin), spreads=spread_of(predicted))
    for row in predicted:
        found = known.spread(row["mechanism"], row["stated"])
        row["low"] = row["predicted_tok_s"] * found.low
        row["high"] = row["predicted_tok_s"] * found.high
    result = compare(predicted, [])
    result["hit_rates"] = {
        "rows": len(misses),
        "median_factor_of_misses": median(misses) if misses else None,
        "worst": max(misses, default=None),
    }
    return known, result


def spread_of(predicted: Sequence[Mapping[str, Any]]) -> dict[str, Spread]:
    """Return the spread of every group of rows that is large enough.

    `measured` is that of forecasts scaled by another row of the same machine, and `read, measured`
    where the drive's rate is scaled; `prefill` that of prompts.
    """
    groups: dict[str, list[tuple[str, float]]] = defaultdict(list)
    by_machine: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for row in predicted:
        if row["prefill_factor"] is not None:
            prefill = float(row["measured_prefill_tok_s"]) / row["predicted_prefill_tok_s"]
            groups["prefill"].append((row["key"], prefill))
        if row["factor"] is None:
            continue
        ratio = row["measured_tok_s"] / row["predicted_tok_s"]
        name = "read, measured" if row["mechanism"] == READ else "measured"
        by_machine[name, row["key"]].append(row)
        stated = "stated" if row["stated"] else "assumed"
        for name in ("all", row["mechanism"], f"{row['mechanism']}, {stated}"):
            groups[name].append((row["key"], ratio))
    for (name, key), mine in by_machine.items():
        pairs = [_scaled_ratio(one, other) for one, other in permutations(mine, 2)]
        # A machine with many rows has many pairs: each machine weighs as its rows.
        step = max(len(pairs) // max(len(mine), 1), 1)
        groups[name] += [(key, ratio) for ratio in sorted(pairs)[step // 2 :: step]]
    spreads = {}
    for name, group in groups.items():
        machines, ratios = {key for key, _ in group}, [ratio for _, ratio in group]
        whole = name in ("all", *MECHANISMS)
        if len(group) < _LEAST_ROWS or not (whole or len(machines) >= _LEAST_MACHINES):
            continue
        figures = summary(max(ratio, 1 / ratio) for ratio in ratios)
        low, high = np.quantile(ratios, (0.1, 0.9))
        spreads[name] = Spread(
            rows=len(group),
            machines=len(machines),
            median_factor=round(figures["median_factor"], 3),
            within={most: round(share, 3) for most, share in figures["within"].items()},
            low=round(min(float(low), 1.0), 3),
            high=round(max(float(high), 1.0), 3),
        )
    return spreads


def _scaled_ratio(row: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """Return measured over forecast of a row, scaled by another of its machine as `plan` does."""
    ratio, share = scale_by(
        other["measured_tok_s"], 1 / other["predicted_tok_s"] - other["drive_s"], other["drive_s"]
    )
    rest = 1 / row["predicted_tok_s"] - row["drive_s"]
    return float(row["measured_tok_s"] * (rest / ratio + row["drive_s"] / share))


# --- what is written ---


def as_yaml(known: Mechanisms, hit_rates: Mapping[str, Any]) -> str:
    """Return the file of the constants."""

    def rounded(value: float) -> float:
        return float(f"{value:.4g}")

    errors = {name: v and round(v, 3) for name, v in hit_rates.items()}
    data = {
        "constants": {name: rounded(known.constants[name]) for name in CONSTANTS},
        "hits": {"curve": known.curve, **errors, "routings": dict(known.routings)},
        "spreads": {name: asdict(known.spreads[name]) for name in sorted(known.spreads)},
    }
    head = (
        "# Written by `moecache profile runtimes --from results/runtimes/rows.csv`; do not edit.\n"
    )
    text = yaml.safe_dump(data, sort_keys=False, width=100, default_flow_style=None)
    return head + str(text)

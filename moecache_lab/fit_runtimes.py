"""Fits the constants of mechanisms to published speeds, a machine or a source left out a time."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import permutations
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import yaml

from lm_eval_moecache.records.runtimes import READ
from lm_eval_moecache.trace.importers import load_trace
from lm_eval_moecache.trace.trace import Trace
from lm_eval_moecache.trace.use import touched
from moecache_plan.forecast import PromptWork, Work, costs, scale_by
from moecache_plan.mechanisms import (
    CONSTANTS,
    DECODE,
    NEW_CARD,
    PREFILL,
    PREFILL_ALONE,
    PROCESSOR,
    PROMPTS,
    Mechanisms,
    Spread,
    bare_name,
)
from moecache_plan.placement import hit_rate
from moecache_plan.published import GROUPS, SpeedRow, predict, speeds_report, summary

START = {
    **{"card_share": 0.7, "host_share": 0.5, "link_share": 0.9, "drive_share": 0.8},
    **{"attention_share": 0.1, "cuda_layer_us": 45.0, "rocm_layer_us": 80.0},
    **{"metal_layer_us": 120.0, "eager_layer_us": 300.0, "host_layer_us": 100.0},
    **{"copy_layer_us": 150.0, "read_layer_us": 300.0, "card_state_us": 60.0},
    **{"host_state_us": 700.0, "host_attention_us": 160000.0, "host_shared_us": 20000.0},
    "crossing_us": 2500.0,
    **{"prefill_compute_share": 0.25, "prefill_link_share": 0.7, "prefill_card_share": 0.3},
    **{"prefill_chunk_ms": 30.0, "prefill_core_gflops": 50.0},
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
_COVERED, _ROUNDING = 0.8, 1e-9


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


def known_hits(rows: Sequence[SpeedRow], known: Mechanisms) -> list[tuple[SpeedRow, float, float]]:
    """Return the rows whose hits and cache are both stated: (row, cached share, hit)."""
    found = []
    for row in rows:
        placed = row.placed(known)
        if row.hit is not None and placed.hit is not None and 0 < row.hit < 1 > placed.cached:
            found.append((row, placed.cached, row.hit))
    return found


def fit_curve(points: Sequence[tuple[SpeedRow, float, float]], known: Mechanisms) -> float:
    """Return the constant of the hit curve with the least median error of the misses."""
    if not points:
        return _CURVE

    def error(curve: float) -> float:
        trial = replace(known, curve=curve)
        return float(
            np.mean([abs(_log_misses(row, share, hit, trial)) for row, share, hit in points])
        )

    return min((round(0.02 * 1.05**step, 4) for step in range(60)), key=error)


def _log_misses(row: SpeedRow, share: float, hit: float, known: Mechanisms) -> float:
    return math.log((1 - hit_rate(row.model, share, known)) / (1 - hit))


# --- constants ---


def fit(rows: Sequence[SpeedRow], begin: Mechanisms) -> Mechanisms:
    """Return `begin` with its curve and constants fitted to rows.

    Least squares on the logarithm of the speed, robust against outliers; each machine weighs by
    the square root of its rows.
    """
    curve = fit_curve(known_hits(rows, begin), begin)
    known = replace(begin, curve=curve)
    placed = [row.placed(known) for row in rows]
    works = [
        (row, row.work(where))
        for row, where in zip(rows, placed, strict=True)
        if row.decode is not None and not row.runtime.is_ideal
    ]
    constants = {**begin.constants, **_fit_decode(works)}
    prompts = [
        (row, work)
        for row, where in zip(rows, placed, strict=True)
        if (work := row.prompt_work(where, known)) is not None and row.prefill and row.prompt
    ]
    for names, is_alone in ((PREFILL, False), (PREFILL_ALONE, True)):
        chosen = [(row, work) for row, work in prompts if (work.core > 0) == is_alone]
        constants |= _fit_prefill(names, chosen, constants)
    return replace(known, constants=constants)


def _fit_prefill(
    names: Sequence[str],
    prompts: Sequence[tuple[SpeedRow, PromptWork]],
    others: Mapping[str, float],
) -> dict[str, float]:
    measured = np.log([row.prefill or 1.0 for row, _ in prompts])

    def errors(point: Any) -> Any:
        # Reads of the drive are fitted on decoding.
        values = {**START, **others, **dict(zip(names, np.exp(point).tolist(), strict=True))}
        found = [(row.prompt or 1) / work.seconds(values) for row, work in prompts]
        return np.log(found) - measured

    return _least_squares(names, [row for row, _ in prompts], errors)


def _fit_decode(works: Sequence[tuple[SpeedRow, Work]]) -> dict[str, float]:
    names = [name.removesuffix("_share").removesuffix("_us") for name in DECODE]
    units = np.array([[getattr(work, name) for name in names] for _, work in works])
    measured = np.log([(row.decode or 1.0) / row.runtime.factor for row, _ in works])

    def errors(point: Any) -> Any:
        cost = costs(dict(zip(DECODE, np.exp(point).tolist(), strict=True)))
        return -np.log(units @ [cost[name] for name in names]) - measured

    return _least_squares(DECODE, [row for row, _ in works], errors)


def _least_squares(names: Sequence[str], rows: Sequence[SpeedRow], errors: Any) -> dict[str, float]:
    """Return the constants at which `errors` of their logarithms are least."""
    from scipy.optimize import least_squares

    if not rows:
        return {name: START[name] for name in names}
    machines = Counter(row.key for row in rows)
    weights = np.array([machines[row.key] ** -0.25 for row in rows])
    start = np.log([START[name] for name in names])

    def held(point: Any) -> Any:
        return np.concatenate([weights * errors(point), _HELD * (point - start)])

    point = least_squares(held, start, loss="soft_l1", f_scale=_ROBUST).x
    return {name: float(value) for name, value in zip(names, np.exp(point), strict=True)}


def fit_all(rows: Sequence[SpeedRow], begin: Mechanisms) -> tuple[Mechanisms, dict[str, Any]]:
    """Return the constants of all rows with their spreads, and every row as forecast without it.

    A row is forecast by the constants of the other machines' rows, and by those of the other
    sources' rows: ranges are of whichever was further off.
    """
    predicted, misses = _left_out(rows, [row.key for row in rows], begin)
    sources = [_source(row) for row in rows]
    machines_of = defaultdict(set)
    for row in rows:
        machines_of[bare_name(row.machine.name)].add(row.key)
    for row, mine, other, source in zip(
        rows, predicted, _left_out(rows, sources, begin)[0], sources, strict=True
    ):
        worse = {f"{name}_off": _larger(mine[name], other[name]) for name in _FACTORS}
        is_new = not row.machine.is_processor and len(machines_of[bare_name(row.machine.name)]) < 2
        mine |= {**worse, "unit": source, "is_new_card": is_new}
    groups = groups_of(predicted)
    known = replace(fit(rows, begin), spreads=spreads_of(groups), cards=frozenset(machines_of))
    for mine in predicted:
        names = [known.group(mine["group"], mine["stated"])]
        names += [NEW_CARD] if mine["is_new_card"] and NEW_CARD in groups else []
        reach = max(_reach(groups, name, without=mine["unit"]) for name in names)
        speed = mine["predicted_tok_s"]
        mine["low"], mine["high"] = speed / reach, speed * reach
    result = speeds_report(predicted, [])
    result["hit_rates"] = {
        "rows": len(misses),
        "median_factor_of_misses": median(misses) if misses else None,
        "worst": max(misses, default=None),
    }
    return known, result


_FACTORS = ("factor", "prefill_factor")


def _larger(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else max(one, other)


def _source(row: SpeedRow) -> str:
    """Return the page that a row is from, without its parts and commits."""
    return re.sub(r"\s.*|[#?].*", "", row.fields["source"]) or row.key


def _left_out(
    rows: Sequence[SpeedRow], units: Sequence[str], begin: Mechanisms
) -> tuple[list[dict[str, Any]], list[float]]:
    """Return every row as forecast by a fit without its unit, and the factors of hits' misses."""
    predicted: list[dict[str, Any]] = [{} for _ in rows]
    misses = []
    for unit in sorted(set(units)):
        others = fit([row for row, its in zip(rows, units, strict=True) if its != unit], begin)
        mine = [index for index, its in enumerate(units) if its == unit]
        for index in mine:
            predicted[index] = predict(rows[index], others)
        points = known_hits([rows[index] for index in mine], others)
        misses += [math.exp(abs(_log_misses(*point, others))) for point in points]
    return predicted, misses


class Off(NamedTuple):
    """By which factor a forecast was off a row, and of which machine and source the row is."""

    machine: str
    source: str
    factor: float


Groups = Mapping[str, Sequence[Off]]


def groups_of(predicted: Sequence[Mapping[str, Any]]) -> Groups:
    """Return the groups of rows that are large enough, by name.

    `GROUP, measured` is that of forecasts scaled by another row of the same machine; `PROMPTS` are
    those of prompts.
    """
    groups: dict[str, list[Off]] = defaultdict(list)
    by_machine: dict[tuple[str, bool], list[Mapping[str, Any]]] = defaultdict(list)
    for row in predicted:
        if row["prefill_factor_off"] is not None:
            name = PROMPTS[row["group"] == PROCESSOR]
            groups[name].append(Off(row["key"], row["unit"], row["prefill_factor_off"]))
        if row["factor"] is None:
            continue
        by_machine[row["key"], row["mechanism"] == READ].append(row)
        stated = "stated" if row["stated"] else "assumed"
        names = ["all", stated, row["group"], f"{row['group']}, {stated}"]
        for name in names + [NEW_CARD] * row["is_new_card"]:
            groups[name].append(Off(row["key"], row["unit"], row["factor_off"]))
    for (key, _), mine in by_machine.items():
        ratios = defaultdict(list)
        for one, other in permutations(mine, 2):
            ratios[one["group"]].append((_scaled_ratio(one, other), one["unit"]))
        for name, pairs in ratios.items():
            # A row has a pair with every other of its machine: the middle ones, as many as rows.
            step = len(mine) - 1
            scaled = sorted(pairs)[step // 2 :: step]
            groups[f"{name}, measured"] += [
                Off(key, unit, max(ratio, 1 / ratio)) for ratio, unit in scaled
            ]
    return {name: group for name, group in groups.items() if _is_whole(name, group)}


def spreads_of(groups: Groups) -> dict[str, Spread]:
    """Return the spread of each group."""
    spreads = {}
    for name, group in groups.items():
        figures = summary(off.factor for off in group)
        inside = [off.factor <= _reach(groups, name, without=off.source) for off in group]
        spreads[name] = Spread(
            rows=len(group),
            machines=len({off.machine for off in group}),
            sources=len({off.source for off in group}),
            median_factor=round(figures["median_factor"], 3),
            within={most: round(share, 3) for most, share in figures["within"].items()},
            reach=round(_reach(groups, name), 3),
            coverage=round(sum(inside) / len(inside), 3),
        )
    return spreads


def _is_whole(name: str, group: Sequence[Off]) -> bool:
    is_large = len(group) >= _LEAST_ROWS
    return is_large and (name in GROUPS or len({off.machine for off in group}) >= _LEAST_MACHINES)


def _reach(groups: Groups, name: str, without: str | None = None) -> float:
    """Return the factor within which `_COVERED` of another source's rows are expected.

    The conformal quantile over sources: of n, each of the same weight however many rows it has,
    the factor at the share `_COVERED` x (1 + 1 / n), so that few make a range wider. Where inputs
    were assumed, no less than the whole group's.
    """
    group = sorted((off.factor, off.source) for off in groups[name] if off.source != without)
    if not group:
        return math.inf
    rows = Counter(source for _, source in group)
    left = _COVERED * (len(rows) + 1)
    reach = group[-1][0]
    for factor, source in group:
        left -= 1 / rows[source]
        if left <= _ROUNDING:
            reach = factor
            break
    whole = name.removesuffix(", assumed")
    return reach if whole == name else max(reach, _reach(groups, whole, without))


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
        "cards": sorted(known.cards),
        "spreads": {name: asdict(known.spreads[name]) for name in sorted(known.spreads)},
    }
    head = (
        "# Written by `moecache profile runtimes --from results/runtimes/rows.csv`; do not edit.\n"
    )
    text = yaml.safe_dump(data, sort_keys=False, width=100, default_flow_style=None)
    return head + str(text)

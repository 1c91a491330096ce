"""How far off forecasts of published losses are, each row forecast without its model.

`python benchmarks/published_losses.py` writes the figures: results/published_losses/judged.csv is
what `moecache choose --lossy` says of its forecasts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import mean, median
from typing import Any

from lm_eval_moecache.records.command import wrapped
from lm_eval_moecache.report.tables.text import padded
from moecache_plan.losses import LEAST_MODELS, NOISE, Band, Loss, band

Key = Callable[[Loss], tuple[str, ...]]


def of_rule(row: Loss) -> tuple[str, ...]:
    return row.rule, row.kind


def of_amount(row: Loss) -> tuple[str, ...]:
    return row.rule, row.kind, row.amount


FINEST: tuple[Key, ...] = (of_amount, of_rule)
"""What is alike, finest first: the first with three models is taken."""


# --- how far off, on models left out ---


def judge(rows: Sequence[Loss]) -> dict[str, Any]:
    """Forecast every row without its model, and return how far off each kind of forecast is.

    All on the same rows, those for which the finest forecast has three other models.
    """
    scored = [row for row in rows if row.is_share]
    cells: dict[Key, dict[tuple[str, ...], list[Loss]]] = {}
    for key in (*FINEST, _of_kind):
        for row in scored:
            cells.setdefault(key, {}).setdefault(key(row), []).append(row)
    known: dict[tuple[Any, ...], Band | None] = {}

    def without(row: Loss, keys: Sequence[Key]) -> Band | None:
        for key in keys:
            at = (key, key(row), row.model)
            if at not in known:
                known[at] = band(
                    other for other in cells[key][key(row)] if other.model != row.model
                )
            if (found := known[at]) is not None:
                return found
        return None

    told = [row for row in scored if without(row, FINEST)]
    forms: dict[str, Callable[[Loss], Band | None]] = {
        "rule, kind of task, amount": lambda row: without(row, FINEST),
        "rule, kind of task": lambda row: without(row, (of_rule,)),
        "kind of task": lambda row: without(row, (_of_kind,)),
    }
    misses = {name: [_miss(row, form(row)) for row in told] for name, form in forms.items()}
    misses["no loss"] = [_miss(row, None) for row in told]
    nothing = [each["error"] for each in misses["no loss"]]
    ours = misses["rule, kind of task, amount"]
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row, each in zip(told, ours, strict=True):
        groups.setdefault(of_rule(row), []).append({**each, "nothing": abs(row.points)})
    return {
        "rows": len(rows),
        "models": len({row.model for row in rows}),
        "shares": len(scored),
        "forecast": len(told),
        "forms": {name: _summary(told, each, nothing) for name, each in misses.items()},
        "rules": [
            {
                "rule": rule,
                "kind": kind,
                "rows": len(each),
                "models": len({row.model for row in told if of_rule(row) == (rule, kind)}),
                "median_points": median(row.points for row in told if of_rule(row) == (rule, kind)),
                "median_error": median(one["error"] for one in each),
                "no_loss_error": median(one["nothing"] for one in each),
                "covered": mean(one["covered"] for one in each),
            }
            for (rule, kind), each in sorted(groups.items())
        ],
        "no_forecast": [
            {"rule": rule, "kind": kind, "rows": len(each), "models": len({r.model for r in each})}
            for (rule, kind), each in sorted(cells[of_rule].items())
            if len({row.model for row in each}) < LEAST_MODELS
        ],
        "untested": [
            {"rule": rule, "kind": kind, "rows": len(each)}
            for (rule, kind), each in sorted(cells[of_rule].items())
            if len({row.model for row in each}) == LEAST_MODELS
        ],
        "constant_as_good": mean(
            constant["error"] <= each["error"]
            for constant, each in zip(misses["kind of task"], ours, strict=True)
        ),
        "noise_points": NOISE,
    }


def _of_kind(row: Loss) -> tuple[str, ...]:
    return (row.kind,)


def _miss(row: Loss, found: Band | None) -> dict[str, Any]:
    """Return by how many points a forecast errs, and whether its range holds the row."""
    if found is None:
        return {"error": abs(row.points), "covered": math.nan, "width": 0.0}
    middle, least, most = found.points(row.before)
    covered = least - 1e-9 <= row.points <= most + 1e-9
    return {"error": abs(row.points - middle), "covered": covered, "width": most - least}


def _summary(
    rows: Sequence[Loss], misses: Sequence[Mapping[str, Any]], nothing: Sequence[float]
) -> dict[str, float]:
    errors = [each["error"] for each in misses]
    by_cell: dict[tuple[str, ...], list[float]] = {}
    by_model: dict[str, list[float]] = {}
    for row, each in zip(rows, misses, strict=True):
        by_cell.setdefault((*of_rule(row), row.model), []).append(each["covered"])
        by_model.setdefault(row.model, []).append(each["covered"])
    return {
        "median_error": median(errors),
        "rms_error": math.sqrt(mean(error**2 for error in errors)),
        "within_2": mean(error <= 2 for error in errors),
        "within_5": mean(error <= 5 for error in errors),
        "no_better": mean(e >= n for e, n in zip(errors, nothing, strict=True)),
        "covered": mean(each["covered"] for each in misses),
        "covered_cells": mean(mean(each) for each in by_cell.values()),
        "covered_models": mean(mean(each) for each in by_model.values()),
        "median_width": median(each["width"] for each in misses),
    }


def losses_text(found: Mapping[str, Any]) -> str:
    """Return how far off the forecasts of losses are, as text."""
    forms = [
        (
            name,
            *(f"{form[key]:.1f}" for key in ("median_error", "rms_error")),
            *(f"{100 * form[key]:.0f}%" for key in ("within_2", "within_5", "no_better")),
            *(
                "-" if name == "no loss" else f"{100 * form[key]:.0f}%"
                for key in ("covered", "covered_cells", "covered_models")
            ),
            f"{form['median_width']:.0f}",
        )
        for name, form in found["forms"].items()
    ]
    heads = (
        *("forecast by the median of", "median error", "rms", "within 2", "within 5"),
        *("no better than none", "range holds", "a cell", "a model", "width"),
    )
    rules = [
        (
            *(row[name] for name in ("rule", "kind", "rows", "models")),
            *(f"{row[name]:.1f}" for name in ("median_points", "median_error", "no_loss_error")),
            f"{100 * row['covered']:.0f}%",
        )
        for row in found["rules"]
    ]
    titles = ("rule", "kind of task", "rows", "models", "points lost", "median error")
    none = [
        f"{row['rule']}, {row['kind']} ({row['rows']} rows, {row['models']} models)"
        for row in found["no_forecast"]
    ]
    untested = [f"{row['rule']}, {row['kind']} ({row['rows']} rows)" for row in found["untested"]]
    noise = found["noise_points"]
    intro = (
        f"{found['rows']} rows of {found['models']} models, {found['shares']} of them shares of "
        f"right answers; {found['forecast']} are forecast, each without its model (at least three "
        "other models must have the rule). Points are questions of 100."
    )
    about = (
        "range: holds eight of ten rows of the other models, each model counting once. Cell: one "
        "model, rule and kind of task. No better than none: rows for which a forecast of no loss "
        "is as close. The median of the kind of task alone is as close in "
        f"{100 * found['constant_as_good']:.0f}% of rows: a rule bounds a loss and does not "
        "predict it. "
        f"Equal configurations of one source differ by {noise:g} points (rms): no forecast is "
        "better than that."
    )
    tables = [padded(heads, forms), padded((*titles, "no loss errs", "range holds"), rules)]
    last = f"No forecast, too few models: {'; '.join(none)}."
    if untested:
        last += (
            f" Forecast from only three models, so not tested on a fourth: {'; '.join(untested)}."
        )
    parts = ["\n".join(wrapped(intro)), tables[0].strip(), "\n".join(wrapped(about))]
    return "\n\n".join([*parts, tables[1].strip(), "\n".join(wrapped(last))]) + "\n"

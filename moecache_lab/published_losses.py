"""How far off forecasts of published losses are, each row forecast without its model.

`python benchmarks/published_losses.py` writes the figures: results/published_losses/judged.csv is
what `moecache choose --lossy` says of its forecasts.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import product
from typing import Any

import pandas as pd

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
    cells: dict[Any, list[Loss]] = defaultdict(list)
    for key, row in product((*FINEST, _of_kind), scored):
        cells[key, key(row)].append(row)

    @cache
    def without(key: Key, cell: tuple[str, ...], model: str) -> Band | None:
        return band(other for other in cells[key, cell] if other.model != model)

    def forecast(row: Loss, *keys: Key) -> Band | None:
        """Return that of the first of these keys that has three other models."""
        return next(filter(None, (without(key, key(row), row.model) for key in keys)), None)

    told = [row for row in scored if forecast(row, *FINEST)]
    forms: dict[str, Sequence[Key]] = {
        "rule, kind of task, amount": FINEST,
        "rule, kind of task": (of_rule,),
        "kind of task": (_of_kind,),
        "no loss": (),
    }
    misses = {
        name: pd.DataFrame([_miss(row, forecast(row, *keys)) for row in told])
        for name, keys in forms.items()
    }
    ours, constant = misses["rule, kind of task, amount"], misses["kind of task"]
    alike = [(cell, cells[of_rule, cell]) for cell in sorted({*map(of_rule, scored)})]
    asked: list[dict[str, Any]] = [
        {"rule": rule, "kind": kind, "rows": len(each), "models": len({row.model for row in each})}
        for (rule, kind), each in alike
    ]
    return {
        "rows": len(rows),
        "models": len({row.model for row in rows}),
        "shares": len(scored),
        "forecast": len(told),
        "forms": {name: _summary(each) for name, each in misses.items()},
        "rules": [
            {
                "rule": rule,
                "kind": kind,
                "rows": len(each),
                "models": each["model"].nunique(),
                "median_points": float(each["points"].median()),
                "median_error": float(each["error"].median()),
                "no_loss_error": float(each["nothing"].median()),
                "covered": float(each["covered"].mean()),
            }
            for (rule, kind), each in ours.groupby(["rule", "kind"])
        ],
        "no_forecast": [each for each in asked if each["models"] < LEAST_MODELS],
        "untested": [each for each in asked if each["models"] == LEAST_MODELS],
        "constant_as_good": float((constant["error"] <= ours["error"]).mean()),
        "noise_points": NOISE,
    }


def _of_kind(row: Loss) -> tuple[str, ...]:
    return (row.kind,)


def _miss(row: Loss, found: Band | None) -> dict[str, Any]:
    """Return by how many points a forecast errs, and whether its range holds the row."""
    told = {name: getattr(row, name) for name in ("rule", "kind", "model", "points")}
    told |= {"nothing": abs(row.points)}
    if found is None:
        return {**told, "error": abs(row.points), "covered": math.nan, "width": 0.0}
    middle, least, most = found.points(row.before)
    covered = least - 1e-9 <= row.points <= most + 1e-9
    error = abs(row.points - middle)
    return {**told, "error": error, "covered": float(covered), "width": most - least}


def _summary(misses: pd.DataFrame) -> dict[str, float]:
    error, covered = misses["error"], misses["covered"]
    figures = {
        "median_error": error.median(),
        "rms_error": math.sqrt((error**2).mean()),
        "within_2": (error <= 2).mean(),
        "within_5": (error <= 5).mean(),
        "no_better": (error >= misses["nothing"]).mean(),
        "covered": covered.mean(),
        "covered_cells": misses.groupby(["rule", "kind", "model"])["covered"].mean().mean(),
        "covered_models": misses.groupby("model")["covered"].mean().mean(),
        "median_width": misses["width"].median(),
    }
    return {name: float(figure) for name, figure in figures.items()}


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
        only = "Forecast from only three models, so not tested on a fourth"
        last += f" {only}: {'; '.join(untested)}."
    parts = ["\n".join(wrapped(intro)), tables[0].strip(), "\n".join(wrapped(about))]
    return "\n\n".join([*parts, tables[1].strip(), "\n".join(wrapped(last))]) + "\n"

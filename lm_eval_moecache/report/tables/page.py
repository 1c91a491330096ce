"""Tables as one HTML page: self-contained, sortable and filterable, straight from a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_eval_moecache.algorithms.registry import AXES
from lm_eval_moecache.report.metrics import MEGABYTE
from lm_eval_moecache.report.runs.columns import Column, metric_column
from lm_eval_moecache.report.runs.run import ACCURACY, PARETO
from lm_eval_moecache.report.tables.leaderboard import Table
from lm_eval_moecache.report.tables.text import notes

_PAGE = Path(__file__).with_name("page.html")
# The metrics shown first; others follow in the table's order.
_FIRST = (ACCURACY, "tok_per_s", "ttft_ms", "tpot_ms", "miss_rate")
# The settings that name a run; all settings unfold below the name.
_NAMING = ("run", "policy", "capacity")
_PLACES = ("experiment", "tasks", "model")
_IDLE = ("standard", "none", "fetch")


def as_html(tables: Sequence[Table]) -> str:
    """Return the page: the leaderboard with settings folded, the other tables below it.

    Rows on the Pareto front come first, then the others, both in the table's order.
    """
    # Importing jinja2 takes as long as the rest of `moecache table`.
    from jinja2 import Environment

    first, *views = tables
    names = [column.name for column in first.columns]
    has_mean = ACCURACY in names

    def rank(place: int) -> int:
        """Order columns: Pareto mark, accuracy (or the scores, without a mean), speed, others."""
        name = names[place]
        if name == PARETO:
            return -1
        if metric_column(name) is None and name != ACCURACY and not has_mean:
            return 0
        return _FIRST.index(name) if name in _FIRST else len(_FIRST)

    # What is drawn above the table: accuracy, or the first score without a mean, against speed.
    rising = [column.name for column in first.columns if column.higher_is_better]
    scores = [ACCURACY] if has_mean else [name for name in rising if metric_column(name) is None]
    drawn = [names.index(name) for name in (*scores[:1], "tok_per_s") if name in names]
    settings = [j for j, column in enumerate(first.columns) if _kind(column) == "setting"]
    figures = sorted((j for j in range(len(names)) if j not in settings), key=rank)
    places, rows = first.places or [""] * len(first.rows), []
    for i, place in enumerate(places):
        row = _row(first, i, settings, figures) | {"place": place}
        if len(drawn) == 2:
            y, x = (first.rows[i][j] for j in drawn)
            row["point"] = [x.number, y.number, y.stderr] if None not in (x.raw, y.raw) else None
        rows.append(row)
    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
        _PAGE.read_text(encoding="utf-8")
    )
    text = template.render(
        title=first.title or "moecache results",
        about=first.about,
        board={
            "columns": [first.columns[j] for j in figures],
            "settings": [first.columns[j].heading for j in settings],
            "rows": sorted(rows, key=lambda row: not row["is_front"]),
            "places": list(dict.fromkeys(first.places)),
            # The choice of a place is one of these settings already.
            "chosen": [first.columns[j].heading for j in settings if _is_apart(first, j)],
            "apart": " and ".join(name.replace("_", " ") for name in first.apart),
            "axes": [first.columns[j].words or first.columns[j].heading for j in drawn[::-1]],
        },
        views=[
            {
                "title": view.title,
                "columns": view.columns,
                "rows": [_cells(view, i, range(len(view.columns))) for i in range(len(view.rows))],
            }
            for view in views
        ],
        notes=[note.replace("`", "") for note in notes(first)],
        kind=_kind,
    )
    return text + "\n"


def _is_apart(table: Table, j: int) -> bool:
    return len(set(table.places)) > 1 and table.columns[j].name in table.apart


def _row(table: Table, i: int, settings: Sequence[int], figures: Sequence[int]) -> dict[str, Any]:
    """Return a row of the leaderboard: a short name, and its distinguishing settings to unfold."""
    row = list(zip(table.columns, table.rows[i], strict=True))
    texts = [(row[j][0], str(row[j][1].raw or "")) for j in settings]
    filled = [(column, text) for column, text in texts if text]
    # What all rows shown have in common is above the table.
    apart = {table.columns[j].name for j in settings if _is_apart(table, j)}
    naming = [(column, text) for column, text in filled if column.name not in apart]
    others = []
    for column, text in naming:
        if column.name in AXES or column.name == "parameters":
            # An algorithm by its name; idle ones are left out.
            others.append("" if column.name in AXES and text in _IDLE else text)
        elif column.name not in (*_NAMING, *_PLACES):
            others.append(f"{column.heading.lower()} {text}")
    others += [text for column, text in naming if column.name in _PLACES]
    return {
        "name": " ".join(text for column, text in naming if column.name in _NAMING) or "run",
        "more": ", ".join(filter(None, others)),
        "settings": [(column.heading, text) for column, text in filled],
        "keys": [text for _, text in texts],
        "cells": _cells(table, i, figures),
        "is_front": any(c.name == PARETO and value.raw == "*" for c, value in row),
    }


def _cells(table: Table, i: int, places: Sequence[int]) -> list[dict[str, Any]]:
    cells = []
    for j in places:
        column, value = table.columns[j], table.rows[i][j]
        text, _, error = column.text(value).partition(" ±")
        if "[MB]" in column.words and value.number is not None:
            text = f"{value.number / MEGABYTE:.1f} MB"
        # The page sorts by `key`, where texts with a leading number are recognised.
        cell = {"key": "" if value.raw is None else str(value.raw), "label": column.heading}
        cell |= {"kind": _kind(column), "text": text, "error": error}
        cells.append({**cell, "is_best": (i, j) in table.best})
    return cells


def _kind(column: Column) -> str:
    if column.name == PARETO:
        return "pareto"
    if not column.is_number:
        return "setting"
    return {True: "number higher", False: "number lower", None: "number"}[column.higher_is_better]

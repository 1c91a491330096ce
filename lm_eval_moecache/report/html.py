"""Writes tables as one HTML page that needs nothing else: sortable, filterable, from a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment

from lm_eval_moecache.report.columns import AXES, MEGABYTE, Column, Value, metric_column
from lm_eval_moecache.report.render import shown
from lm_eval_moecache.report.tables import ACCURACY, PARETO, Table

_TEMPLATE = Path(__file__).with_name("page.html")
# What a reader asks first; other figures follow in the table's order.
_FIRST = (ACCURACY, "tok_per_s", "ttft_ms", "tpot_ms", "miss_rate")
# Of the settings these name a run; all of them open below the name.
_PLACES = ("experiment", "tasks", "model")
_IDLE = ("standard", "none", "fetch")
_NAMING = ("run", "policy", "capacity")


def as_html(tables: Sequence[Table]) -> str:
    """Return the page: the leaderboard with its settings folded, the other tables below it.

    Rows on the Pareto front come first, then the others, each in the table's order.
    """
    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
        _TEMPLATE.read_text(encoding="utf-8")
    )
    first = tables[0]
    text = template.render(
        title=first.title or "moecache results",
        about=first.about,
        board=_board(first),
        views=[_view(table) for table in tables[1:]],
    )
    return text + "\n"


def _board(table: Table) -> dict[str, Any]:
    columns = list(enumerate(table.columns))
    settings = [(j, c) for j, c in columns if not c.is_number and c.name != PARETO]
    figures = [(j, c) for j, c in columns if c.is_number or c.name == PARETO]
    has_mean = any(c.name == ACCURACY for _, c in columns)
    figures.sort(key=lambda pair: _rank(pair[1], has_mean))
    rows = [_row(table, i, settings, figures) for i in range(len(table.rows))]
    return {
        "heads": [_head(column) for _, column in figures],
        "settings": [column.heading for _, column in settings],
        "rows": sorted(rows, key=lambda row: not row["is_front"]),
    }


def _rank(column: Column, has_mean: bool) -> int:
    """The mark, accuracy (or, where there is no mean of several, the scores), speed, the rest."""
    if column.name == PARETO:
        return -1
    if metric_column(column.name) is None and column.name != ACCURACY and not has_mean:
        return 0
    return _FIRST.index(column.name) if column.name in _FIRST else len(_FIRST)


def _row(
    table: Table, i: int, settings: Sequence[tuple[int, Column]], figures: Sequence[Any]
) -> dict[str, Any]:
    values = table.rows[i]
    given = [(c, str(values[j].raw)) for j, c in settings if values[j].raw not in (None, "")]
    named = [text for c, text in given if c.name in _NAMING]
    others = [_told(c, text) for c, text in given if c.name not in (*_NAMING, *_PLACES)]
    others += [text for c, text in given if c.name in _PLACES]
    # The name is short; whatever tells two runs of one name apart is one click away.
    return {
        "name": " ".join(named) or "run",
        "more": ", ".join(filter(None, others)),
        "settings": [(c.heading, text) for c, text in given],
        "keys": [str(values[j].raw or "") for j, _ in settings],
        "cells": [_cell(table, i, j, column) for j, column in figures],
        "is_front": any(c.name == PARETO and values[j].raw == "*" for j, c in figures),
    }


def _told(column: Column, text: str) -> str:
    """An algorithm by its name, none where it does nothing; other settings with theirs."""
    if column.name in AXES:
        return "" if text in _IDLE else text
    return text if column.name == "parameters" else f"{column.heading.lower()} {text}"


def _view(table: Table) -> dict[str, Any]:
    rows = [
        [_cell(table, i, j, column) for j, column in enumerate(table.columns)]
        for i in range(len(table.rows))
    ]
    return {"title": table.title, "heads": [_head(c) for c in table.columns], "rows": rows}


def _head(column: Column) -> dict[str, str]:
    return {"text": column.heading, "kind": _kind(column), "words": column.words}


def _cell(table: Table, i: int, j: int, column: Column) -> dict[str, Any]:
    value = table.rows[i][j]
    text, _, error = brief(column, value).partition(" ±")
    return {
        # What the page sorts by; a text that begins with a number is told apart there.
        "key": "" if value.raw is None else str(value.raw),
        "label": column.heading,
        "kind": _kind(column),
        "text": text,
        "error": error,
        "is_best": (i, j) in table.best,
    }


def brief(column: Column, value: Value) -> str:
    """Return a figure with four digits (a score as tables show it), bytes in MB."""
    number = value.number
    if number is None or not column.words or column.name == ACCURACY or value.stderr is not None:
        return shown(column, value)
    if "[MB]" in column.words:
        return f"{_four_digits(number / MEGABYTE)} MB"
    return _four_digits(number)


def _four_digits(number: float) -> str:
    whole = len(str(int(abs(number))))
    return f"{number:.{max(0, 4 - whole)}f}"


def _kind(column: Column) -> str:
    if column.name == PARETO:
        return "pareto"
    if column.is_number:
        return {True: "number higher", False: "number lower", None: "number"}[
            column.higher_is_better
        ]
    return "setting"

"""Writes tables as Markdown, CSV, JSON and HTML, without anything that would change.

The HTML page needs nothing else: sortable, filterable, from a file.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_eval_moecache.algorithms.registry import AXES
from lm_eval_moecache.report.columns import ACCURACY, PARETO, Column, Value, metric_column, shown
from lm_eval_moecache.report.metrics import MEGABYTE
from lm_eval_moecache.report.tables import Table

_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_TEST = "a test over the documents (p ≤ 0.05)"
_LEGEND = f"Bold: significantly best of its column, by {_TEST}"
_FRONT = "`*`: not dominated by any other row in accuracy and tok/s, by"


def as_markdown(tables: Sequence[Table]) -> str:
    """Return the tables below each other; what their marks mean stands below each."""
    texts = []
    for table in tables:
        lines = [f"## {_in_markdown(table.title)}", ""] if table.title else []
        lines.append(line([_in_markdown(column.heading) for column in table.columns]))
        marks = [":-:" if c.name == PARETO else "---" for c in table.columns]
        numbers = zip(table.columns, marks, strict=True)
        lines.append(line(["--:" if c.is_number else mark for c, mark in numbers]))
        for i, row in enumerate(table.rows):
            cells = [_in_markdown(shown(*cell)) for cell in zip(table.columns, row, strict=True)]
            best = [f"**{text}**" if (i, j) in table.best else text for j, text in enumerate(cells)]
            lines.append(line(best))
        told = "; ".join(notes(table))
        texts.append("\n".join([*lines, "", *([f"{told}.", ""] if told else [])]))
    return "\n".join(texts)


def line(cells: Sequence[str]) -> str:
    """Return one line of a table in Markdown; the cells are in it already."""
    return f"| {' | '.join(cells)} |"


def notes(table: Table) -> list[str]:
    """Say what the marks of a table mean, and which of its rows are not ranked together."""
    found = [_LEGEND] if table.best else []
    if any(c.name == PARETO for c in table.columns):
        found.append(f"{_FRONT} {'that test' if table.best else _TEST}")
    found += ["±: standard error"] if any(v.stderr for row in table.rows for v in row) else []
    if table.apart:
        found.append(f"rows of different {', '.join(table.apart)} are not compared")
    return found


def _in_markdown(text: str) -> str:
    """Keep a cell one cell, and what it says text: names may come from anybody's files."""
    escaped = harmless(text.replace("\\", "\\\\").replace("|", "\\|"))
    return " ".join(escaped.splitlines())


def harmless(text: str) -> str:
    """Return a text of Markdown without HTML and without links, which may run what they like."""
    return text.replace("<", "&lt;").replace("[", "\\[")


def rows_as_markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows of one shape as a table; figures get four decimals, None is left empty."""

    def cell(value: Any) -> Any:
        if isinstance(value, str):
            return harmless(value)
        return f"{value:.4f}" if isinstance(value, float) else value

    cells = [[cell(value) for value in row.values()] for row in rows]
    return padded([harmless(name) for name in rows[0]], cells)


def padded(heads: Sequence[str], cells: Sequence[Sequence[Any]]) -> str:
    """Return a Markdown table whose columns line up in a terminal."""
    from pytablewriter import MarkdownTableWriter

    return str(MarkdownTableWriter(headers=heads, value_matrix=cells).dumps())


def as_csv(tables: Sequence[Table]) -> str:
    """Write the first table: full precision, one header line, `<column>_stderr` beside a score."""
    records = _records(tables[0])
    told = {name for record in records for name in record}
    names = []
    for column in tables[0].columns:
        names += [column.name, *({f"{column.name}_stderr"} & told)]
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    for record in records:
        # A spreadsheet would run a text like `=1+1` as a formula; numbers stay as they are.
        writer.writerow(
            {
                name: f"'{cell}" if isinstance(cell, str) and cell.startswith(_FORMULA) else cell
                for name, cell in record.items()
            }
        )
    return text.getvalue()


def as_json(tables: Sequence[Table]) -> str:
    """Return `{"title", "columns", "rows", "views": [{"title", "columns", "rows"}]}`."""
    first, *views = [
        {"title": each.title, "columns": [c.name for c in each.columns], "rows": _records(each)}
        for each in tables
    ]
    return json.dumps({**first, "views": views}, indent=1, ensure_ascii=False) + "\n"


def _records(table: Table) -> list[dict[str, Any]]:
    """Return the rows as plain mappings, standard errors under `<column>_stderr`."""
    records = []
    for row in table.rows:
        record: dict[str, Any] = {}
        for column, value in zip(table.columns, row, strict=True):
            record[column.name] = value.raw
            if value.stderr is not None:
                record[f"{column.name}_stderr"] = value.stderr
        records.append(record)
    return records


_PAGE = Path(__file__).with_name("page.html")
# What a reader asks first; other figures follow in the table's order.
_FIRST = (ACCURACY, "tok_per_s", "ttft_ms", "tpot_ms", "miss_rate")
# Of the settings these name a run; all of them open below the name.
_NAMING = ("run", "policy", "capacity")
_PLACES = ("experiment", "tasks", "model")
_IDLE = ("standard", "none", "fetch")


def as_html(tables: Sequence[Table]) -> str:
    """Return the page: the leaderboard with its settings folded, the other tables below it.

    Rows on the Pareto front come first, then the others, each in the table's order.
    """
    # Its import takes as long as the rest of `moecache table`.
    from jinja2 import Environment

    first, *views = tables
    has_mean = any(column.name == ACCURACY for column in first.columns)

    def rank(place: int) -> int:
        """The mark, accuracy (without a mean of several: the scores), speed, the rest."""
        name = first.columns[place].name
        if name == PARETO:
            return -1
        if metric_column(name) is None and name != ACCURACY and not has_mean:
            return 0
        return _FIRST.index(name) if name in _FIRST else len(_FIRST)

    is_setting = [_kind(column) == "setting" for column in first.columns]
    settings = [j for j, is_one in enumerate(is_setting) if is_one]
    figures = sorted((j for j, is_one in enumerate(is_setting) if not is_one), key=rank)
    rows = [_row(first, i, settings, figures) for i in range(len(first.rows))]
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
        },
        views=[
            {
                "title": view.title,
                "columns": view.columns,
                "rows": [_cells(view, i, range(len(view.columns))) for i in range(len(view.rows))],
            }
            for view in views
        ],
        notes=notes(first),
        kind=_kind,
    )
    return text + "\n"


def _row(table: Table, i: int, settings: Sequence[int], figures: Sequence[int]) -> dict[str, Any]:
    """Return a row of the leaderboard: a short name, and one click away what tells it apart."""
    row = list(zip(table.columns, table.rows[i], strict=True))
    told = [(row[j][0], str(row[j][1].raw or "")) for j in settings]
    given = [(column, text) for column, text in told if text]
    others = []
    for column, text in given:
        if column.name in AXES or column.name == "parameters":
            # An algorithm by its name, none where it does nothing.
            others.append("" if column.name in AXES and text in _IDLE else text)
        elif column.name not in (*_NAMING, *_PLACES):
            others.append(f"{column.heading.lower()} {text}")
    others += [text for column, text in given if column.name in _PLACES]
    return {
        "name": " ".join(text for column, text in given if column.name in _NAMING) or "run",
        "more": ", ".join(filter(None, others)),
        "settings": [(column.heading, text) for column, text in given],
        "keys": [text for _, text in told],
        "cells": _cells(table, i, figures),
        "is_front": any(c.name == PARETO and value.raw == "*" for c, value in row),
    }


def _cells(table: Table, i: int, places: Sequence[int]) -> list[dict[str, Any]]:
    cells = []
    for j in places:
        column, value = table.columns[j], table.rows[i][j]
        text, _, error = brief(column, value).partition(" ±")
        # By its key the page sorts; a text that begins with a number is told apart there.
        cell = {"key": "" if value.raw is None else str(value.raw), "label": column.heading}
        cell |= {"kind": _kind(column), "text": text, "error": error}
        cells.append({**cell, "is_best": (i, j) in table.best})
    return cells


def brief(column: Column, value: Value) -> str:
    """Return a figure with four digits (a score as tables show it), bytes in MB."""
    number = value.number
    if number is None or not column.words or column.name == ACCURACY or value.stderr is not None:
        return shown(column, value)
    unit = " MB" if "[MB]" in column.words else ""
    number = number / MEGABYTE if unit else number
    return f"{number:.{max(0, 4 - len(str(int(abs(number)))))}f}{unit}"


def _kind(column: Column) -> str:
    if column.name == PARETO:
        return "pareto"
    if not column.is_number:
        return "setting"
    return {True: "number higher", False: "number lower", None: "number"}[column.higher_is_better]


FORMS: Mapping[str, Callable[[Sequence[Table]], str]] = {
    "md": as_markdown,
    "csv": as_csv,
    "html": as_html,
    "json": as_json,
}

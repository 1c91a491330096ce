"""Writes tables as Markdown, CSV, JSON, LaTeX and HTML, without anything that would change.

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
from lm_eval_moecache.report.columns import (
    ACCURACY,
    PARETO,
    Column,
    Value,
    metric_column,
    shown,
)
from lm_eval_moecache.report.metrics import MEGABYTE
from lm_eval_moecache.report.tables import Table

_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_LATEX = {
    **{each: f"\\{each}" for each in "&%$#_{}"},
    "\\": "\\textbackslash{}",
    "~": "\\textasciitilde{}",
    "^": "\\textasciicircum{}",
    "<": "\\textless{}",
    ">": "\\textgreater{}",
    "±": "$\\pm$",
}
_LEGEND = "Bold: best of a column, told from all else by a test over the documents (p ≤ 0.05)"
_FRONT = "`*`: beaten by no other row in accuracy and tok/s, as far as that test tells"


def as_markdown(tables: Sequence[Table]) -> str:
    return "\n".join(_one_markdown(table) for table in tables)


def _one_markdown(table: Table) -> str:
    lines = [f"## {_in_markdown(table.title)}", ""] if table.title else []
    lines.append(_line([_in_markdown(column.heading) for column in table.columns]))
    lines.append(_line(_aligned(table, "--:", ":-:", "---")))
    lines += map(_line, _texts(table, _in_markdown, "**{}**"))
    told = "; ".join(notes(table))
    return "\n".join([*lines, "", *([f"{told}.", ""] if told else [])])


def _texts(table: Table, escape: Callable[[str], str], bold: str) -> list[list[str]]:
    """Return the cells as text, the best figures in bold."""
    rows = []
    for i, row in enumerate(table.rows):
        texts = [escape(shown(c, v)) for c, v in zip(table.columns, row, strict=True)]
        rows.append([bold.format(t) if (i, j) in table.best else t for j, t in enumerate(texts)])
    return rows


def _aligned(table: Table, number: str, mark: str, text: str) -> list[str]:
    return [number if c.is_number else mark if c.name == PARETO else text for c in table.columns]


def notes(table: Table) -> list[str]:
    """Say what the marks of a table mean, and which of its rows are not ranked together."""
    found = [_LEGEND] if table.best else []
    found += [_FRONT] if any(c.name == PARETO for c in table.columns) else []
    found += ["±: standard error"] if any(v.stderr for row in table.rows for v in row) else []
    if table.apart:
        found.append(f"rows of different {', '.join(table.apart)} are not compared")
    return found


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _in_markdown(text: str) -> str:
    """Keep a cell one cell, and what it says text: names may come from anybody's files."""
    escaped = harmless(text.replace("\\", "\\\\").replace("|", "\\|"))
    return " ".join(escaped.splitlines())


def harmless(text: str) -> str:
    """Return a text of Markdown without HTML and without links, which may run what they like."""
    return text.replace("<", "&lt;").replace("[", "\\[")


def as_csv(tables: Sequence[Table]) -> str:
    """Write the first table: full precision, one header line, `<column>_stderr` beside a score."""
    records = as_records(tables[0])
    names = []
    for column in tables[0].columns:
        names.append(column.name)
        if any(f"{column.name}_stderr" in record for record in records):
            names.append(f"{column.name}_stderr")
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _in_csv(cell) for name, cell in record.items()} for record in records)
    return text.getvalue()


def _in_csv(cell: Any) -> Any:
    """A spreadsheet would run a text like `=1+1` as a formula; numbers stay as they are."""
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(_FORMULA) else cell


def as_latex(tables: Sequence[Table]) -> str:
    """Return a `table` for each, with rules of the package booktabs; best figures in bold."""
    return "\n".join(_one_latex(table) for table in tables)


def _one_latex(table: Table) -> str:
    lines = ["% needs \\usepackage{booktabs}", "\\begin{table}", "\\centering"]
    lines += [f"\\caption{{{_in_latex(table.title)}}}"] if table.title else []
    lines += [f"\\begin{{tabular}}{{{''.join(_aligned(table, 'r', 'c', 'l'))}}}", "\\toprule"]
    lines += [" & ".join(_in_latex(c.heading) for c in table.columns) + " \\\\", "\\midrule"]
    lines += [" & ".join(row) + " \\\\" for row in _texts(table, _in_latex, "\\textbf{{{}}}")]
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}", "\\end{table}", ""])


def _in_latex(text: str) -> str:
    return " ".join("".join(_LATEX.get(each, each) for each in text).splitlines())


def as_json(tables: Sequence[Table]) -> str:
    """Return `{"title", "columns", "rows", "views": [{"title", "columns", "rows"}]}`."""
    first, *views = [_plain(table) for table in tables]
    return json.dumps({**first, "views": views}, indent=1, ensure_ascii=False) + "\n"


def _plain(table: Table) -> dict[str, Any]:
    return {
        "title": table.title,
        "columns": [column.name for column in table.columns],
        "rows": as_records(table),
    }


def as_records(table: Table) -> list[dict[str, Any]]:
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


_PAGE = Path(__file__).with_name("page.html")
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
    # Its import takes as long as the rest of `moecache table`.
    from jinja2 import Environment

    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
        _PAGE.read_text(encoding="utf-8")
    )
    first, *views = tables
    text = template.render(
        title=first.title or "moecache results",
        about=first.about,
        board=_board(first),
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


def _board(table: Table) -> dict[str, Any]:
    places = range(len(table.columns))
    figures = [j for j in places if _kind(table.columns[j]) != "setting"]
    settings = [j for j in places if j not in figures]
    has_mean = any(c.name == ACCURACY for c in table.columns)
    figures.sort(key=lambda j: _rank(table.columns[j], has_mean))
    rows = [_row(table, i, settings, figures) for i in range(len(table.rows))]
    return {
        "columns": [table.columns[j] for j in figures],
        "settings": [table.columns[j].heading for j in settings],
        "rows": sorted(rows, key=lambda row: not row["is_front"]),
    }


def _rank(column: Column, has_mean: bool) -> int:
    """The mark, accuracy (or, where there is no mean of several, the scores), speed, the rest."""
    if column.name == PARETO:
        return -1
    if metric_column(column.name) is None and column.name != ACCURACY and not has_mean:
        return 0
    return _FIRST.index(column.name) if column.name in _FIRST else len(_FIRST)


def _row(table: Table, i: int, settings: Sequence[int], figures: Sequence[int]) -> dict[str, Any]:
    row = list(zip(table.columns, table.rows[i], strict=True))
    told = [(row[j][0], str(row[j][1].raw or "")) for j in settings]
    given = [(c, text) for c, text in told if text]
    others = [_told(c, text) for c, text in given if c.name not in (*_NAMING, *_PLACES)]
    others += [text for c, text in given if c.name in _PLACES]
    # The name is short; whatever tells two runs of one name apart is one click away.
    return {
        "name": " ".join(text for c, text in given if c.name in _NAMING) or "run",
        "more": ", ".join(filter(None, others)),
        "settings": [(c.heading, text) for c, text in given],
        "keys": [text for _, text in told],
        "cells": _cells(table, i, figures),
        "is_front": any(c.name == PARETO and value.raw == "*" for c, value in row),
    }


def _told(column: Column, text: str) -> str:
    """An algorithm by its name, none where it does nothing; other settings with theirs."""
    if column.name in AXES:
        return "" if text in _IDLE else text
    return text if column.name == "parameters" else f"{column.heading.lower()} {text}"


def _cells(table: Table, i: int, places: Sequence[int]) -> list[dict[str, Any]]:
    cells = []
    for j in places:
        column, value = table.columns[j], table.rows[i][j]
        text, _, error = brief(column, value).partition(" ±")
        cells.append(
            {
                # What the page sorts by; a text that begins with a number is told apart there.
                "key": "" if value.raw is None else str(value.raw),
                "label": column.heading,
                "kind": _kind(column),
                "text": text,
                "error": error,
                "is_best": (i, j) in table.best,
            }
        )
    return cells


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
    if not column.is_number:
        return "setting"
    return {True: "number higher", False: "number lower", None: "number"}[column.higher_is_better]


FORMS: Mapping[str, Callable[[Sequence[Table]], str]] = {
    "md": as_markdown,
    "csv": as_csv,
    "html": as_html,
    "json": as_json,
    "latex": as_latex,
}
WRITTEN = ("md", "csv", "html", "json")
"""What `moecache table --write` writes where no form is named."""

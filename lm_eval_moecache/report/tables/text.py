"""Tables as Markdown, CSV and JSON: same runs, same bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval_moecache.report.runs.run import PARETO
from lm_eval_moecache.report.tables.front import MARGIN
from lm_eval_moecache.report.tables.leaderboard import (
    BEWARE,
    BOUNDS,
    EMULATED,
    INTERVAL,
    LIMITS,
    PARAMETERS,
    Table,
)

_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_TEST = "test over the documents (p ≤ 0.05)"
_POINT = f"{100 * MARGIN:g} point"
_LEGEND = (
    f"Bold: the best figure of a column, with those that a {_TEST} does not show to be worse "
    f"(scores: shows to be less than {_POINT} worse). A column has bold figures only where each of "
    "them is significantly better than all that are not"
)
_PROMPT = "tok/s counts the time to the first token, TPOT does not"
_FRONT = (
    f"`*`: Pareto front: each row at least as fast scores over {_POINT} lower, {{}}. A lossless "
    "row is on it unless a row at least as fast scores no lower and is either lossless or shown to "
    f"be less than {_POINT} worse"
)


def as_markdown(tables: Sequence[Table]) -> str:
    """Return the tables one below the other, each followed by a legend of its marks."""
    texts = []
    for table in tables:
        lines = [f"## {_in_markdown(table.title)}", ""] if table.title else []
        lines.append(line([_in_markdown(column.heading) for column in table.columns]))
        marks = [":-:" if c.name == PARETO else "---" for c in table.columns]
        numbers = zip(table.columns, marks, strict=True)
        lines.append(line([mark if c.decimals is None else "--:" for c, mark in numbers]))
        for row in table.texts():
            cells = [(_in_markdown(text), is_best) for text, is_best in row]
            lines.append(line([f"**{text}**" if is_best else text for text, is_best in cells]))
        legend = ". ".join(notes(table))
        texts.append("\n".join([*lines, "", *([f"{legend}.", ""] if legend else [])]))
    return "\n".join(texts)


def line(cells: Sequence[str]) -> str:
    """Return one line of a Markdown table; the cells must be escaped already."""
    return f"| {' | '.join(cells)} |"


def notes(table: Table) -> list[str]:
    """Return what a table's marks mean, and which of its rows are not ranked together."""
    texts = [_LEGEND] if table.best else []
    if any(c.name == PARETO for c in table.columns):
        texts.append(_FRONT.format("by that test" if table.best else f"by a {_TEST}"))
    errors = table.cells.filter(regex="_stderr$")
    texts += ["±: standard error"] if errors.fillna(0).any(axis=None) else []
    if table.apart:
        texts.append(f"Rows of different {', '.join(table.apart)} are not compared")
    if {"tok_per_s", "tpot_ms"} <= {c.name for c in table.columns}:
        texts.append(_PROMPT)
    noted = (EMULATED, INTERVAL, BEWARE, BOUNDS, LIMITS, PARAMETERS)
    return [*texts, *(text for name, text in table.about if name in noted)]


def _in_markdown(text: str) -> str:
    """Escape a text so that it stays one plain cell: names may come from untrusted files."""
    escaped = harmless(text.replace("\\", "\\\\").replace("|", "\\|"))
    return " ".join(escaped.splitlines())


def harmless(text: str) -> str:
    """Escape HTML and links in a Markdown text, which could run scripts."""
    return text.replace("<", "&lt;").replace("[", "\\[")


def rows_as_markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows with the same keys as a table; floats get four decimals, None stays empty."""

    def cell(value: Any) -> Any:
        if isinstance(value, str):
            return harmless(value)
        return f"{value:.4f}" if isinstance(value, float) else value

    cells = [[cell(value) for value in row.values()] for row in rows]
    return padded([harmless(name) for name in rows[0]], cells)


def padded(heads: Sequence[str], cells: Sequence[Sequence[Any]]) -> str:
    """Return a Markdown table with columns aligned for a terminal."""
    from pytablewriter import MarkdownTableWriter

    return str(MarkdownTableWriter(headers=heads, value_matrix=cells).dumps())


def as_csv(tables: Sequence[Table]) -> str:
    """Return the first table: full precision, one header line, `<column>_stderr` after a score."""

    def harmless_cell(cell: Any) -> Any:
        """Quote texts, not numbers: a spreadsheet would evaluate a text like `=1+1`."""
        return f"'{cell}" if isinstance(cell, str) and cell.startswith(_FORMULA) else cell

    text: str = tables[0].cells.map(harmless_cell).to_csv(index=False, lineterminator="\n")
    return text


def as_json(tables: Sequence[Table]) -> str:
    """Return `{"title", "columns", "rows", "views": [{"title", "columns", "rows"}]}`."""
    first, *views = [
        {"title": table.title, "columns": [c.name for c in table.columns], "rows": _records(table)}
        for table in tables
    ]
    return json.dumps({**first, "views": views}, indent=1, ensure_ascii=False) + "\n"


def _records(table: Table) -> list[dict[str, Any]]:
    """Return the rows as plain mappings, standard errors under `<column>_stderr`."""
    names = {column.name for column in table.columns}
    return [
        {name: value for name, value in row.items() if name in names or value is not None}
        for row in table.cells.to_dict("records")
    ]

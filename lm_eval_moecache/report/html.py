"""Writes tables as one HTML page that needs nothing else: sortable, filterable, from a file."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from lm_eval_moecache.report.columns import Column, Value
from lm_eval_moecache.report.render import shown
from lm_eval_moecache.report.tables import PARETO, Table

_TEMPLATE = Path(__file__).with_name("page.html")


def as_html(tables: Sequence[Table]) -> str:
    """Return the page: the first table with filters, the others below it, all sortable."""
    first = tables[0]
    return (
        _TEMPLATE.read_text(encoding="utf-8")
        .replace("{{title}}", escape(first.title or "moecache results"))
        .replace("{{tables}}", "\n".join(_table(t, is_first=t is first) for t in tables))
    )


def _table(table: Table, *, is_first: bool) -> str:
    head = "".join(
        f'<th scope="col"{_class(column)}><button type="button">{escape(column.heading)}</button>'
        "</th>"
        for column in table.columns
    )
    rows = "\n".join(
        "<tr>" + "".join(_cell(table, i, j, value) for j, value in enumerate(row)) + "</tr>"
        for i, row in enumerate(table.rows)
    )
    title = "" if is_first else f"<h2>{escape(table.title)}</h2>\n"
    kind = ' id="leaderboard"' if is_first else ""
    return (
        f'{title}<div class="scroll"><table{kind}>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{rows}\n</tbody></table></div>"
    )


def _cell(table: Table, i: int, j: int, value: Value) -> str:
    column = table.columns[j]
    # What the page sorts by; a text that begins with a number is told apart there.
    key = "" if value.raw in (None, "") else f' data-key="{escape(str(value.raw))}"'
    text = escape(shown(column, value))
    number, plus, error = text.partition(" ±")
    if plus:
        text = f"{number} <small>±{error}</small>"
    if (i, j) in table.best:
        text = f"<strong>{text}</strong>"
    label = f' data-label="{escape(column.heading)}"'
    return f"<td{_class(column)}{label}{key}><span>{text}</span></td>"


def _class(column: Column) -> str:
    if column.name == PARETO:
        return ' class="pareto"'
    if column.is_number:
        better = {True: " higher", False: " lower", None: ""}[column.higher_is_better]
        return f' class="number{better}"'
    return ' class="setting"'

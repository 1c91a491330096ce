"""Writes tables as Markdown, CSV, JSON and LaTeX, without a date or anything that would change."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval_moecache.report.columns import Column, Value
from lm_eval_moecache.report.tables import PARETO, Table, as_records

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
_LEGEND = "Best of a column in bold"
_FRONT = "`*`: on the Pareto front of accuracy and tok/s"


def shown(column: Column, value: Value) -> str:
    """Return a cell as text: figures rounded to the column's decimals, `±` one standard error."""
    if value.raw is None:
        return ""
    if value.number is None:
        return str(value.raw)
    text = f"{value.number:.{column.decimals}f}"
    text = text if float(text) else text.removeprefix("-")
    return text if value.stderr is None else f"{text} ±{value.stderr:.{column.decimals}f}"


def as_markdown(tables: Sequence[Table]) -> str:
    return "\n".join(_one_markdown(table) for table in tables)


def _one_markdown(table: Table) -> str:
    lines = [f"## {table.title}", ""] if table.title else []
    lines.append(_line([column.heading for column in table.columns]))
    lines.append(
        _line(["--:" if c.is_number else ":-:" if _is_mark(c) else "---" for c in table.columns])
    )
    for i, row in enumerate(table.rows):
        cells = [shown(c, v) for c, v in zip(table.columns, row, strict=True)]
        lines.append(
            _line([f"**{t}**" if (i, j) in table.best else t for j, t in enumerate(cells)])
        )
    notes = [_LEGEND] if table.best else []
    notes += [_FRONT] if any(_is_mark(column) for column in table.columns) else []
    notes += ["±: standard error"] if any(v.stderr for row in table.rows for v in row) else []
    return "\n".join([*lines, "", *([f"{'; '.join(notes)}.", ""] if notes else [])])


def _is_mark(column: Column) -> bool:
    return column.name == PARETO


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(map(_in_markdown, cells)) + " |"


def _in_markdown(text: str) -> str:
    """Keep a cell one cell, and what it says text: names may come from anybody's files."""
    escaped = text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")
    return " ".join(escaped.splitlines())


def as_csv(table: Table) -> str:
    """Full precision, one header line, `<column>_stderr` beside a score."""
    records = as_records(table)
    names = []
    for column in table.columns:
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
    kinds = "".join("r" if c.is_number else "c" if _is_mark(c) else "l" for c in table.columns)
    lines = ["% needs \\usepackage{booktabs}", "\\begin{table}", "\\centering"]
    lines += [f"\\caption{{{_in_latex(table.title)}}}"] if table.title else []
    lines += [f"\\begin{{tabular}}{{{kinds}}}", "\\toprule"]
    lines += [" & ".join(_in_latex(c.heading) for c in table.columns) + " \\\\", "\\midrule"]
    for i, row in enumerate(table.rows):
        cells = [_in_latex(shown(c, v)) for c, v in zip(table.columns, row, strict=True)]
        bold = [f"\\textbf{{{t}}}" if (i, j) in table.best else t for j, t in enumerate(cells)]
        lines.append(" & ".join(bold) + " \\\\")
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


def rows_as_markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows of one shape as a table; figures get four decimals, None is left empty."""
    from pytablewriter import MarkdownTableWriter

    cells = [[f"{v:.4f}" if isinstance(v, float) else v for v in row.values()] for row in rows]
    return str(MarkdownTableWriter(headers=list(rows[0]), value_matrix=cells).dumps())

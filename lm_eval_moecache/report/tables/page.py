"""Tables as one HTML page: self-contained, sortable and filterable, straight from a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_eval_moecache.algorithms.registry import AXES
from lm_eval_moecache.report.metrics import MEGABYTE, Column
from lm_eval_moecache.report.runs.run import ACCURACY, PARETO
from lm_eval_moecache.report.tables.leaderboard import Table
from lm_eval_moecache.report.tables.text import notes

_PAGE = Path(__file__).with_name("page.html")
# The metrics shown first; others follow in the table's order.
_FIRST = (
    *(ACCURACY, "right_per_hour", "goodput", "e2el_ms", "output_tokens"),
    *("tok_per_s", "tpot_ms", "ttft_ms", "miss_rate"),
)
# The settings that name a run; all settings unfold below the name.
_NAMING = ("run", "policy", "capacity")
_PLACES = ("experiment", "tasks", "model")
_IDLE = ("standard", "none", "fetch")
_DRAWN = ("e2el_ms", "tok_per_s")


def as_html(tables: Sequence[Table]) -> str:
    """Return the page: the leaderboard with settings folded, the other tables below it.

    Rows on the Pareto front come first, then the others, both in the table's order.
    """
    # Importing jinja2 takes as long as the rest of `moecache table`.
    from jinja2 import Environment

    first, *views = tables
    columns = {column.name: column for column in first.columns}

    def rank(column: Column) -> int:
        """Order columns: Pareto mark, accuracy (or the scores, without a mean), speed, others."""
        if column.name == PARETO:
            return -1
        if not column.base and ACCURACY not in columns:
            return 0
        return _FIRST.index(column.name) if column.name in _FIRST else len(_FIRST)

    # What is drawn above the table: accuracy, or the first score without a mean, against time.
    scores = [c for c in first.columns if c.is_score and c.higher_is_better]
    drawn = [columns[name] for name in _DRAWN if name in columns][:1]
    drawn += [columns[ACCURACY]] if ACCURACY in columns else scores[:1]
    settings = [c for c in first.columns if _kind(c) == "setting"]
    figures = sorted((c for c in first.columns if c not in settings), key=rank)
    # The choice of a place is one of these settings already.
    chosen = [c for c in settings if len(set(first.places)) > 1 and c.name in first.apart]
    rows, cells = [], _cells(first, figures)
    for i, values in enumerate(first.cells.to_dict("records")):
        row = _row(values, settings, [c for c in settings if c not in chosen])
        row |= {"cells": cells[i], "place": first.places[i] if first.places else ""}
        row["is_front"] = values.get(PARETO) == "*"
        if len(drawn) == 2:
            names = (drawn[0].name, drawn[1].name, f"{drawn[1].name}_stderr")
            point = [values.get(name) for name in names]
            row["point"] = None if None in point[:2] else point
        rows.append(row)
    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
        _PAGE.read_text(encoding="utf-8")
    )
    text = template.render(
        title=first.title or "moecache results",
        about=first.about,
        board={
            "columns": figures,
            "settings": [c.heading for c in settings],
            "rows": sorted(rows, key=lambda row: not row["is_front"]),
            "places": list(dict.fromkeys(first.places)),
            "chosen": [c.heading for c in chosen],
            "apart": " and ".join(name.replace("_", " ") for name in first.apart),
            "axes": [c.words or c.heading for c in drawn],
        },
        views=[
            {"title": view.title, "columns": view.columns, "rows": _cells(view, view.columns)}
            for view in views
        ],
        notes=[note.replace("`", "") for note in notes(first)],
        kind=_kind,
    )
    return text + "\n"


def _row(
    values: Mapping[str, Any], settings: Sequence[Column], naming: Sequence[Column]
) -> dict[str, Any]:
    """Return a row of the leaderboard: a short name, and its settings to unfold.

    What all rows shown have in common is above the table, and not in `naming`.
    """
    texts = {c.name: str(values[c.name] or "") for c in settings}
    named = [(c, texts[c.name]) for c in naming if texts[c.name]]
    others = []
    for column, text in named:
        if column.name in AXES or column.name == "parameters":
            # An algorithm by its name; idle ones are left out.
            others.append("" if column.name in AXES and text in _IDLE else text)
        elif column.name not in (*_NAMING, *_PLACES):
            others.append(f"{column.heading.lower()} {text}")
    others += [text for column, text in named if column.name in _PLACES]
    return {
        "name": " ".join(text for column, text in named if column.name in _NAMING) or "run",
        "more": ", ".join(filter(None, others)),
        "settings": [(c.heading, texts[c.name]) for c in settings if texts[c.name]],
        "keys": [*texts.values()],
    }


def _cells(table: Table, columns: Sequence[Column]) -> list[list[dict[str, Any]]]:
    """Return the cells of these columns, row by row."""
    places = [table.columns.index(column) for column in columns]
    rows = []
    for printed, values in zip(table.texts(), table.cells.to_dict("records"), strict=True):
        cells = []
        for column, place in zip(columns, places, strict=True):
            value = values[column.name]
            text, _, error = printed[place][0].partition(" ±")
            if column.in_megabytes and value is not None:
                text = f"{value / MEGABYTE:.1f} MB"
            # The page sorts by `key`, where texts with a leading number are recognised.
            cell = {"key": "" if value is None else str(value), "label": column.heading}
            cell |= {"kind": _kind(column), "text": text, "error": error}
            cells.append({**cell, "is_best": printed[place][1]})
        rows.append(cells)
    return rows


def _kind(column: Column) -> str:
    if column.name == PARETO:
        return "pareto"
    if column.decimals is None:
        return "setting"
    return {True: "number higher", False: "number lower", None: "number"}[column.higher_is_better]

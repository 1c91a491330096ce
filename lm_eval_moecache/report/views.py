"""Named tables of a sweep file: a selection of rows and columns, or a pivot as papers print it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval_moecache.records.errors import unknown
from lm_eval_moecache.report.columns import Column, Value, setting
from lm_eval_moecache.report.relative import pick, with_changes, without_empty_columns
from lm_eval_moecache.report.render import shown
from lm_eval_moecache.report.results import Run
from lm_eval_moecache.report.tables import Table, leaderboard

_FIELDS = ("title", "where", "rows", "columns", "values", "sort", "relative_to", "pick")


def view_table(runs: Sequence[Run], view: Mapping[str, Any]) -> Table:
    """Build one entry of `views`.

    `where` selects runs by settings (a value or a list of them). Without `columns`, `values` are
    the columns of a plain table. With `columns`, that setting's values head the columns, `rows`
    (one setting or several) name the rows, and each cell holds its run's `values`. `relative_to`
    adds changes in percent against the run with those settings; `pick` keeps of several runs in
    one place the best within a budget (both: see `relative.py`).
    """
    for key in view:
        if key not in _FIELDS:
            raise unknown("views: field", key, _FIELDS)
    title = str(view.get("title", ""))
    chosen = [run for run in runs if selected(run, view.get("where", {}))]
    if not chosen:
        raise ValueError(f"view {title!r}: no run has where={view.get('where')!r}.")
    values = _listed(view.get("values", ["accuracy"]))
    across = None if "columns" not in view else str(view["columns"])
    rows = _listed(view.get("rows", ["policy"] if across else []))
    settings = [*rows, *([across] if across else [])]
    if "pick" in view:
        chosen = pick(chosen, runs, settings, view["pick"])
    sort = _listed(view.get("sort", [])) or (settings if across else None)
    flat = leaderboard(chosen, title=title, columns=[*settings, *values], sort=sort)
    if "relative_to" in view:
        flat = with_changes(flat, len(settings), view["relative_to"])
    if across is None:
        return without_empty_columns(flat)
    heads = leaderboard(chosen, columns=[across], sort=[across])
    return without_empty_columns(_pivot(flat, len(rows), [str(r[0].raw) for r in heads.rows]))


def _pivot(flat: Table, width: int, across: list[str]) -> Table:
    """Put the cells of a flat table elsewhere: its column after the rows' heads the columns."""
    labels = list(dict.fromkeys(across))
    cells: dict[tuple[tuple[str, ...], str], list[Value]] = {}
    for row in flat.rows:
        place = (tuple(_text(v) for v in row[:width]), str(row[width].raw))
        if place in cells:
            names = [column.name for column in flat.columns[: width + 1]]
            raise ValueError(
                f"view {flat.title!r}: several runs at "
                f"{dict(zip(names, (*place[0], place[1]), strict=True))}. Add a setting to `rows`, "
                "or a `where`."
            )
        cells[place] = list(row[width + 1 :])
    shown_columns = flat.columns[width + 1 :]
    name = flat.columns[width].name
    columns = [*flat.columns[:width]]
    for label in labels:
        if len(shown_columns) == 1:
            columns.append(_headed(shown_columns[0], name, label))
        else:
            columns += [_headed(c, name, label, c.heading) for c in shown_columns]
    empty = [Value(None)] * len(shown_columns)
    body = tuple(
        (*map(Value, names), *(v for label in labels for v in cells.get((names, label), empty)))
        for names in dict.fromkeys(names for names, _ in cells)
    )
    heading = "" if len(shown_columns) > 1 else shown_columns[0].heading
    return Table(": ".join(filter(None, (flat.title, heading))), tuple(columns), body, frozenset())


def _headed(column: Column, across: str, label: str, heading: str = "") -> Column:
    text = f"{across} {label}" if not heading else f"{heading} at {label}"
    name = f"{column.name}[{across}={label}]"
    return Column(name, text, column.decimals, column.higher_is_better, column.is_number)


def _text(value: Value) -> str:
    return shown(Column("", ""), value)


def selected(run: Run, where: Mapping[str, Any]) -> bool:
    """Whether a run has these settings; a list allows several values."""
    return all(
        {str((found := setting(run, name)).raw), found.identity} & {str(v) for v in _values(wanted)}
        for name, wanted in where.items()
    )


def _values(wanted: Any) -> list[Any]:
    return wanted if isinstance(wanted, list) else [wanted]


def _listed(names: Any) -> list[str]:
    return [names] if isinstance(names, str) else [str(name) for name in names]

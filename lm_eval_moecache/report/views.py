"""Named tables of a sweep file: a selection of rows and columns, or a pivot as papers print it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval_moecache.errors import unknown
from lm_eval_moecache.report.columns import Column, Value, setting
from lm_eval_moecache.report.render import shown
from lm_eval_moecache.report.results import Run
from lm_eval_moecache.report.tables import Table, leaderboard

_FIELDS = ("title", "where", "rows", "columns", "values", "sort")


def view_table(runs: Sequence[Run], view: Mapping[str, Any]) -> Table:
    """Build one entry of `views`.

    `where` selects runs by settings (a value or a list of them). Without `columns`, `values` are
    the columns of a plain table. With `columns`, that setting's values head the columns, `rows`
    (one setting or several) name the rows, and each cell holds its run's `values`.
    """
    for key in view:
        if key not in _FIELDS:
            raise unknown("views: field", key, _FIELDS)
    title = str(view.get("title", ""))
    chosen = [run for run in runs if _selected(run, view.get("where", {}))]
    if not chosen:
        raise ValueError(f"view {title!r}: no run has where={view.get('where')!r}.")
    values = _listed(view.get("values", ["accuracy"]))
    sort = _listed(view.get("sort", [])) or None
    if "columns" not in view:
        names = [*_listed(view.get("rows", [])), *values]
        return leaderboard(chosen, title=title, columns=names, sort=sort)
    rows = _listed(view.get("rows", ["policy"]))
    return _pivot(chosen, title, rows, str(view["columns"]), values, sort)


def _pivot(
    runs: Sequence[Run],
    title: str,
    rows: list[str],
    across: str,
    values: list[str],
    sort: list[str] | None,
) -> Table:
    # The leaderboard reads and sorts; its cells are then only put elsewhere.
    flat = leaderboard(runs, columns=[*rows, across, *values], sort=sort or [*rows, across])
    heads = leaderboard(runs, columns=[across], sort=[across])
    width = len(rows)
    labels = list(dict.fromkeys(str(row[0].raw) for row in heads.rows))
    cells: dict[tuple[tuple[str, ...], str], list[Value]] = {}
    for row in flat.rows:
        place = (tuple(_text(v) for v in row[:width]), str(row[width].raw))
        if place in cells:
            raise ValueError(
                f"view {title!r}: several runs at {dict(zip(rows, place[0], strict=True))}, "
                f"{across}={place[1]}. Add a setting to `rows`, or a `where`."
            )
        cells[place] = list(row[width + 1 :])
    shown_columns = flat.columns[width + 1 :]
    columns = [*flat.columns[:width]]
    for label in labels:
        if len(values) == 1:
            columns.append(_headed(shown_columns[0], across, label))
        else:
            columns += [_headed(c, across, label, c.heading) for c in shown_columns]
    empty = [Value(None)] * len(values)
    body = tuple(
        (*map(Value, names), *(v for label in labels for v in cells.get((names, label), empty)))
        for names in dict.fromkeys(names for names, _ in cells)
    )
    heading = "" if len(values) > 1 else shown_columns[0].heading
    return Table(": ".join(filter(None, (title, heading))), tuple(columns), body, frozenset())


def _headed(column: Column, across: str, label: str, heading: str = "") -> Column:
    text = f"{across} {label}" if not heading else f"{heading} at {label}"
    name = f"{column.name}[{across}={label}]"
    return Column(name, text, column.decimals, column.higher_is_better, column.is_number)


def _text(value: Value) -> str:
    return shown(Column("", ""), value)


def _selected(run: Run, where: Mapping[str, Any]) -> bool:
    return all(
        str(setting(run, name).raw) in [str(v) for v in _values(wanted)]
        for name, wanted in where.items()
    )


def _values(wanted: Any) -> list[Any]:
    return wanted if isinstance(wanted, list) else [wanted]


def _listed(names: Any) -> list[str]:
    return [names] if isinstance(names, str) else [str(name) for name in names]

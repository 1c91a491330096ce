"""Views of runs: pivots, and changes against a baseline."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import compress
from typing import TYPE_CHECKING, Any

from lm_eval_moecache.records.numbers import unknown_name_error
from lm_eval_moecache.report.runs.columns import Column
from lm_eval_moecache.report.runs.run import Run, Value
from lm_eval_moecache.report.tables.leaderboard import Table, leaderboard, sorted_runs

if TYPE_CHECKING:
    from lm_eval_moecache.report.tables.schema import View


def view_table(runs: Sequence[Run], view: View) -> Table:
    """Build one entry of `views`.

    `where` selects runs by settings (a value or a list of them). Without `columns`, `values` are
    the columns of a plain table. With `columns`, that setting's values head the columns, `rows`
    (one setting or several) name the rows, and each cell holds its run's `values`. `relative_to`
    adds changes in percent against the run with those settings (`with_changes`).
    """
    chosen = [run for run in runs if run.matches(view.where)]
    if not chosen:
        raise ValueError(f"view {view.title!r}: no run has where={view.where!r}.")
    across = view.columns
    values = ["accuracy"] if view.values is None else view.values
    rows = (["policy"] if across else []) if view.rows is None else view.rows
    settings = [*rows, *([across] if across else [])]
    sort = view.sort or (settings if across else None)
    flat = leaderboard(chosen, title=view.title, columns=[*settings, *values], sort=sort)
    if view.relative_to is not None:
        flat = with_changes(flat, len(settings), view.relative_to)
    if across:
        heads = [str(run.setting(across).raw) for run in sorted_runs(chosen, [across])]
        flat = _pivot(flat, len(rows), list(dict.fromkeys(heads)))
    filled = [j for j in range(len(flat.columns)) if any(r[j].raw is not None for r in flat.rows)]
    return replace(
        flat,
        columns=tuple(flat.columns[j] for j in filled),
        rows=tuple(tuple(row[j] for j in filled) for row in flat.rows),
        best=frozenset((i, filled.index(j)) for i, j in flat.best if j in filled),
    )


def _pivot(flat: Table, width: int, labels: Sequence[str]) -> Table:
    """Pivot a flat table: the column after the first `width` becomes the column heads."""
    across, figures = flat.columns[width].name, flat.columns[width + 1 :]
    cells: dict[tuple[str, ...], dict[str, Sequence[Value]]] = defaultdict(dict)
    for row in flat.rows:
        names, label = tuple(map(Column("", "").text, row[:width])), str(row[width].raw)
        if label in cells[names]:
            settings = [column.name for column in flat.columns[: width + 1]]
            raise ValueError(
                f"view {flat.title!r}: several runs at "
                f"{dict(zip(settings, (*names, label), strict=True))}. Add a setting to `rows`, or "
                "a `where`."
            )
        cells[names][label] = row[width + 1 :]
    single = len(figures) == 1
    columns = []
    for label in labels:
        for figure in figures:
            heading = f"{across} {label}" if single else f"{figure.heading} at {label}"
            name = f"{figure.name}[{across}={label}]"
            columns.append(replace(figure, name=name, heading=heading, words=""))
    empty = [Value()] * len(figures)
    body = tuple(
        (*map(Value, names), *(v for label in labels for v in by_label.get(label, empty)))
        for names, by_label in cells.items()
    )
    title = ": ".join(filter(None, (flat.title, figures[0].heading if single else "")))
    return Table(title, (*flat.columns[:width], *columns), body, apart=flat.apart)


def with_changes(table: Table, num_settings: int, relative_to: Mapping[str, Any]) -> Table:
    """Add after each value its change in percent against the baseline.

    A row's baseline has the settings of `relative_to` and otherwise the row's own; all are among
    the first `num_settings` columns. A run of another identity is none, unless `relative_to` names
    what distinguishes them. The baselines themselves have no change.
    """
    names = [column.name for column in table.columns[:num_settings]]
    for name in relative_to:
        if name not in names:
            raise unknown_name_error("views: relative_to", name, names)
    others = [i for i, name in enumerate(names) if name not in relative_to]
    base_values = {names.index(name): str(value) for name, value in relative_to.items()}
    is_apart = relative_to.keys().isdisjoint(table.apart)
    apart = table.places if table.places and is_apart else [""] * len(table.rows)
    places = [
        (place, *(row[i].identity for i in others))
        for place, row in zip(apart, table.rows, strict=True)
    ]
    is_base = [
        all(row[i].identity == value for i, value in base_values.items()) for row in table.rows
    ]
    bases = dict(compress(zip(places, table.rows, strict=True), is_base))
    columns = [*table.columns[:num_settings]]
    for figure in table.columns[num_settings:]:
        change = Column(f"{figure.name}_change", f"{figure.heading} change %", 1, None, True)
        columns += [figure, change]
    rows = []
    for row, place, is_baseline in zip(table.rows, places, is_base, strict=True):
        base = None if is_baseline else bases.get(place)
        cells = [*row[:num_settings]]
        for j in range(num_settings, len(row)):
            new, old = row[j].number, None if base is None else base[j].number
            cells += [row[j], Value(100 * (new / old - 1) if old and new is not None else None)]
        rows.append(tuple(cells))
    return Table(table.title, tuple(columns), tuple(rows), apart=table.apart)

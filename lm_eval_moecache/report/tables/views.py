"""Views of runs: pivots, and changes against a baseline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lm_eval_moecache.records.numbers import unknown_name_error
from lm_eval_moecache.report.metrics import Column
from lm_eval_moecache.report.runs.run import Run
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
        flat = _pivot(flat, rows, across, list(dict.fromkeys(heads)))
    columns = [column for column in flat.columns if flat.cells[column.name].notna().any()]
    return replace(flat, columns=tuple(columns), cells=flat.cells[_with_errors(flat, columns)])


def _with_errors(table: Table, columns: Sequence[Column]) -> list[str]:
    """Return the names of the columns, with those of their standard errors behind each."""
    names = (name for column in columns for name in (column.name, f"{column.name}_stderr"))
    return [name for name in names if name in table.cells]


def _pivot(flat: Table, rows: Sequence[str], across: str, labels: Sequence[str]) -> Table:
    """Make one row of those with the same `rows`, the values of `across` side by side."""
    figures, keys = flat.columns[len(rows) + 1 :], [*rows, across]
    cells = flat.cells.assign(**flat.cells[keys].map(Column("", "").text).astype(object))
    twins = cells[cells.duplicated(keys)]
    if len(twins):
        raise ValueError(
            f"view {flat.title!r}: several runs at {twins[keys].iloc[0].to_dict()}. Add a setting "
            "to `rows`, or a `where`."
        )
    # Rows are joined by their texts, in the order in which each first appears.
    cells.index = cells[[*rows]].agg("\0".join, axis=1) if rows else [""] * len(cells)
    body = cells[~cells.index.duplicated()][[*rows]]
    columns, single = list(flat.columns[: len(rows)]), len(figures) == 1
    for label in labels:
        part = cells[cells[across] == label]
        for figure in figures:
            name = f"{figure.name}[{across}={label}]"
            heading = f"{across} {label}" if single else f"{figure.heading} at {label}"
            columns.append(replace(figure, name=name, heading=heading, words=""))
            for suffix in ("", "_stderr"):
                if figure.name + suffix in part:
                    values = part[figure.name + suffix].reindex(body.index)
                    body[name + suffix] = values.where(values.notna(), None)
    title = ": ".join(filter(None, (flat.title, figures[0].heading if single else "")))
    return Table(title, tuple(columns), body.reset_index(drop=True), apart=flat.apart)


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
    others = [name for name in names if name not in relative_to]
    is_apart = relative_to.keys().isdisjoint(table.apart)
    apart = table.places if table.places and is_apart else [""] * len(table.runs)
    places = [
        (place, *(run.setting(name).identity for name in others))
        for place, run in zip(apart, table.runs, strict=True)
    ]
    wanted = {name: str(value) for name, value in relative_to.items()}
    is_base = [
        all(run.setting(name).identity == value for name, value in wanted.items())
        for run in table.runs
    ]
    bases = {place: i for i, place in enumerate(places) if is_base[i]}
    # The row itself where there is nothing to compare with.
    at = [
        bases.get(place, -1) if not base else -1
        for place, base in zip(places, is_base, strict=True)
    ]
    columns, cells = [*table.columns[:num_settings]], table.cells.copy()
    for figure in table.columns[num_settings:]:
        change = Column(f"{figure.name}_change", f"{figure.heading} change %", 1)
        columns += [figure, change]
        new = cells[figure.name].where(cells[figure.name].map(_is_number)).astype(float)
        old = new.reindex(at).set_axis(new.index)
        changes = (100 * (new / old.where(old != 0) - 1)).astype(object)
        cells[change.name] = changes.where(changes.notna(), None)
    changed = Table(table.title, tuple(columns), cells, apart=table.apart)
    return replace(changed, cells=cells[_with_errors(changed, columns)])


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float))

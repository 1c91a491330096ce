"""Named tables of a sweep file: a selection of rows and columns, or a pivot as papers print it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval_moecache.records.errors import unknown
from lm_eval_moecache.report.columns import (
    Column,
    Value,
    find_score,
    metric_column,
    metric_value,
    setting,
    shown,
)
from lm_eval_moecache.report.metrics import METRICS
from lm_eval_moecache.report.results import Run
from lm_eval_moecache.report.tables import Table, leaderboard

_PICK = ("best", "score", "loss", "relative_to")
_FIELDS = ("title", "where", "rows", "columns", "values", "sort", "relative_to", "pick")


def view_table(runs: Sequence[Run], view: Mapping[str, Any]) -> Table:
    """Build one entry of `views`.

    `where` selects runs by settings (a value or a list of them). Without `columns`, `values` are
    the columns of a plain table. With `columns`, that setting's values head the columns, `rows`
    (one setting or several) name the rows, and each cell holds its run's `values`. `relative_to`
    adds changes in percent against the run with those settings; `pick` keeps of several runs in
    one place the best within a budget (`with_changes` and `pick`).
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
    title = ": ".join(filter(None, (flat.title, heading)))
    return Table(title, tuple(columns), body, apart=flat.apart)


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


def with_changes(table: Table, num_settings: int, relative_to: Mapping[str, Any]) -> Table:
    """Put behind each figure its change in percent against the baseline's.

    A row's baseline has the settings of `relative_to` and the row's own others; both are among
    the first `num_settings` columns. The baselines themselves have no change.
    """
    names = [column.name for column in table.columns[:num_settings]]
    for name in relative_to:
        if name not in names:
            raise unknown("views: relative_to", name, names)
    others = [i for i, name in enumerate(names) if name not in relative_to]
    wanted = [(names.index(name), str(value)) for name, value in relative_to.items()]

    def place(row: Sequence[Value]) -> tuple[str, ...]:
        return tuple(row[i].identity for i in others)

    def is_base(row: Sequence[Value]) -> bool:
        return all(row[i].identity == value for i, value in wanted)

    bases = {place(row): row for row in table.rows if is_base(row)}
    columns = [*table.columns[:num_settings]]
    for column in table.columns[num_settings:]:
        change = Column(f"{column.name}_change", f"{column.heading} change %", 1, None, True)
        columns += [column, change]
    rows = []
    for row in table.rows:
        base = None if is_base(row) else bases.get(place(row))
        cells = [*row[:num_settings]]
        for j in range(num_settings, len(row)):
            cells += [row[j], _change(row[j], None if base is None else base[j])]
        rows.append(tuple(cells))
    return Table(table.title, tuple(columns), tuple(rows), apart=table.apart)


def _change(value: Value, base: Value | None) -> Value:
    if base is None or value.number is None or not base.number:
        return Value(None)
    return Value(100 * (value.number / base.number - 1))


def without_empty_columns(table: Table) -> Table:
    kept = [j for j in range(len(table.columns)) if any(r[j].raw is not None for r in table.rows)]
    place = {j: new for new, j in enumerate(kept)}
    return Table(
        table.title,
        tuple(table.columns[j] for j in kept),
        tuple(tuple(row[j] for j in kept) for row in table.rows),
        frozenset((i, place[j]) for i, j in table.best if j in place),
        apart=table.apart,
    )


def pick(
    chosen: Sequence[Run], runs: Sequence[Run], settings: Sequence[str], rule: Mapping[str, Any]
) -> list[Run]:
    """Keep of the runs that agree in `settings` the one with the `best` metric within the budget.

    Within the budget is a run whose `score` (a task) is at most `loss` (0.01: one percent) worse
    than that of the baseline, the run of `runs` that has the settings of `relative_to` and agrees
    in the others. Groups without a run within the budget are left out.
    """
    for key in (*rule, *_PICK):
        if key not in _PICK or key not in rule:
            raise unknown("views: pick: needed are best, score, loss, relative_to; got", key, _PICK)
    metric, task, loss = str(rule["best"]), str(rule["score"]), float(rule["loss"])
    column = metric_column(metric)
    if column is None or column.higher_is_better is None:
        allowed = [name for name, m in METRICS.items() if m.higher_is_better is not None]
        raise unknown("views: pick: best", metric, allowed)
    sign = 1 if column.higher_is_better else -1
    others = [name for name in settings if name not in rule["relative_to"]]
    bases = {_place(r, others): r for r in runs if _has(r, rule["relative_to"])}
    best: dict[tuple[str, ...], Run] = {}
    for run in chosen:
        base, figure = bases.get(_place(run, others)), metric_value(run, metric).number
        if base is None or figure is None or _loss(run, base, task) > loss:
            continue
        group = _place(run, settings)
        before = metric_value(best[group], metric).number if group in best else None
        if before is None or sign * figure > sign * before:
            best[group] = run
    return list(best.values())


def _place(run: Run, names: Sequence[str]) -> tuple[str, ...]:
    return tuple(setting(run, name).identity for name in names)


def _has(run: Run, wanted: Mapping[str, Any]) -> bool:
    return all(setting(run, name).identity == str(value) for name, value in wanted.items())


def _loss(run: Run, base: Run, task: str) -> float:
    """How much worse a score is than the baseline's, as a share of it."""
    new, old = find_score(run, task), find_score(base, task)
    if new is None or old is None or not old.value:
        raise ValueError(f"views: pick: {run.run_id} or its baseline has no score of {task!r}.")
    change = new.value / old.value - 1
    return -change if old.higher_is_better else change

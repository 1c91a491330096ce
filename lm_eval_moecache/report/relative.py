"""What a view says relative to a baseline run: changes in percent, and the best within a budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval_moecache.records.errors import unknown
from lm_eval_moecache.report.columns import (
    METRICS,
    Column,
    Value,
    find_score,
    metric_column,
    metric_value,
    setting,
)
from lm_eval_moecache.report.results import Run
from lm_eval_moecache.report.tables import Table

_PICK = ("best", "score", "loss", "relative_to")


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
    return Table(table.title, tuple(columns), tuple(rows), frozenset())


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

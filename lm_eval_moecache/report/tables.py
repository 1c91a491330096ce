"""Leaderboards from runs: one row a run; the same runs give the same table to the byte."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lm_eval_moecache.report.about import about
from lm_eval_moecache.report.columns import (
    AXES,
    DEFAULT_METRICS,
    METRICS,
    PERCENTILES,
    Column,
    Value,
    accuracy,
    find_score,
    metric_column,
    metric_value,
    score_column,
    setting,
    unknown_column,
)
from lm_eval_moecache.report.pareto import pareto_front
from lm_eval_moecache.report.results import Run

PARETO, ACCURACY = "pareto", "accuracy"
_SETTINGS = (
    *("run", "experiment", "model", "tasks", "policy", *AXES, "parameters"),
    *("capacity", "capacity_bytes"),
)


@dataclass(frozen=True, slots=True)
class Table:
    """A finished table: `best` holds (row, column) positions of the best figure of a column."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Value, ...], ...]
    best: frozenset[tuple[int, int]]
    about: tuple[tuple[str, str], ...] = ()
    """What the runs have in common: when they were made, on what, with which versions."""


@dataclass(frozen=True, slots=True)
class Reader:
    """A column and how it is read from a run."""

    column: Column
    read: Callable[[Run], Value]


def leaderboard(
    runs: Sequence[Run],
    *,
    title: str = "",
    columns: Sequence[str] | None = None,
    sort: Sequence[str] | None = None,
) -> Table:
    """Build the table. Raises ValueError naming a column that no run has."""
    names = _expanded(columns) if columns else default_columns(runs)
    readers = [reader(runs, name) for name in names]
    ordered = _sorted(runs, sort or default_sort(runs))
    # On the front by accuracy against tok/s; its mark is a column like any other.
    front = pareto_front(ordered, lambda run: accuracy(run).number, _speed)
    rows = [
        tuple(
            Value("*" if index in front else "") if r.column.name == PARETO else r.read(run)
            for r in readers
        )
        for index, run in enumerate(ordered)
    ]
    shown = tuple(each.column for each in readers)
    return Table(title, shown, tuple(rows), _best(shown, rows), about(runs))


def _expanded(columns: Sequence[str]) -> list[str]:
    """Write `ttft_ms.*` (or `ttft_ms.*@task`) out: the mean and its percentiles."""
    names = []
    for name in columns:
        base, star, rest = name.partition(".*")
        names += [f"{base}.{form}{rest}" for form in PERCENTILES] if star else [name]
    return names


def _speed(run: Run) -> float | None:
    return metric_value(run, "tok_per_s").number


def default_columns(runs: Sequence[Run]) -> list[str]:
    """Policy, capacity and what else varies; the scores; the main figures of speed."""
    names = [] if all(run.label is None for run in runs) else ["run"]
    names += [n for n in ("experiment",) if _varies(runs, n)]
    names += ["policy", *(a for a in AXES if _varies_within_policy(runs, a)), "capacity"]
    given = {k for run in runs for k in (*run.model_args, *run.options)}
    names += [k for k in sorted(given - {*names, *AXES, "label"}) if _varies(runs, k)]
    scored = list(dict.fromkeys(name for run in runs for name in run.scored))
    if len([n for n in scored if _is_accuracy(runs, n)]) > 1:
        names.append(ACCURACY)
    names += scored
    names += [m for m in DEFAULT_METRICS if any(metric_value(r, m).raw is not None for r in runs)]
    if any(metric_value(r, "collision_miss_rate").number for r in runs):
        names.append("collision_miss_rate")
    return [*names, PARETO] if any(_speed(run) is not None for run in runs) else names


def default_sort(runs: Sequence[Run]) -> list[str]:
    return [ACCURACY, "tok_per_s"] if any(accuracy(r).raw is not None for r in runs) else ["policy"]


def _varies(runs: Sequence[Run], name: str) -> bool:
    return len({setting(run, name).raw for run in runs}) > 1


def _varies_within_policy(runs: Sequence[Run], axis: str) -> bool:
    """An axis is worth a column only where the policy's name does not tell it."""
    seen: dict[Any, set[Any]] = {}
    for run in runs:
        seen.setdefault(setting(run, "policy").identity, set()).add(setting(run, axis).raw)
    return any(len(values) > 1 for values in seen.values())


def _is_accuracy(runs: Sequence[Run], name: str) -> bool:
    column = score_column(runs, name)
    return column is not None and column.higher_is_better is True


def reader(runs: Sequence[Run], name: str) -> Reader:
    """Return a column by name. Raises ValueError where no run has it."""
    if name == PARETO:
        return Reader(Column(PARETO, "Pareto"), lambda run: Value(None))
    if name == ACCURACY:
        return Reader(Column(name, "Accuracy", 3, True, True), accuracy)
    metric = metric_column(name)
    if metric is not None:
        return Reader(metric, lambda run: metric_value(run, name))
    scored = score_column(runs, name)
    if scored is not None:
        return Reader(scored, lambda run: _score_value(run, name))
    if name in _SETTINGS or any(setting(run, name).raw is not None for run in runs):
        is_number = name == "capacity_bytes"
        return Reader(
            Column(name, name.replace("_", " ").capitalize(), is_number=is_number),
            lambda run: setting(run, name),
        )
    tasks = [task for run in runs for task in run.results]
    given = [key for run in runs for key in run.model_args]
    raise unknown_column(
        name, list(dict.fromkeys([*_SETTINGS, *given, ACCURACY, *METRICS, *tasks, PARETO]))
    )


def _score_value(run: Run, name: str) -> Value:
    score = find_score(run, name)
    return Value(None) if score is None else Value(score.value, score.stderr)


def _sorted(runs: Sequence[Run], names: Sequence[str]) -> list[Run]:
    """Sort by the columns, best first or text ascending; `:asc` or `:desc` forces an order.

    Runs come in order of experiment and id, and every sort is stable, so ties have one order.
    """
    ordered = list(runs)
    for text in reversed(names):
        name, forced = _split_order(text)
        found = reader(runs, name)
        descending = forced == "desc" or (not forced and found.column.higher_is_better is True)
        read = found.read
        present = [run for run in ordered if read(run).raw is not None]
        absent = [run for run in ordered if read(run).raw is None]
        ordered = sorted(present, key=lambda r: sort_key(read(r)), reverse=descending) + absent
    return ordered


def _split_order(text: str) -> tuple[str, str]:
    name, colon, order = text.rpartition(":")
    return (name, order) if colon and order in ("asc", "desc") else (text, "")


def sort_key(value: Value) -> tuple[int, float, str]:
    """Numbers before texts; a text that begins with a number (`5%`, `30/layer`) goes by it."""
    if value.number is not None:
        return (0, value.number, "")
    text = str(value.raw)
    digits = text.rstrip("%")
    try:
        return (1, float(digits.partition("/")[0]), text)
    except ValueError:
        return (2, 0.0, text)


def _best(columns: Sequence[Column], rows: Sequence[Sequence[Value]]) -> frozenset[tuple[int, int]]:
    """Mark the best of each column that has a better end and more than one value."""
    marked = set()
    for j, column in enumerate(columns):
        numbers = [n for row in rows if (n := row[j].number) is not None]
        if column.higher_is_better is None or len(set(numbers)) < 2:
            continue
        best = max(numbers) if column.higher_is_better else min(numbers)
        marked |= {(i, j) for i, row in enumerate(rows) if row[j].number == best}
    return frozenset(marked)


def as_records(table: Table) -> list[dict[str, Any]]:
    """Return the rows as plain mappings, standard errors under `<column>_stderr`."""
    records = []
    for row in table.rows:
        record: dict[str, Any] = {}
        for column, value in zip(table.columns, row, strict=True):
            record[column.name] = value.raw
            if value.stderr is not None:
                record[f"{column.name}_stderr"] = value.stderr
        records.append(record)
    return records

"""Leaderboards of runs: their columns, order, and what is marked; same runs, same table.

The best of a column and the Pareto front are marked only among runs of one identity, and only
where a test separates them.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lm_eval_moecache.algorithms.registry import AXES
from lm_eval_moecache.report.metrics import PERCENTILES, UNCHANGED, Column
from lm_eval_moecache.report.runs.answers import GOODPUT
from lm_eval_moecache.report.runs.columns import find_column, score_column
from lm_eval_moecache.report.runs.run import (
    ACCURACY,
    PARETO,
    Run,
    Value,
    distinguishing,
    groups,
    varying,
)
from lm_eval_moecache.report.tables.front import best_rows, pareto_front

# Hits are 1 less the misses, and no column of their own.
_SPEED = ("tok_per_s", "tpot_ms", "ttft_ms", "miss_rate")
_ANSWERS = ("right_per_hour", "e2el_ms", "output_tokens")
_RESOLVED = ("capacity", "link", "draft", "store")
_CALLED = ("name", "composition", "source")
_VERSIONS = ("lm-eval-moecache", "lm-eval", "torch", "transformers")
_MOST_LISTED = 3
BEWARE, BOUNDS, EMULATED, INTERVAL = "Beware", "Bounds", "Emulated", "Interval"
LIMITS = "Limits"
PARAMETERS = "Parameters"
_OFFLINE = {"eviction": "belady", "prefetch": "oracle"}
"""The algorithms that know the future, by axis."""


@dataclass(frozen=True, slots=True)
class Table:
    """A finished table."""

    title: str
    columns: tuple[Column, ...]
    cells: Any
    """A DataFrame of a line a row, under the columns' names, with `<name>_stderr` behind those that
    have errors; None where there is nothing."""
    best: frozenset[tuple[int, str]] = frozenset()
    """(row, column) of each column's best cells."""
    about: tuple[tuple[str, str], ...] = ()
    """(name, text) pairs on the runs: when they were made, on what machine, with which versions."""
    apart: tuple[str, ...] = ()
    """Identity keys in which rows differ; such rows are not ranked against each other."""
    places: tuple[str, ...] = ()
    """Row -> its values of `apart`: rows of one place are ranked together. Empty without `apart`.
    """
    runs: tuple[Run, ...] = ()
    """Row -> its run, the first one of a merged row."""

    def texts(self) -> list[list[tuple[str, bool]]]:
        """Return each row's cells as all forms print them, and whether each is a best one."""
        rows = self.cells.to_dict("records")
        return [
            [
                (c.text(row[c.name], row.get(f"{c.name}_stderr")), (i, c.name) in self.best)
                for c in self.columns
            ]
            for i, row in enumerate(rows)
        ]


def cells_of(columns: Sequence[Column], rows: Sequence[Sequence[Value]]) -> Any:
    """Return values as the `cells` of a table."""
    import pandas

    cells: dict[str, list[Any]] = {}
    for j, column in enumerate(columns):
        cells[column.name] = [row[j].raw for row in rows]
        errors = [row[j].stderr for row in rows]
        if any(error is not None for error in errors):
            cells[f"{column.name}_stderr"] = errors
    return pandas.DataFrame(cells, dtype=object)


def leaderboard(
    runs: Sequence[Run],
    *,
    title: str = "",
    columns: Sequence[str] | None = None,
    sort: Sequence[str] | None = None,
    by: Sequence[str] = (),
    merge: bool = False,
) -> Table:
    """Build the leaderboard; rows that differ in a setting of `by` are ranked separately.

    Rows of runs that know the future come last and are not ranked. `merge` makes one row of those
    that differ in nothing but the policy's name. Raises ValueError naming a column that no run has.
    """
    names = expanded(columns) if columns else default_columns(runs)
    table_columns = [find_column(runs, name) for name in names]
    speed = speed_of(runs)
    if not sort:
        has_scores = any(run[ACCURACY].raw is not None for run in runs)
        sort = [ACCURACY, speed] if has_scores else ["policy"]
        sort = [_ANSWERS[0]] if speed in _ANSWERS else sort
    ordered = sorted(sorted_runs(runs, sort), key=knows_the_future)
    ranked: list[list[int]] = []
    for group in groups(ordered):
        parts: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for i in group:
            if not knows_the_future(ordered[i]):
                parts[place_of(ordered[i], by)].append(i)
        ranked += [rows for rows in parts.values() if len(rows) > 1]
    rows = [[run[column.name] for column in table_columns] for run in ordered]
    if PARETO in names:
        axes = [find_column(runs, name) for name in (ACCURACY, speed)]
        pareto_rows = {place for group in ranked for place in pareto_front(ordered, group, axes)}
        for i, row in enumerate(rows):
            row[names.index(PARETO)] = Value("*" if i in pareto_rows else "")
    best = {
        (i, column.name)
        for column in table_columns
        for group in ranked
        for i in best_rows(ordered, group, column)
    }
    apart = tuple(dict.fromkeys([*varying(runs), *by]))
    facts = about(runs)
    if 0 < (num_bounds := sum(map(knows_the_future, runs))) < len(runs):
        facts += ((BOUNDS, "Rows that know the future are listed last, without a rank"),)
    table = Table(
        title=title,
        columns=tuple(table_columns),
        cells=cells_of(table_columns, rows),
        best=frozenset(best),
        about=facts,
        apart=apart,
        places=tuple(_place_text(run, apart) for run in ordered) if apart else (),
        runs=tuple(ordered),
    )
    return merged(table, len(rows) - num_bounds) if merge else table


def speed_of(runs: Sequence[Run]) -> str:
    """Return what accuracy stands against: the time of an answer, where right ones are counted.

    A fast token is no fast answer where a rule changes the answers. Without both it is tok/s.
    """
    counted = any(run["right_per_hour"].raw is not None for run in runs)
    return "e2el_ms" if counted else "tok_per_s"


def knows_the_future(run: Run) -> bool:
    """Whether an algorithm of this run is a bound that no engine can run."""
    return any(run.setting(axis).raw == name for axis, name in _OFFLINE.items())


def merged(table: Table, num_ranked: int) -> Table:
    """Make one row of those that differ in nothing but the policy, whose names it lists.

    Rows from `num_ranked` on, which are not ranked, stay separate from the others.
    """
    if "policy" not in table.cells:
        return table
    others = table.cells.drop(columns="policy").assign(is_ranked=table.cells.index < num_ranked)
    alike: dict[object, list[int]] = defaultdict(list)
    for i, row in enumerate(others.itertuples(index=False)):
        alike[tuple(row)].append(i)
    kept = [rows[0] for rows in alike.values()]
    policies = [dict.fromkeys(map(str, table.cells.policy[rows])) for rows in alike.values()]
    cells = table.cells.iloc[kept].reset_index(drop=True)
    return replace(
        table,
        cells=cells.assign(policy=[", ".join(names) for names in policies]),
        best=frozenset((kept.index(i), name) for i, name in table.best if i in kept),
        places=tuple(table.places[i] for i in kept) if table.places else (),
        runs=tuple(table.runs[i] for i in kept),
    )


def _place_text(run: Run, names: Sequence[str]) -> str:
    """Return what a run has in these settings, a bare number with its setting's name."""
    texts = {name: run.identity.get(name) or str(run.setting(name).raw or "") for name in names}
    named = (t if not t.isdigit() else f"{name} {t}" for name, t in texts.items() if t)
    return ", ".join(named) or "other"


def expanded(columns: Sequence[str]) -> list[str]:
    """Expand `ttft_ms.*` (or `ttft_ms.*@task`) to the mean and its percentiles."""
    names = []
    for name in columns:
        base, star, rest = name.partition(".*")
        names += [f"{base}.{form}{rest}" for form in PERCENTILES] if star else [name]
    return names


def default_columns(runs: Sequence[Run]) -> list[str]:
    """Return policy, capacity and all that varies; the scores; the main speed metrics."""

    def varies(name: str) -> bool:
        return len({run.setting(name).raw for run in runs}) > 1

    def varies_within_policy(axis: str) -> bool:
        """Whether an axis needs a column: the policy's name does not determine it."""
        algorithms = defaultdict(set)
        for run in runs:
            algorithms[run.setting("policy").identity].add(run.setting(axis).raw)
        return any(len(values) > 1 for values in algorithms.values())

    def has(metric: str) -> bool:
        return any(run[metric].raw is not None for run in runs)

    names = [] if all(run.label is None for run in runs) else ["run"]
    names += ["experiment"] if varies("experiment") else []
    names += ["policy", *filter(varies_within_policy, AXES), "capacity"]
    arguments = {key for run in runs for key in (*run.model_args, *run.options)}
    names += filter(varies, sorted(arguments - {*names, *AXES, "label"}))
    # Identity keys that these do not determine; tasks have columns of their own.
    identity_keys = [name for name in varying(runs) if name != "tasks"]
    names += distinguishing(
        identity_keys,
        lambda name: [str(run.setting(name).raw) for run in runs],
        names,
    )
    scored = list(dict.fromkeys(name for run in runs for name in run.scored))
    columns = [score_column(runs, name) for name in scored]
    if sum(column is not None and column.higher_is_better is True for column in columns) > 1:
        names.append(ACCURACY)
    names += scored
    shown = [*(_ANSWERS if speed_of(runs) in _ANSWERS else ()), *_SPEED, "collision_miss_rate"]
    names += [GOODPUT] if any(run.slo for run in runs) else []
    if any(
        run[name].number not in (None, kept) for run in runs for name, kept in UNCHANGED.items()
    ):
        shown += UNCHANGED
    told: list[list[float | None]] = []
    for metric in shown:
        figures = [run[metric].number for run in runs]
        # Neither what is 0 in all rows nor what another column says already.
        if any(figures) and figures not in told:
            names.append(metric)
            told.append(figures)
    return [*names, PARETO] if has("tok_per_s") else names


def sorted_runs(runs: Sequence[Run], names: Sequence[str]) -> list[Run]:
    """Sort by the columns, best first or text ascending; `:asc` or `:desc` forces an order.

    The sort is stable and runs arrive in order of experiment and id, so ties are deterministic.
    """
    ordered = list(runs)
    for text in reversed(names):
        name, forced = split_order(text)
        column = find_column(runs, name)
        descending = forced == "desc" or (not forced and column.higher_is_better is True)
        present = [run for run in ordered if run[name].raw is not None]
        absent = [run for run in ordered if run[name].raw is None]
        present.sort(key=lambda run: sort_key(run[name]), reverse=descending)
        ordered = present + absent
    return ordered


def split_order(text: str) -> tuple[str, str]:
    """Return column and order of `NAME:asc`."""
    name, colon, order = text.rpartition(":")
    return (name, order) if colon and order in ("asc", "desc") else (text, "")


def sort_key(value: Value) -> tuple[int, float, str]:
    """Return a key that sorts numbers first, then texts by a leading number (`5%`, `30/layer`)."""
    if value.number is not None:
        return (0, value.number, "")
    text = str(value.raw)
    try:
        return (1, float(text.rstrip("%").partition("/")[0]), text)
    except ValueError:
        return (2, 0.0, text)


def distinct(runs: Iterable[Run]) -> list[Run]:
    """Return the runs without duplicates: the first of each resolved configuration.

    Configurations compare by what ran, not by the policy's or the file's name.
    """
    first_runs: dict[str, Run] = {}
    for run in runs:
        report = run.moecache
        resolved: dict[str, Any] = {key: report.get(key) for key in _RESOLVED}
        resolved |= {key: value for key, value in report["policy"].items() if key not in _CALLED}
        resolved |= {"model": run.model}
        resolved |= {key: run.model_args.get(key) for key in ("precision", "warm")}
        first_runs.setdefault(
            json.dumps([resolved, run.identity], sort_keys=True, default=str), run
        )
    return list(first_runs.values())


def about(runs: Sequence[Run]) -> tuple[tuple[str, str], ...]:
    """Return (name, text) pairs on date, machine and versions; unknown ones are left out."""

    def listed(texts: Iterable[object]) -> str:
        names = sorted({str(text) for text in texts if text})
        rest = f" and {len(names) - _MOST_LISTED} more" if len(names) > _MOST_LISTED else ""
        return ", ".join(names[:_MOST_LISTED]) + rest

    dates = sorted(str(date)[:10] for run in runs if (date := run.environment.get("date")))
    machines = [run.environment.get("machine", {}) for run in runs]
    versions = [run.environment.get("versions", {}) for run in runs]
    facts = {
        "Runs": str(len(runs)),
        "Date": " to ".join(dict.fromkeys([*dates[:1], *dates[-1:]])),
        "Model": listed(run.moecache.get("model", {}).get("model") for run in runs),
        "Hardware": listed(run.setting("hardware").raw for run in runs),
        "Clock": listed(run.moecache["clock"] for run in runs),
        # The virtual clock's metrics do not depend on the machine that computes them.
        "Measured on": listed(
            m.get("gpu") or m.get("cpu_model") or m.get("cpu")
            for m, run in zip(machines, runs, strict=True)
            if run.moecache["clock"] == "wall"
        ),
        **{name: listed(libraries.get(name) for libraries in versions) for name in _VERSIONS},
    }
    emulated = listed((run.moecache.get("emulate") or {}).get("name") for run in runs)
    if emulated:
        facts[EMULATED] = (
            f"Answers are those of the model that ran ({facts['Model']}), times those of a model "
            f"with the sizes of {emulated}"
        )
    if slo := next((run.slo for run in runs if run.slo), None):
        limits = (f"{name.removesuffix('_ms')} ≤ {most:g} ms" for name, most in slo.items())
        facts[LIMITS] = f"Goodput: the share of requests with {', '.join(limits)}"
    if parameters := _shared_parameters(runs):
        facts[PARAMETERS] = f"In all rows {', '.join(parameters)}"
    mixed = [name for name in _VERSIONS if len({v[name] for v in versions if v.get(name)}) > 1]
    if mixed:
        facts[BEWARE] = (
            f"Made by several versions of {', '.join(mixed)}: rows may differ by that alone"
        )
    return tuple((name, text) for name, text in facts.items() if text)


def _shared_parameters(runs: Sequence[Run]) -> list[str]:
    """Return the parameters of rules that all runs were given alike: no column shows them."""
    first = runs[0].model_args if runs else {}
    return [
        f"{key}={value}"
        for key, value in first.items()
        if key.partition(".")[0] in AXES and "." in key
        if all(run.model_args.get(key) == value for run in runs)
    ]


def place_of(run: Run, names: Sequence[str]) -> tuple[str, ...]:
    return tuple(run.setting(name).identity for name in names)

"""Leaderboards from runs: one row a run; the same runs give the same table to the byte.

What is best and what lies on the Pareto front is marked among runs of one identity only, and by
what a test tells apart: three documents of forty are no difference.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lm_eval_moecache.algorithms.registry import AXES
from lm_eval_moecache.report.columns import (
    DEFAULT_METRICS,
    PERCENTILES,
    SETTINGS,
    Column,
    Value,
    accuracy,
    find_score,
    is_setting,
    metric_column,
    metric_value,
    score_column,
    setting,
    unknown_column,
)
from lm_eval_moecache.report.identity import KEYS, groups, identity, varying
from lm_eval_moecache.report.metrics import METRICS
from lm_eval_moecache.report.results import Run, Score
from lm_eval_moecache.report.statistics import holm, sign_test, z_test

PARETO, ACCURACY = "pareto", "accuracy"
ALPHA = 0.05
"""Chance at which a figure counts as worse than the best of its column."""
_RESOLVED = ("capacity", "link", "draft", "store")
# Of these the means over documents have names of their own.
_BY_DOCUMENT = {"hit_rate": ("request_miss_rate", -1.0)} | {
    name: (f"request_{name}", 1.0) for name in ("tok_per_s", "miss_rate", "collision_miss_rate")
}
_VERSIONS = ("lm-eval-moecache", "lm-eval", "torch", "transformers")
_MOST_LISTED = 3


@dataclass(frozen=True, slots=True)
class Table:
    """A finished table: `best` holds (row, column) positions of what is best in a column."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Value, ...], ...]
    best: frozenset[tuple[int, int]] = frozenset()
    about: tuple[tuple[str, str], ...] = ()
    """What the runs have in common: when they were made, on what, with which versions."""
    apart: tuple[str, ...] = ()
    """Keys of identity in which rows differ: those rows are not ranked against each other."""


@dataclass(frozen=True, slots=True)
class Reader:
    """A column, how it is read from a run, and its samples by document, where they were kept."""

    column: Column
    read: Callable[[Run], Value]
    samples: Callable[[Run], Mapping[str, float]] = lambda run: {}


@dataclass(frozen=True, slots=True)
class Sampled:
    """A run's figure in a column, with its error (0 for none), and the samples it is made of."""

    figure: float
    stderr: float
    samples: Mapping[str, float]


def leaderboard(
    runs: Sequence[Run],
    *,
    title: str = "",
    columns: Sequence[str] | None = None,
    sort: Sequence[str] | None = None,
) -> Table:
    """Build the table. Raises ValueError naming a column that no run has."""
    names = expanded(columns) if columns else default_columns(runs)
    readers = [reader(runs, name) for name in names]
    ordered = _sorted(runs, sort or default_sort(runs))
    ranked = groups(ordered)
    front: set[int] = set()
    if PARETO in names:
        axes = [reader(runs, name) for name in (ACCURACY, "tok_per_s")]
        front = {place for group in ranked for place in pareto_front(ordered, group, axes)}
    rows = [
        tuple(
            Value("*" if index in front else "") if r.column.name == PARETO else r.read(run)
            for r in readers
        )
        for index, run in enumerate(ordered)
    ]
    best = {
        (i, j)
        for j, each in enumerate(readers)
        for group in ranked
        for i in _best(ordered, group, each)
    }
    shown = tuple(each.column for each in readers)
    apart = tuple(varying(runs))
    return Table(title, shown, tuple(rows), frozenset(best), about(runs), apart)


def expanded(columns: Sequence[str]) -> list[str]:
    """Write `ttft_ms.*` (or `ttft_ms.*@task`) out: the mean and its percentiles."""
    names = []
    for name in columns:
        base, star, rest = name.partition(".*")
        names += [f"{base}.{form}{rest}" for form in PERCENTILES] if star else [name]
    return names


def default_columns(runs: Sequence[Run]) -> list[str]:
    """Policy, capacity and what else varies; the scores; the main figures of speed."""
    names = [] if all(run.label is None for run in runs) else ["run"]
    names += [n for n in ("experiment",) if _varies(runs, n)]
    names += ["policy", *(a for a in AXES if _varies_within_policy(runs, a)), "capacity"]
    given = {k for run in runs for k in (*run.model_args, *run.options)}
    names += [k for k in sorted(given - {*names, *AXES, "label"}) if _varies(runs, k)]
    names += [k for k in _untold(runs, names) if k not in names]
    scored = list(dict.fromkeys(name for run in runs for name in run.scored))
    if len([n for n in scored if _is_accuracy(runs, n)]) > 1:
        names.append(ACCURACY)
    names += scored
    names += [m for m in DEFAULT_METRICS if any(metric_value(r, m).raw is not None for r in runs)]
    if any(metric_value(r, "collision_miss_rate").number for r in runs):
        names.append("collision_miss_rate")
    has_speed = any(metric_value(run, "tok_per_s").raw is not None for run in runs)
    return [*names, PARETO] if has_speed else names


def _untold(runs: Sequence[Run], names: Sequence[str]) -> list[str]:
    """Return the keys of identity that these columns leave untold; other tasks have columns."""

    def places(keys: Sequence[str]) -> int:
        return len({tuple(str(setting(run, key).raw) for key in keys) for run in runs})

    kept: list[str] = []
    for name in varying(runs):
        if name != "tasks" and places([*names, *kept, name]) > places([*names, *kept]):
            kept.append(name)
    return kept


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
        return Reader(Column(name, "Accuracy", 3, True, True), accuracy, _answers)
    metric = metric_column(name)
    if metric is not None:
        return Reader(metric, lambda run: metric_value(run, name), lambda run: _speeds(run, name))
    scored = score_column(runs, name)
    if scored is not None:
        return Reader(
            scored,
            lambda run: _score_value(run, name),
            lambda run: _of_score(run, name.partition(":")[0], find_score(run, name)),
        )
    if is_setting(name, ()) or any(setting(run, name).raw is not None for run in runs):
        is_number = name == "capacity_bytes"
        return Reader(
            Column(name, name.replace("_", " ").capitalize(), is_number=is_number),
            lambda run: setting(run, name),
        )
    tasks = [task for run in runs for task in run.results]
    given = [key for run in runs for key in (*run.model_args, *KEYS)]
    raise unknown_column(
        name, list(dict.fromkeys([*SETTINGS, *given, ACCURACY, *METRICS, *tasks, PARETO]))
    )


def _score_value(run: Run, name: str) -> Value:
    score = find_score(run, name)
    return Value(None) if score is None else Value(score.value, score.stderr)


def _of_score(run: Run, task: str, score: Score | None) -> dict[str, float]:
    """Return the scores of a task's documents; of texts their log-likelihoods, less is worse."""
    if score is None:
        return {}
    sign = 1.0 if score.higher_is_better else -1.0
    documents = run.samples.get(task, {}).get(score.key, {})
    return {
        f"{task} {doc}": sign * value[0] if isinstance(value, list) else float(value)
        for doc, value in documents.items()
    }


def _answers(run: Run) -> dict[str, float]:
    """Return the answers to all documents whose primary score `accuracy` is the mean of."""
    scores = [(task, score) for task in run.scored if (score := run.score(task))]
    found: dict[str, float] = {}
    for task, score in scores:
        if score.higher_is_better:
            found |= _of_score(run, task, score)
    return found


def _speeds(run: Run, name: str) -> dict[str, float]:
    """Return a metric by document: means only, as a percentile has no samples."""
    metric, _, only = name.partition("@")
    kept, sign = _BY_DOCUMENT.get(metric.removesuffix(".mean"), (metric.removesuffix(".mean"), 1.0))
    return {
        f"{task} {doc}": sign * value
        for task, metrics in run.speed.items()
        if only in ("", task)
        for doc, value in metrics.get(kept, {}).items()
    }


def worse(one: Sampled, best: Sampled, *, higher_is_better: bool) -> float:
    """Return the chance of one being as much worse than another if they were alike (one-sided).

    By the exact sign test over the documents of both (McNemar's, of right and wrong answers), else
    by the standard errors. Figures that have neither are counts: any difference is one.
    """
    sign = 1 if higher_is_better else -1
    if len(one.samples) > 1 and one.samples.keys() == best.samples.keys():
        losses = [(best.samples[doc] - one.samples[doc]) * sign for doc in one.samples]
        return sign_test(sum(x < 0 for x in losses), sum(x > 0 for x in losses))
    loss = (best.figure - one.figure) * sign
    return z_test(loss, math.hypot(one.stderr, best.stderr))


def _sampled(runs: Sequence[Run], group: Sequence[int], reader: Reader) -> dict[int, Sampled]:
    """Return what a group's runs have in a column, without those that have nothing."""
    found = {}
    for i in group:
        value = reader.read(runs[i])
        if value.number is not None:
            found[i] = Sampled(value.number, value.stderr or 0.0, reader.samples(runs[i]))
    return found


def _best(runs: Sequence[Run], group: Sequence[int], reader: Reader) -> set[int]:
    """Return the places of the best figure of a group and of those that no test tells from it.

    Only where the test tells each of these from every other of the group: else nobody is best.
    """
    higher = reader.column.higher_is_better
    if higher is None:
        return set()
    found = _sampled(runs, group, reader)
    if len({each.figure for each in found.values()}) < 2:
        return set()
    best = (max if higher else min)(found.values(), key=lambda each: each.figure)
    chances = holm([worse(each, best, higher_is_better=higher) for each in found.values()])
    marked = {
        i
        for (i, each), chance in zip(found.items(), chances, strict=True)
        if each.figure == best.figure or chance > ALPHA
    }
    others = found.keys() - marked
    apart = all(
        worse(found[i], found[j], higher_is_better=higher) <= ALPHA for i in others for j in marked
    )
    return marked if others and apart else set()


def pareto_front(runs: Sequence[Run], group: Sequence[int], axes: Sequence[Reader]) -> set[int]:
    """Return the places of the runs that no other run of the group is known to beat.

    One beats another where the test finds it better in one axis, and not worse in the other. Of an
    axis without a better end (the capacity) less is better.
    """
    first, second = (_sampled(runs, group, axis) for axis in axes)
    known = [i for i in first if i in second]
    if len(known) < 2:
        return set()

    def is_worse(one: int, other: int) -> list[bool]:
        return [
            worse(kept[one], kept[other], higher_is_better=axis.column.higher_is_better is True)
            <= ALPHA
            for kept, axis in zip((first, second), axes, strict=True)
        ]

    def beats(one: int, other: int) -> bool:
        return any(is_worse(other, one)) and not any(is_worse(one, other))

    return {i for i in known if not any(beats(j, i) for j in known if j != i)}


def _sorted(runs: Sequence[Run], names: Sequence[str]) -> list[Run]:
    """Sort by the columns, best first or text ascending; `:asc` or `:desc` forces an order.

    Runs come in order of experiment and id, and every sort is stable, so ties have one order.
    """
    ordered = list(runs)
    for text in reversed(names):
        name, forced = split_order(text)
        found = reader(runs, name)
        descending = forced == "desc" or (not forced and found.column.higher_is_better is True)
        read = found.read
        present = [run for run in ordered if read(run).raw is not None]
        absent = [run for run in ordered if read(run).raw is None]
        ordered = sorted(present, key=lambda r: sort_key(read(r)), reverse=descending) + absent
    return ordered


def split_order(text: str) -> tuple[str, str]:
    """Return column and order of `NAME:asc`."""
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


def distinct(runs: Iterable[Run]) -> list[Run]:
    """Return the runs, of those with one setting the first.

    A setting is what ran, not what a policy is called or a file is named.
    """
    found: dict[str, Run] = {}
    for run in runs:
        report = run.moecache
        told: dict[str, Any] = {key: report.get(key) for key in _RESOLVED}
        told |= {axis: report["policy"][axis] for axis in AXES}
        told |= {"model": run.model, "phases": report["policy"].get("phases")}
        told |= {key: run.model_args.get(key) for key in ("precision", "warm")}
        key = json.dumps([told, identity(run)], sort_keys=True, default=str)
        found.setdefault(key, run)
    return list(found.values())


def about(runs: Sequence[Run]) -> tuple[tuple[str, str], ...]:
    """Return (name, text) pairs: when, on what and with which versions; what is unknown is left."""
    dates = sorted(str(d)[:10] for run in runs if (d := run.environment.get("date")))
    machines = [run.environment.get("machine", {}) for run in runs]
    versions = [run.environment.get("versions", {}) for run in runs]
    found = {
        "Runs": str(len(runs)),
        "Date": " to ".join(dict.fromkeys([*dates[:1], *dates[-1:]])),
        "Model": _listed(str(run.moecache.get("model", {}).get("model", "")) for run in runs),
        "Hardware": _listed(str(setting(run, "hardware").raw) for run in runs),
        "Clock": _listed(str(run.moecache["clock"]) for run in runs),
        "Run on": _listed(
            str(m.get("gpu") or m.get("cpu_model") or m.get("cpu", "")) for m in machines
        ),
    }
    found |= {name: _listed(str(v.get(name, "")) for v in versions) for name in _VERSIONS}
    return tuple((name, text) for name, text in found.items() if text)


def _listed(texts: Iterable[str]) -> str:
    names = sorted({text for text in texts if text})
    rest = f" and {len(names) - _MOST_LISTED} more" if len(names) > _MOST_LISTED else ""
    return ", ".join(names[:_MOST_LISTED]) + rest

"""Leaderboards and views of runs as Markdown, CSV, JSON and HTML: same runs, same bytes.

The best of a column and the Pareto front are marked only among runs of one identity, and only
where a test separates them: three documents of forty are no difference, nor are they equal. The
HTML page is self-contained: sortable and filterable, straight from a file.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lm_eval_moecache.algorithms.registry import AXES
from lm_eval_moecache.records.numbers import unknown_name_error
from lm_eval_moecache.report.metrics import MEGABYTE, METRICS
from lm_eval_moecache.report.results import (
    ACCURACY,
    PARETO,
    PERCENTILES,
    Column,
    Run,
    Value,
    accuracy,
    distinguishing,
    find_column,
    find_score,
    groups,
    identity,
    metric_column,
    metric_value,
    score_column,
    selected,
    setting,
    varying,
)
from lm_eval_moecache.report.statistics import holm, sign_test, tango_score, z_test

if TYPE_CHECKING:
    from lm_eval_moecache.records.schemas.inputs import Pick, View


ALPHA = 0.05
"""Significance level at which a value counts as worse than the best of its column."""
MARGIN = 0.01
"""Non-inferiority: a score is not worse if shown less than this lower, a point of a share."""
# Hits are 1 less the misses, and no column of their own.
_SPEED = ("ttft_ms", "tpot_ms", "tok_per_s", "miss_rate")
_RESOLVED = ("capacity", "link", "draft", "store")
_CALLED = ("name", "composition", "source")
_VERSIONS = ("lm-eval-moecache", "lm-eval", "torch", "transformers")
_MOST_LISTED = 3
_BEWARE, _BOUNDS = "Beware", "Bounds"
_OFFLINE = {"eviction": "belady", "prefetch": "oracle"}
"""The algorithms that know the future, by axis."""


@dataclass(frozen=True, slots=True)
class Table:
    """A finished table: `best` holds the (row, column) positions of each column's best cells."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Value, ...], ...]
    best: frozenset[tuple[int, int]] = frozenset()
    about: tuple[tuple[str, str], ...] = ()
    """(name, text) pairs on the runs: when they were made, on what machine, with which versions."""
    apart: tuple[str, ...] = ()
    """Identity keys in which rows differ; such rows are not ranked against each other."""
    places: tuple[str, ...] = ()
    """Row -> its values of `apart`: rows of one place are ranked together. Empty without `apart`.
    """


def leaderboard(
    runs: Sequence[Run],
    *,
    title: str = "",
    columns: Sequence[str] | None = None,
    sort: Sequence[str] | None = None,
    by: Sequence[str] = (),
    merge: bool = False,
) -> Table:
    """Build the leaderboard; rows that differ in a setting of `by` are ranked apart.

    Rows of runs that know the future come last and are not ranked. `merge` makes one row of those
    that differ in nothing but the policy's name. Raises ValueError naming a column that no run has.
    """
    names = expanded(columns) if columns else default_columns(runs)
    table_columns = [find_column(runs, name) for name in names]
    if not sort:
        has_scores = any(accuracy(run).raw is not None for run in runs)
        sort = [ACCURACY, "tok_per_s"] if has_scores else ["policy"]
    ordered = sorted(sorted_runs(runs, sort), key=knows_the_future)
    ranked: list[list[int]] = []
    for group in groups(ordered):
        parts: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for i in group:
            if not knows_the_future(ordered[i]):
                parts[_place(ordered[i], by)].append(i)
        ranked += parts.values()
    rows = [[column.read(run) for column in table_columns] for run in ordered]
    if PARETO in names:
        axes = [find_column(runs, name) for name in (ACCURACY, "tok_per_s")]
        pareto_rows = {place for group in ranked for place in pareto_front(ordered, group, axes)}
        for i, row in enumerate(rows):
            row[names.index(PARETO)] = Value("*" if i in pareto_rows else "")
    best = {
        (i, j)
        for j, column in enumerate(table_columns)
        for group in ranked
        for i in _best(ordered, group, column)
    }
    apart = tuple(dict.fromkeys([*varying(runs), *by]))
    table_rows = tuple(map(tuple, rows))
    places = tuple(_place_text(run, apart) for run in ordered) if apart else ()
    facts = about(runs)
    if 0 < (num_bounds := sum(map(knows_the_future, runs))) < len(runs):
        facts += ((_BOUNDS, "rows that know the future stand last and are not ranked"),)
    table = Table(title, tuple(table_columns), table_rows, frozenset(best), facts, apart, places)
    return merged(table, len(rows) - num_bounds) if merge else table


def knows_the_future(run: Run) -> bool:
    """Whether an algorithm of this run is a bound that no engine can run."""
    return any(setting(run, axis).raw == name for axis, name in _OFFLINE.items())


def merged(table: Table, num_ranked: int) -> Table:
    """Make one row of those that differ in nothing but the policy, whose names it lists.

    Rows from `num_ranked` on, which are not ranked, keep apart from the others.
    """
    at = [j for j, column in enumerate(table.columns) if column.name == "policy"]
    if not at:
        return table
    alike: dict[object, list[int]] = defaultdict(list)
    for i, row in enumerate(table.rows):
        others = tuple((v.raw, v.stderr) for j, v in enumerate(row) if j != at[0])
        alike[others, i < num_ranked].append(i)
    rows = []
    for same in alike.values():
        cells = list(table.rows[same[0]])
        if len(same) > 1:
            names = dict.fromkeys(str(table.rows[i][at[0]].raw) for i in same)
            cells[at[0]] = replace(cells[at[0]], raw=", ".join(names))
        rows.append(tuple(cells))
    kept = [same[0] for same in alike.values()]
    return replace(
        table,
        rows=tuple(rows),
        best=frozenset((kept.index(i), j) for i, j in table.best if i in kept),
        places=tuple(table.places[i] for i in kept) if table.places else (),
    )


def _place_text(run: Run, names: Sequence[str]) -> str:
    """Return what a run has in these settings, a bare number with its setting's name."""
    texts = {name: identity(run).get(name) or str(setting(run, name).raw or "") for name in names}
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
        return len({setting(run, name).raw for run in runs}) > 1

    def varies_within_policy(axis: str) -> bool:
        """Whether an axis needs a column: the policy's name does not determine it."""
        algorithms = defaultdict(set)
        for run in runs:
            algorithms[setting(run, "policy").identity].add(setting(run, axis).raw)
        return any(len(values) > 1 for values in algorithms.values())

    def has(metric: str) -> bool:
        return any(metric_value(run, metric).raw is not None for run in runs)

    names = [] if all(run.label is None for run in runs) else ["run"]
    names += ["experiment"] if varies("experiment") else []
    names += ["policy", *filter(varies_within_policy, AXES), "capacity"]
    arguments = {key for run in runs for key in (*run.model_args, *run.options)}
    names += filter(varies, sorted(arguments - {*names, *AXES, "label"}))
    # Identity keys that these do not determine; tasks have columns of their own.
    identity_keys = [name for name in varying(runs) if name != "tasks"]
    names += distinguishing(
        identity_keys,
        lambda keys: {tuple(str(setting(r, n).raw) for n in keys) for r in runs},
        names,
    )
    scored = list(dict.fromkeys(name for run in runs for name in run.scored))
    columns = [score_column(runs, name) for name in scored]
    if sum(column is not None and column.higher_is_better is True for column in columns) > 1:
        names.append(ACCURACY)
    names += scored
    lossy = {"routing_fidelity": 1.0, "low_precision_share": 0.0}
    shown = [*_SPEED, "collision_miss_rate"]
    if any(
        metric_value(run, m).number not in (None, kept) for run in runs for m, kept in lossy.items()
    ):
        # Both: fidelity says nothing of precision, the other nothing of routing.
        shown += lossy
    told: list[list[float | None]] = []
    for metric in shown:
        figures = [metric_value(run, metric).number for run in runs]
        # Neither what is 0 in all rows nor what another column says already.
        if any(figures) and figures not in told:
            names.append(metric)
            told.append(figures)
    return [*names, PARETO] if has("tok_per_s") else names


class Sampled(NamedTuple):
    """A run's value in a column, its standard error (0 for none), and its samples.

    Higher is better: the sign is flipped for columns in which it is not.
    """

    figure: float
    stderr: float
    samples: Mapping[str, float]

    def is_worse(self, best: Sampled) -> float:
        """Return the one-sided p-value of being worse than `best`.

        From the exact sign test over the documents of both (McNemar's for right and wrong answers;
        for speeds, documents of one batch are one), else from the standard errors. Figures with
        neither are counts: any difference is real.
        """
        samples, best_samples = self.samples, best.samples
        if samples and samples.keys() == best_samples.keys():
            losses = [best_samples[doc] - samples[doc] for doc in samples]
            return sign_test(sum(x < 0 for x in losses), sum(x > 0 for x in losses))
        return z_test(best.figure - self.figure, math.hypot(self.stderr, best.stderr))

    @property
    def margin(self) -> float:
        """`MARGIN`, in points of a share and relative to any other score."""
        return MARGIN * max(1.0, abs(self.figure))

    def is_inferior(self, other: Sampled) -> float:
        """Return the one-sided p-value of being worse than `other` by the margin or more.

        Small where it is shown not worse (non-inferiority): over the documents of both by Tango's
        score for right and wrong, else by the standard error of the difference.
        """
        samples, others = self.samples, other.samples
        stderr = math.hypot(self.stderr, other.stderr)
        if len(samples) > 1 and samples.keys() == others.keys():
            gains = [samples[doc] - others[doc] for doc in samples]
            if all(gain in (-1, 0, 1) for gain in gains):
                distance = tango_score(
                    gains.count(1), gains.count(-1), len(gains), -min(other.margin, 0.99)
                )
                return z_test(distance, 1.0)
            mean = math.fsum(gains) / len(gains)
            spread = math.fsum((gain - mean) ** 2 for gain in gains) / (len(gains) - 1)
            # Scores of texts are log-likelihoods here, and the table's figure is not their mean.
            if math.isclose(mean, self.figure - other.figure, abs_tol=1e-9):
                stderr = math.sqrt(spread / len(gains))
        # Without an error nothing is shown.
        return z_test(self.figure - other.figure + other.margin, stderr) if stderr else 1.0


def _sampled(runs: Sequence[Run], group: Sequence[int], column: Column) -> dict[int, Sampled]:
    """Return row -> value and samples, for the runs of a group that have a value."""
    sign = 1 if column.higher_is_better else -1
    by_row = {}
    for i in group:
        value = column.read(runs[i])
        if value.number is not None:
            samples = {doc: sign * figure for doc, figure in column.samples(runs[i]).items()}
            by_row[i] = Sampled(sign * value.number, value.stderr or 0.0, samples)
    return by_row


def _best(runs: Sequence[Run], group: Sequence[int], column: Column) -> set[int]:
    """Return the rows of a group's best value and of those no test separates from it.

    Of a score, only those shown not worse than the best by `MARGIN`, so that fewer documents mark
    fewer rows. Empty unless the test separates each of these from every other row of the group, and
    for values with neither documents nor standard errors.
    """
    sampled = {} if column.higher_is_better is None else _sampled(runs, group, column)
    if len({row.figure for row in sampled.values()}) < 2:
        return set()
    if not any(row.samples or row.stderr for row in sampled.values()):
        return set()  # nothing to test: a percentile, a rate of one phase, the fidelity
    best = max(sampled.values(), key=lambda row: row.figure)
    chances = holm([row.is_worse(best) for row in sampled.values()])
    if _is_score(column):
        chances = [1 - row.is_inferior(best) for row in sampled.values()]
        best_rows = {i for i, c in zip(sampled, chances, strict=True) if c >= 1 - ALPHA}
    else:
        best_rows = {i for i, c in zip(sampled, chances, strict=True) if c > ALPHA}
    best_rows |= {i for i, row in sampled.items() if row.figure == best.figure}
    others = sampled.keys() - best_rows
    are_separated = all(sampled[i].is_worse(sampled[j]) <= ALPHA for i in others for j in best_rows)
    return best_rows if others and are_separated else set()


def _is_score(column: Column) -> bool:
    """Whether a column is of answers: accuracy, or a task's score."""
    is_figure = column.is_number and column.higher_is_better is not None
    return is_figure and metric_column(column.name) is None


def is_lossless(run: Run) -> bool:
    """Whether a run's record says that it computed what the model without a cache computes."""
    fidelity, low = (metric_value(run, m).number for m in ("routing_fidelity", _LOW))
    return fidelity == 1 and not low


_LOW = "low_precision_share"


def keeps_score(one: Sampled, other: Sampled, is_lossless: bool, is_other_lossless: bool) -> bool:
    """Whether a row keeps its place by its score against another one that is as good otherwise."""
    if is_lossless:
        if one.figure > other.figure:
            return True
        if not is_other_lossless:
            return other.is_inferior(one) > ALPHA
    return one.figure - other.figure > one.margin and other.is_worse(one) <= ALPHA


def pareto_front(runs: Sequence[Run], group: Sequence[int], axes: Sequence[Column]) -> set[int]:
    """Return the rows of the runs that keep their place against every other run of the group.

    On axes other than scores the figures count as they are; without a better direction (the
    capacity), less is better. Against a run that is no worse on those, a row keeps its place by a
    score that is more than `MARGIN` higher and shown to be higher, so that fewer documents never
    earn a place. A lossless row keeps it unless the other's score is no lower as observed and,
    where that run is lossy, shown not worse by `MARGIN`.
    """
    sides = [_sampled(runs, group, axis) for axis in axes]
    complete = [i for i in group if all(i in side for side in sides)]
    if len(complete) < 2:
        return set()
    lossless = {i: is_lossless(runs[i]) for i in complete}

    def keeps(i: int, j: int) -> bool:
        pairs = [(axis, side[i], side[j]) for axis, side in zip(axes, sides, strict=True)]
        if all(one.figure == other.figure for _, one, other in pairs):
            return True
        return any(
            keeps_score(one, other, lossless[i], lossless[j])
            if _is_score(axis)
            else one.figure > other.figure
            for axis, one, other in pairs
        )

    return {i for i in complete if all(keeps(i, j) for j in complete if j != i)}


def sorted_runs(runs: Sequence[Run], names: Sequence[str]) -> list[Run]:
    """Sort by the columns, best first or text ascending; `:asc` or `:desc` forces an order.

    The sort is stable and runs arrive in order of experiment and id, so ties are deterministic.
    """
    ordered = list(runs)
    for text in reversed(names):
        name, forced = split_order(text)
        column = find_column(runs, name)
        descending = forced == "desc" or (not forced and column.higher_is_better is True)
        read = column.read
        present = [run for run in ordered if read(run).raw is not None]
        absent = [run for run in ordered if read(run).raw is None]
        present = sorted(present, key=lambda run: sort_key(read(run)), reverse=descending)
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
            json.dumps([resolved, identity(run)], sort_keys=True, default=str), run
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
        "Hardware": listed(setting(run, "hardware").raw for run in runs),
        "Clock": listed(run.moecache["clock"] for run in runs),
        # The virtual clock's metrics do not depend on the machine that computes them.
        "Measured on": listed(
            m.get("gpu") or m.get("cpu_model") or m.get("cpu")
            for m, run in zip(machines, runs, strict=True)
            if run.moecache["clock"] == "wall"
        ),
        **{name: listed(libraries.get(name) for libraries in versions) for name in _VERSIONS},
    }
    mixed = [name for name in _VERSIONS if len({v[name] for v in versions if v.get(name)}) > 1]
    if mixed:
        facts[_BEWARE] = (
            f"made by several versions of {', '.join(mixed)}: rows may differ by that alone"
        )
    return tuple((name, text) for name, text in facts.items() if text)


# --- views: pivots, changes against a baseline, the best within a budget ---


def view_table(runs: Sequence[Run], view: View) -> Table:
    """Build one entry of `views`.

    `where` selects runs by settings (a value or a list of them). Without `columns`, `values` are
    the columns of a plain table. With `columns`, that setting's values head the columns, `rows`
    (one setting or several) name the rows, and each cell holds its run's `values`. `relative_to`
    adds changes in percent against the run with those settings (`with_changes`); `pick` keeps the
    best run within a budget where several share a cell (`pick`).
    """
    chosen = [run for run in runs if selected(run, view.where)]
    if not chosen:
        raise ValueError(f"view {view.title!r}: no run has where={view.where!r}.")
    across = view.columns
    values = ["accuracy"] if view.values is None else view.values
    rows = (["policy"] if across else []) if view.rows is None else view.rows
    settings = [*rows, *([across] if across else [])]
    if view.pick is not None:
        chosen = pick(chosen, runs, settings, view.pick)
    sort = view.sort or (settings if across else None)
    flat = leaderboard(chosen, title=view.title, columns=[*settings, *values], sort=sort)
    if view.relative_to is not None:
        flat = with_changes(flat, len(settings), view.relative_to)
    if across:
        heads = [str(setting(run, across).raw) for run in sorted_runs(chosen, [across])]
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
    empty = [Value(None)] * len(figures)
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
    what sets them apart. The baselines themselves have no change.
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


def pick(
    chosen: Sequence[Run], runs: Sequence[Run], settings: Sequence[str], rule: Pick
) -> list[Run]:
    """Among runs that agree in `settings`, keep the one with the `best` metric within the budget.

    A run is within the budget if its `score` (a task) is at most `loss` (0.01: one percent) worse
    than its baseline's: the run of `runs` with the settings of `relative_to` that agrees in the
    others and, unless `relative_to` names a part of it, in its identity. Groups without a run
    within the budget are left out.
    """
    figures = metric_column(rule.best)
    if figures is None or figures.higher_is_better is None:
        allowed = [name for name, m in METRICS.items() if m.higher_is_better is not None]
        raise unknown_name_error("views: pick: best", rule.best, allowed)
    sign = 1 if figures.higher_is_better else -1
    apart = varying(runs)
    if not rule.relative_to.keys().isdisjoint(apart):
        apart = []
    others = [name for name in (*settings, *apart) if name not in rule.relative_to]
    base_place = tuple(str(value) for value in rule.relative_to.values())
    bases = {_place(r, others): r for r in runs if _place(r, [*rule.relative_to]) == base_place}
    best: dict[tuple[str, ...], tuple[float, Run]] = {}
    for run in chosen:
        base, figure = bases.get(_place(run, others)), figures.read(run).number
        if base is None or figure is None:
            continue
        new, old = (find_score(compared, rule.score) for compared in (run, base))
        if new is None or old is None or not old.value:
            raise ValueError(
                f"views: pick: {run.run_id} or its baseline has no score of {rule.score!r}."
            )
        change = new.value / old.value - 1
        loss = -change if old.higher_is_better else change
        group = _place(run, [*settings, *apart])
        if loss <= rule.loss and (group not in best or sign * figure > best[group][0]):
            best[group] = sign * figure, run
    return [run for _, run in best.values()]


def _place(run: Run, names: Sequence[str]) -> tuple[str, ...]:
    return tuple(setting(run, name).identity for name in names)


# --- output formats ---

_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_TEST = "a test over the documents (p ≤ 0.05)"
_LEGEND = f"Bold: better than every row that is not, by {_TEST}; bold rows are not told apart, "
_LEGEND += f"or, of scores, are shown not worse than the best by {100 * MARGIN:g} point"
_FRONT = (
    f"`*`: every row as fast is shown less accurate, by over {100 * MARGIN:g} point; a lossless "
    "row has it unless a row as fast and as accurate is lossless or shown not worse by "
    f"{100 * MARGIN:g} point,"
)


def as_markdown(tables: Sequence[Table]) -> str:
    """Return the tables one below the other, each followed by a legend of its marks."""
    texts = []
    for table in tables:
        lines = [f"## {_in_markdown(table.title)}", ""] if table.title else []
        lines.append(line([_in_markdown(column.heading) for column in table.columns]))
        marks = [":-:" if c.name == PARETO else "---" for c in table.columns]
        numbers = zip(table.columns, marks, strict=True)
        lines.append(line(["--:" if c.is_number else mark for c, mark in numbers]))
        for i, row in enumerate(table.rows):
            cells = [_in_markdown(c.text(v)) for c, v in zip(table.columns, row, strict=True)]
            best = [f"**{text}**" if (i, j) in table.best else text for j, text in enumerate(cells)]
            lines.append(line(best))
        legend = "; ".join(notes(table))
        texts.append("\n".join([*lines, "", *([f"{legend}.", ""] if legend else [])]))
    return "\n".join(texts)


def line(cells: Sequence[str]) -> str:
    """Return one line of a Markdown table; the cells must be escaped already."""
    return f"| {' | '.join(cells)} |"


def notes(table: Table) -> list[str]:
    """Return what a table's marks mean, and which of its rows are not ranked together."""
    texts = [_LEGEND] if table.best else []
    if any(c.name == PARETO for c in table.columns):
        texts.append(f"{_FRONT} by {'that test' if table.best else _TEST}")
    texts += ["±: standard error"] if any(v.stderr for row in table.rows for v in row) else []
    if table.apart:
        texts.append(f"rows of different {', '.join(table.apart)} are not compared")
    return [*texts, *(text for name, text in table.about if name in (_BEWARE, _BOUNDS))]


def _in_markdown(text: str) -> str:
    """Escape a text so that it stays one plain cell: names may come from untrusted files."""
    escaped = harmless(text.replace("\\", "\\\\").replace("|", "\\|"))
    return " ".join(escaped.splitlines())


def harmless(text: str) -> str:
    """Escape HTML and links in a Markdown text, which could run scripts."""
    return text.replace("<", "&lt;").replace("[", "\\[")


def rows_as_markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows with the same keys as a table; floats get four decimals, None stays empty."""

    def cell(value: Any) -> Any:
        if isinstance(value, str):
            return harmless(value)
        return f"{value:.4f}" if isinstance(value, float) else value

    cells = [[cell(value) for value in row.values()] for row in rows]
    return padded([harmless(name) for name in rows[0]], cells)


def padded(heads: Sequence[str], cells: Sequence[Sequence[Any]]) -> str:
    """Return a Markdown table with columns aligned for a terminal."""
    from pytablewriter import MarkdownTableWriter

    return str(MarkdownTableWriter(headers=heads, value_matrix=cells).dumps())


_LATEX = {c: f"\\{c}" for c in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "≤": r"$\leq$",
    "\n": " ",
}


def as_latex(tables: Sequence[Table]) -> str:
    """Return each table as a `tabular` of booktabs; a comment above it says what its marks mean."""
    texts = []
    for table in tables:
        about = filter(None, (" ".join(table.title.split()), "; ".join(notes(table))))
        lines = [f"% {text}" for text in about]
        ends = "".join(
            "r" if c.is_number else "c" if c.name == PARETO else "l" for c in table.columns
        )
        heads = [_in_latex(column.heading) for column in table.columns]
        lines += [rf"\begin{{tabular}}{{{ends}}}", r"\toprule", rf"{' & '.join(heads)} \\"]
        lines += [r"\midrule"]
        for i, row in enumerate(table.rows):
            cells = [_in_latex(c.text(v)) for c, v in zip(table.columns, row, strict=True)]
            best = [rf"\textbf{{{t}}}" if (i, j) in table.best else t for j, t in enumerate(cells)]
            lines.append(rf"{' & '.join(best)} \\")
        texts.append("\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""]))
    return "\n".join(texts)


def _in_latex(text: str) -> str:
    """Escape a text so that it stays one plain cell."""
    return "".join(_LATEX.get(character, character) for character in text)


def as_csv(tables: Sequence[Table]) -> str:
    """Return the first table: full precision, one header line, `<column>_stderr` beside a score."""
    records = _records(tables[0])
    recorded = {name for record in records for name in record}
    names = []
    for column in tables[0].columns:
        names += [column.name, *({f"{column.name}_stderr"} & recorded)]
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    for record in records:
        # A spreadsheet would evaluate a text like `=1+1`: quote texts, not numbers.
        writer.writerow(
            {
                name: f"'{cell}" if isinstance(cell, str) and cell.startswith(_FORMULA) else cell
                for name, cell in record.items()
            }
        )
    return text.getvalue()


def as_json(tables: Sequence[Table]) -> str:
    """Return `{"title", "columns", "rows", "views": [{"title", "columns", "rows"}]}`."""
    first, *views = [
        {"title": table.title, "columns": [c.name for c in table.columns], "rows": _records(table)}
        for table in tables
    ]
    return json.dumps({**first, "views": views}, indent=1, ensure_ascii=False) + "\n"


def _records(table: Table) -> list[dict[str, Any]]:
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


_PAGE = Path(__file__).with_name("page.html")
# The metrics shown first; others follow in the table's order.
_FIRST = (ACCURACY, "tok_per_s", "ttft_ms", "tpot_ms", "miss_rate")
# The settings that name a run; all settings unfold below the name.
_NAMING = ("run", "policy", "capacity")
_PLACES = ("experiment", "tasks", "model")
_IDLE = ("standard", "none", "fetch")


def as_html(tables: Sequence[Table]) -> str:
    """Return the page: the leaderboard with settings folded, the other tables below it.

    Rows on the Pareto front come first, then the others, both in the table's order.
    """
    # Importing jinja2 takes as long as the rest of `moecache table`.
    from jinja2 import Environment

    first, *views = tables
    names = [column.name for column in first.columns]
    has_mean = ACCURACY in names

    def rank(place: int) -> int:
        """Order columns: Pareto mark, accuracy (or the scores, without a mean), speed, others."""
        name = names[place]
        if name == PARETO:
            return -1
        if metric_column(name) is None and name != ACCURACY and not has_mean:
            return 0
        return _FIRST.index(name) if name in _FIRST else len(_FIRST)

    # What is drawn above the table: accuracy, or the first score without a mean, against speed.
    rising = [column.name for column in first.columns if column.higher_is_better]
    scores = [ACCURACY] if has_mean else [name for name in rising if metric_column(name) is None]
    drawn = [names.index(name) for name in (*scores[:1], "tok_per_s") if name in names]
    settings = [j for j, column in enumerate(first.columns) if _kind(column) == "setting"]
    figures = sorted((j for j in range(len(names)) if j not in settings), key=rank)
    places, rows = first.places or [""] * len(first.rows), []
    digits = {
        place: _digits(first, [*compress(first.rows, [at == place for at in places])])
        for place in set(places)
    }
    for i, place in enumerate(places):
        row = _row(first, i, settings, figures, digits[place]) | {"place": place}
        if len(drawn) == 2:
            y, x = (first.rows[i][j] for j in drawn)
            row["point"] = [x.number, y.number, y.stderr] if None not in (x.raw, y.raw) else None
        rows.append(row)
    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
        _PAGE.read_text(encoding="utf-8")
    )
    text = template.render(
        title=first.title or "moecache results",
        about=first.about,
        board={
            "columns": [first.columns[j] for j in figures],
            "settings": [first.columns[j].heading for j in settings],
            "rows": sorted(rows, key=lambda row: not row["is_front"]),
            "places": list(dict.fromkeys(first.places)),
            # The choice of a place is one of these settings already.
            "chosen": [first.columns[j].heading for j in settings if _is_apart(first, j)],
            "apart": " and ".join(name.replace("_", " ") for name in first.apart),
            "axes": [first.columns[j].words or first.columns[j].heading for j in drawn[::-1]],
        },
        views=[
            {
                "title": view.title,
                "columns": view.columns,
                "rows": [
                    _cells(view, i, range(len(view.columns)), view_digits)
                    for i in range(len(view.rows))
                ],
            }
            for view in views
            for view_digits in [_digits(view, view.rows)]
        ],
        notes=[note.replace("`", "") for note in notes(first)],
        kind=_kind,
    )
    return text + "\n"


def _is_apart(table: Table, j: int) -> bool:
    return len(set(table.places)) > 1 and table.columns[j].name in table.apart


_SMALL = 10
"""Columns of smaller values have two decimals at least: a phone's tokens per second."""


def _digits(table: Table, rows: Sequence[Sequence[Value]]) -> list[int]:
    """Return the decimals of each column: those that give its largest value four digits.

    Never more than the tables in text have, but two where all values are below 10; bytes are given
    in MB, with up to three.
    """
    digits = []
    for j, column in enumerate(table.columns):
        is_bytes = "[MB]" in column.words
        numbers = [abs(row[j].number or 0.0) / (MEGABYTE if is_bytes else 1) for row in rows]
        largest = max(numbers, default=0.0)
        most = 3 if is_bytes else column.decimals
        is_score = not column.words or column.name == ACCURACY
        if column.decimals and not is_score and largest < _SMALL:
            most = max(most, 2)
        digits.append(most if is_score else min(most, max(0, 4 - len(str(int(largest))))))
    return digits


def _row(
    table: Table, i: int, settings: Sequence[int], figures: Sequence[int], digits: Sequence[int]
) -> dict[str, Any]:
    """Return a row of the leaderboard: a short name, and its distinguishing settings to unfold."""
    row = list(zip(table.columns, table.rows[i], strict=True))
    texts = [(row[j][0], str(row[j][1].raw or "")) for j in settings]
    filled = [(column, text) for column, text in texts if text]
    # What all rows shown have in common is above the table.
    apart = {table.columns[j].name for j in settings if _is_apart(table, j)}
    naming = [(column, text) for column, text in filled if column.name not in apart]
    others = []
    for column, text in naming:
        if column.name in AXES or column.name == "parameters":
            # An algorithm by its name; idle ones are left out.
            others.append("" if column.name in AXES and text in _IDLE else text)
        elif column.name not in (*_NAMING, *_PLACES):
            others.append(f"{column.heading.lower()} {text}")
    others += [text for column, text in naming if column.name in _PLACES]
    return {
        "name": " ".join(text for column, text in naming if column.name in _NAMING) or "run",
        "more": ", ".join(filter(None, others)),
        "settings": [(column.heading, text) for column, text in filled],
        "keys": [text for _, text in texts],
        "cells": _cells(table, i, figures, digits),
        "is_front": any(c.name == PARETO and value.raw == "*" for c, value in row),
    }


def _cells(
    table: Table, i: int, places: Sequence[int], digits: Sequence[int]
) -> list[dict[str, Any]]:
    cells = []
    for j in places:
        column, value = table.columns[j], table.rows[i][j]
        text, _, error = brief(column, value, digits[j]).partition(" ±")
        # The page sorts by `key`, where texts with a leading number are recognised.
        cell = {"key": "" if value.raw is None else str(value.raw), "label": column.heading}
        cell |= {"kind": _kind(column), "text": text, "error": error}
        cells.append({**cell, "is_best": (i, j) in table.best})
    return cells


def brief(column: Column, value: Value, decimals: int) -> str:
    """Return a cell with so many decimals, bytes in MB."""
    if "[MB]" not in column.words or value.number is None:
        return replace(column, decimals=decimals).text(value)
    return f"{value.number / MEGABYTE:.{decimals}f} MB"


def _kind(column: Column) -> str:
    if column.name == PARETO:
        return "pareto"
    if not column.is_number:
        return "setting"
    return {True: "number higher", False: "number lower", None: "number"}[column.higher_is_better]


FORMS: Mapping[str, Callable[[Sequence[Table]], str]] = {
    "md": as_markdown,
    "csv": as_csv,
    "html": as_html,
    "json": as_json,
}
"""The forms that `--write` writes."""
ALL_FORMS = {**FORMS, "latex": as_latex}

"""Joins two sets of runs by configuration and judges every figure: the regression gate.

The chance of an alarm without a real change is at most `alpha` for the whole comparison: each
score is tested over its samples, and the tests are corrected for their number (Holm, over the
tests that could tell anything: Tarone).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lm_eval_moecache.report.columns import metric_column, metric_value
from lm_eval_moecache.report.judgement import (
    EXACTLY,
    MISSING,
    NEW,
    REGRESSIONS,
    Figure,
    Judgement,
    Test,
    changes,
    floor_of,
    mcnemar,
    presence,
    score_test,
)
from lm_eval_moecache.report.results import Run, Score
from lm_eval_moecache.report.rules import Rules
from lm_eval_moecache.report.statistics import holm, tarone

ALL_TASKS = "(all)"
# A perplexity in its other forms: one of them is enough to judge.
_SAME_AS_PERPLEXITY = ("byte_perplexity", "bits_per_byte")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One judged figure; a missing run has no task, a missing task no metric."""

    run: str
    task: str | None
    metric: str | None
    judgement: Judgement

    @property
    def verdict(self) -> str:
        return self.judgement.verdict

    @property
    def is_regression(self) -> bool:
        return self.verdict in REGRESSIONS


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Every judged figure, and what the verdict means."""

    rows: tuple[Row, ...]
    alpha: float
    differing: Mapping[str, tuple[str, str]]
    """Arguments of two single runs that were compared nonetheless: name -> (baseline, new)."""
    exact_runs: int
    """Runs that were made on the baseline's machine, and had to repeat it to the digit."""
    tests: int
    weak_tests: tuple[str, ...]
    """Tests on too few samples: not even the loss of all would fail."""

    @property
    def is_regression(self) -> bool:
        return any(row.is_regression for row in self.rows)


Units = dict[str, dict[str, Run]]
Pending = tuple[str, str | None, str | None, "Figure | Judgement"]


def compare(baseline: Sequence[Run], new: Sequence[Run], rules: Rules) -> Comparison:
    """Judge every figure of BASELINE. Raises ValueError where the two have no run in common.

    Two sides of one run each are compared whatever their arguments.
    """
    old_units, new_units = _units(baseline, rules, "BASELINE"), _units(new, rules, "NEW")
    new_units, differing = _joined(old_units, new_units)
    pending: list[Pending] = []
    exact = 0
    for key, tasks in old_units.items():
        found = new_units.get(key)
        if found is None:
            pending.append(_absent(key, None, MISSING))
            continue
        shared = [(run, found[task]) for task, run in tasks.items() if task in found]
        exact += bool(shared) and all(rules.is_exact(*pair) for pair in shared)
        pending += _compare_unit(key, tasks, found, rules)
    pending += [_absent(key, None, NEW) for key in new_units if key not in old_units]
    return _judged(pending, rules, differing, exact)


def _judged(
    pending: Sequence[Pending], rules: Rules, differing: Mapping[str, tuple[str, str]], exact: int
) -> Comparison:
    """Correct the tests for their number and give the verdicts."""
    tests = [f.test for *_, f in pending if isinstance(f, Figure) and f.test is not None]
    able = tarone([test.least_p for test in tests], rules.alpha)
    adjusted = iter(holm([test.p for test, one in zip(tests, able, strict=True) if one]))
    corrected = iter([next(adjusted) if one else 1.0 for one in able])
    rows, weak = [], []
    for run, task, metric, figure in pending:
        if isinstance(figure, Figure):
            if figure.test is not None and figure.test.least_possible > rules.alpha:
                weak.append(f"{task} {metric}")
            figure = figure.judge(None if figure.test is None else next(corrected), rules.alpha)
        rows.append(Row(run=run, task=task, metric=metric, judgement=figure))
    return Comparison(
        rows=tuple(rows),
        alpha=rules.alpha,
        differing=differing,
        exact_runs=exact,
        tests=len(tests),
        weak_tests=tuple(dict.fromkeys(weak)),
    )


def _units(runs: Sequence[Run], rules: Rules, side: str) -> Units:
    """Return configuration as given -> task -> run. Tasks may be spread over several runs."""
    units: Units = {}
    for run in runs:
        given = {**run.model_args, **run.options}
        kept = {k: v for k, v in sorted(given.items()) if k not in rules.ignore}
        key = ",".join([run.model, *(f"{k}={v}" for k, v in kept.items())])
        tasks = units.setdefault(key, {})
        for task in run.tasks:
            if task in tasks:
                raise ValueError(
                    f"{side} has two runs of {key!r} on {task!r}: {tasks[task].run_id} and "
                    f"{run.run_id}. Compare folders with one run a configuration."
                )
            tasks[task] = run
    return units


def _joined(old: Units, new: Units) -> tuple[Units, dict[str, tuple[str, str]]]:
    """Give a single new run the key of the single old one; return the arguments that differ."""
    if old.keys() & new.keys():
        return new, {}
    (ours, theirs) = next(iter(old)), next(iter(new))
    if len(old) != 1 or len(new) != 1:
        raise ValueError(
            f"BASELINE and NEW have no configuration in common: {ours!r} is not {theirs!r}. "
            "`--ignore KEY,...` leaves settings out of the join."
        )
    before, after = (_arguments(next(iter(units.values()))) for units in (old[ours], new[theirs]))
    names = dict.fromkeys([*before, *after])
    differing = {
        name: (before.get(name, "(not given)"), after.get(name, "(not given)"))
        for name in names
        if before.get(name) != after.get(name)
    }
    return {ours: new[theirs]}, differing


def _arguments(run: Run) -> dict[str, str]:
    given = {"model": run.model, **run.model_args, **run.options}
    return {name: str(value) for name, value in given.items()}


def _compare_unit(
    key: str, tasks: Mapping[str, Run], found: Mapping[str, Run], rules: Rules
) -> list[Pending]:
    pending: list[Pending] = []
    for task, run in tasks.items():
        if task in found:
            pending += _compare_scores(key, task, run, found[task], rules)
            pending += _compare_speed(key, task, run, found[task], rules)
        else:
            pending.append(_absent(key, task, MISSING))
    pooled = _all_tasks(tasks, found, rules)
    if pooled is not None:
        pending.append((key, ALL_TASKS, "accuracy", pooled))
    return pending + [_absent(key, task, NEW) for task in found if task not in tasks]


def _compare_scores(key: str, task: str, old: Run, new: Run, rules: Rules) -> Iterator[Pending]:
    exact = rules.is_exact(old, new)
    new_scores = {score.key: score for score in new.scores(task)}
    for score in old.scores(task):
        if score.metric in _SAME_AS_PERPLEXITY:
            continue
        if score.key not in new_scores:
            yield _absent(key, task, MISSING, score.key)
            continue
        samples = [run.samples.get(task, {}).get(score.key, {}) for run in (old, new)]
        figure = _score_figure(score, new_scores[score.key], samples, rules, exact)
        yield (key, task, score.key, figure)


def _score_figure(
    score: Score, new: Score, samples: Sequence[Mapping[str, Any]], rules: Rules, exact: bool
) -> Figure:
    test = None if exact else score_test(score, new, *samples)
    floor = rules.floor_of(exact)
    return Figure(
        baseline=score.value,
        new=new.value,
        higher_is_better=score.higher_is_better,
        allowed=floor_of(score, floor),
        judged_by=EXACTLY if exact and not floor else f"floor {floor:g}",
        test=test,
    )


def _all_tasks(tasks: Mapping[str, Run], found: Mapping[str, Run], rules: Rules) -> Figure | None:
    """Judge the answers to all tasks' documents together: many small losses are one large one."""
    counts, exact = [], True
    documents = 0
    for task, run in tasks.items():
        score = run.score(task)
        if task not in found or score is None or not score.higher_is_better:
            continue
        sides = [r.samples.get(task, {}).get(score.key, {}) for r in (run, found[task])]
        counted = changes(*sides)
        if counted is not None:
            counts.append(counted)
            documents += len(sides[0])
            exact &= rules.is_exact(run, found[task])
    if len(counts) < 2:
        return None
    before, after, won, lost = (sum(column) for column in zip(*counts, strict=True))
    test: Test | None = None if exact else mcnemar(won, lost, documents)
    floor = rules.floor_of(exact)
    return Figure(
        baseline=before / documents,
        new=after / documents,
        higher_is_better=True,
        allowed=floor,
        judged_by=EXACTLY if exact and not floor else f"floor {floor:g}",
        test=test,
    )


def _compare_speed(key: str, task: str, old: Run, new: Run, rules: Rules) -> Iterator[Pending]:
    if task not in old.moecache["tasks"]:
        return
    exact, clock = rules.is_exact(old, new), str(old.moecache["clock"])
    for name in rules.metrics:
        metric, at, wanted = name.partition("@")
        if at and wanted != task:
            continue
        before, after = (metric_value(run, f"{metric}@{task}").number for run in (old, new))
        if before is None or after is None:
            if before is not after:
                yield (key, task, metric, presence(before, after))
            continue
        column = metric_column(metric)
        assert column is not None, metric
        tolerance = rules.tolerance_of(name, clock, exact)
        yield (
            key,
            task,
            metric,
            Figure(
                baseline=before,
                new=after,
                higher_is_better=column.higher_is_better,
                allowed=tolerance * abs(before),
                judged_by=f"tolerance {tolerance:g}" if tolerance else EXACTLY,
            ),
        )


def _absent(key: str, task: str | None, verdict: str, metric: str | None = None) -> Pending:
    judged = Judgement(baseline=None, new=None, allowed=0.0, judged_by="presence", verdict=verdict)
    return (key, task, metric, judged)

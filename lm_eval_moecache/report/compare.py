"""The regression gate: joins two sets of runs by configuration and judges every metric.

The chance of a false alarm is at most `alpha` for the whole comparison: each score is tested over
its samples, and the tests are corrected for multiplicity (Holm, over the tests that can reach
significance: Tarone). A gain is held to the same rules as a loss.
Runs whose identities differ (prompts, seeds, device ...) are refused: that difference would pass
for the change under test.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any, NamedTuple

import numpy as np

from lm_eval_moecache.records.numbers import unknown_name_error
from lm_eval_moecache.report.metrics import METRICS
from lm_eval_moecache.report.runs.run import ONLY_HOW, Figure, Run, Score, identity
from lm_eval_moecache.report.statistics import (
    answers_interval,
    holm,
    least_flip_p,
    mean_interval,
    noticeable_loss,
    sign_flip_test,
    sign_test,
    tarone,
    z_test,
)

SAME, BETTER, WITHIN, WORSE, CHANGED = "same", "better", "within", "worse", "changed"
MISSING, NEW = "missing", "new"
REGRESSIONS = (WORSE, CHANGED, MISSING)
EXACTLY, MCNEMAR = "exactly", "McNemar"
Samples = Mapping[str, Any]
# Absorbs rounding where floats differ only by the order of a sum.
_EPSILON = 1e-9
SPEED_METRICS = ("ttft_ms", "tpot_ms", "tok_per_s", "miss_rate")
# A hundred reruns on other CPUs should give no more than a false alarm or two.
DEFAULT_ALPHA = 0.01
# Half a point of accuracy, or half a percent of perplexity.
DEFAULT_FLOOR = 0.005
# On one machine the virtual clock repeats to the last digit. Another CPU rounds differently, so a
# router's near tie may fall the other way; a wall clock measures.
TOLERANCE = {"virtual": 0.02, "wall": 0.1}
# The keys of a record's `environment` that decide how sums round: threads do, cores do not.
_ABOUT = ("machine", "versions")
_MACHINE = ("cpu", "instructions", "threads", "gpu", "rounding")
_LIBRARIES = ("torch", "transformers", "numpy")
ALL_TASKS, WHOLE_RUN = "(all)", "(whole run)"
# Perplexity in other forms: judging one of them is enough.
_SAME_AS_PERPLEXITY = ("byte_perplexity", "bits_per_byte")


@dataclass(frozen=True, kw_only=True, slots=True)
class CompareOptions:
    """How much worse a metric may get. `tolerances` override `tolerance` by metric.

    Tolerances are relative to the baseline. `floor` and `tolerance` None: 0 for two runs on one
    machine under the virtual clock, else `DEFAULT_FLOOR` and `TOLERANCE`. `same_machine` None:
    read from the records.
    """

    alpha: float = DEFAULT_ALPHA
    floor: float | None = None
    tolerance: float | None = None
    tolerances: Mapping[str, float] = field(default_factory=dict)
    metrics: tuple[str, ...] = SPEED_METRICS
    ignore: tuple[str, ...] = ()
    same_machine: bool | None = None

    def __post_init__(self) -> None:
        if not 0 < self.alpha < 1:
            raise ValueError(f"alpha={self.alpha} must lie between 0 and 1: 0.05, or 5%.")
        for name in (*self.metrics, *self.tolerances):
            if ":" in name:
                raise ValueError(
                    f"metric={name!r} is a score, and every score of every task is compared as it "
                    f"is, within `--floor`. Allowed here: figures of speed, as {SPEED_METRICS}."
                )
            if Figure.of(name) is None:
                raise unknown_name_error("metric", name, METRICS)

    def is_exact(self, old: Run, new: Run) -> bool:
        """Whether `new` must repeat the metrics of `old` to the digit."""
        is_virtual = all(run.moecache["clock"] == "virtual" for run in (old, new))
        return is_virtual and self.is_one_machine(old, new)

    def is_one_machine(self, old: Run, new: Run) -> bool:
        """Whether both runs were made on machines that round alike.

        As the records say: CPU, instruction set, threads and libraries. Old records and lm-eval's
        own files do not name the CPU, and pass for another machine's.
        """
        if self.same_machine is not None:
            return self.same_machine
        machines, versions = ([r.environment.get(k, {}) for r in (old, new)] for k in _ABOUT)
        one, other = (
            [m.get("cpu_model"), *map(v.get, _LIBRARIES), *map(m.get, _MACHINE)]
            for m, v in zip(machines, versions, strict=True)
        )
        return one == other and all(one[: 1 + len(_LIBRARIES)])


class Test(NamedTuple):
    """A test of one metric: its p-values, and `by`, the test and its samples in words.

    `p_loss` and `p_gain` are one-sided: the chance of a loss, or a gain, this large if nothing had
    changed. `least_p` is the smallest p that this many changed samples can give, `least_possible`
    the smallest p if every sample had changed one way.
    """

    p_loss: float
    p_gain: float
    by: str
    least_p: float = 0.0
    least_possible: float = 0.0


class Difference(NamedTuple):
    """New minus baseline over the same documents, positive where the score got better.

    `p` is two-sided: the chance of a difference this large, either way, if nothing had changed.
    """

    mean: float
    low: float
    """Low end of the 95% interval."""
    high: float
    documents: int
    p: float
    by: str


def paired(losses: Sequence[float]) -> tuple[Test, Difference]:
    """Return what documents' losses (positive: worse) say: McNemar's test, else sign flips."""
    values = -np.asarray(losses, dtype=np.float64)
    count, mean = len(losses), float(values.mean())
    if np.isin(values, (-1, 0, 1)).all():
        won, lost = int((values > 0).sum()), int((values < 0).sum())
        low, high = answers_interval(won, lost, count)
        test = Test(
            sign_test(won, lost),
            sign_test(lost, won),
            f"{MCNEMAR}: {lost} lost, {won} won of {count} documents",
            least_p=0.5 ** (won + lost),
            least_possible=0.5**count,
        )
        by = "McNemar's exact test"
    else:
        low, high = mean_interval(values)
        test = Test(
            sign_flip_test(-values),
            sign_flip_test(values),
            f"sign flips of {count} documents",
            least_p=least_flip_p(values),
            least_possible=least_flip_p([1.0] * count),
        )
        by = "sign flips"
    p = min(2 * min(test.p_loss, test.p_gain), 1.0)
    return test, Difference(mean, low, high, count, p, by)


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One metric of both sides, judged; a missing run has no task, a missing task no metric.

    `allowed` is how much the figure may change, for better or worse, whatever the test finds.
    `corrected` is `p` after the correction over the whole comparison; 1 where too few samples
    changed to exclude chance. `higher_is_better` None: neither direction is better,
    and any change beyond `allowed` counts.
    """

    run: str
    task: str | None = None
    metric: str | None = None
    baseline: float | None = None
    new: float | None = None
    higher_is_better: bool | None = None
    allowed: float = 0.0
    judged_by: str = "presence"
    test: Test | None = None
    difference: Difference | None = None
    """Of a score whose documents are known on both sides, also where the digits must repeat."""
    corrected: float | None = None
    verdict: str = ""

    @property
    def change(self) -> float | None:
        """New minus baseline; None where either is missing."""
        if self.baseline is None or self.new is None:
            return None
        return self.new - self.baseline

    @property
    def loss(self) -> float:
        """How much worse the new figure is; negative for a gain. Both sides must have a figure."""
        assert self.baseline is not None and self.new is not None, "a figure that a side lacks"
        return self.baseline - self.new if self.higher_is_better else self.new - self.baseline

    @property
    def gained(self) -> bool:
        """Whether the new figure is the better one of two."""
        return self.change is not None and self.loss < 0

    @property
    def p(self) -> float | None:
        """The one-sided p-value of the change that was seen, a loss or a gain; None untested."""
        if self.test is None:
            return None
        return self.test.p_gain if self.gained else self.test.p_loss

    @property
    def is_regression(self) -> bool:
        """Whether this row alone fails the comparison."""
        return self.verdict in REGRESSIONS

    def judged(self, corrected: float | None, alpha: float) -> Row:
        """Return the row with its verdict; where there is no test, `allowed` alone decides."""
        assert self.baseline is not None and self.new is not None, "a figure that a side lacks"
        slack = _EPSILON * max(abs(self.baseline), abs(self.new))
        by_chance = corrected is not None and corrected > alpha
        if abs(self.loss) <= slack:
            verdict = SAME
        elif by_chance or abs(self.loss) <= self.allowed + slack:
            verdict = WITHIN
        elif self.higher_is_better is None:
            verdict = CHANGED
        else:
            verdict = BETTER if self.loss < 0 else WORSE
        return replace(self, corrected=corrected, verdict=verdict)


def score_test(baseline: Score, new: Score, old_samples: Samples, samples: Samples) -> Test | None:
    """Test whether a score changed: McNemar's exact test for right or wrong, else sign flips.

    Paired by document where both sides kept the same documents; pairs (log-likelihood, words) are
    judged by the log-likelihood (higher is better). Otherwise a z-test on the standard errors; None
    where lm-eval reports none. Raises ValueError where a document's word counts differ: it is then
    a different document.
    """
    sign = 1 if baseline.higher_is_better else -1
    if len(old_samples) < 2 or old_samples.keys() != samples.keys():
        if baseline.stderr is None or new.stderr is None:
            return None
        error = math.hypot(baseline.stderr, new.stderr)
        loss = sign * (baseline.value - new.value)
        return Test(z_test(loss, error), z_test(-loss, error), "standard errors")
    return paired(_losses(baseline, old_samples, samples))[0]


def _losses(baseline: Score, old_samples: Samples, samples: Samples) -> list[float]:
    """Return each document's loss. Raises ValueError where its word counts differ."""
    sign = 1 if baseline.higher_is_better else -1
    losses = []
    for doc, before in old_samples.items():
        after = samples[doc]
        if isinstance(before, list):
            if before[1] != after[1]:
                raise ValueError(
                    f"{baseline.key}: document {doc} has {before[1]:g} words or bytes in the "
                    f"baseline, {after[1]:g} in the new run: they are different documents. "
                    "Make the baseline again."
                )
            losses.append(before[0] - after[0])
        else:
            losses.append(sign * (before - after))
    return losses


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Every judged metric, and what the verdict rests on."""

    rows: tuple[Row, ...]
    alpha: float
    differing: Mapping[str, tuple[str, str]]
    """Arguments in which two single runs differ, compared nonetheless: name -> (baseline, new)."""
    versions: Mapping[str, tuple[str, str]]
    """Libraries whose versions differ between runs that were compared: name -> (baseline, new)."""
    exact_runs: int
    """Runs made on the baseline's machine, which had to repeat it to the digit."""
    on_one_machine: bool
    """Whether any run was made on the baseline's machine, under whatever settings."""
    tests: int
    weak_tests: tuple[str, ...]
    """Tests with too few samples: not even losing all of them would fail."""

    @property
    def noticeable(self) -> dict[int, float]:
        """Documents of a tested score of right answers -> the loss noticed in four cases of five.

        A share; of a change that turns answers wrong and none right, and of this score alone.
        """
        sizes = {
            row.difference.documents
            for row in self.rows
            if row.test is not None and row.test.by.startswith(MCNEMAR) and row.difference
        }
        losses = {size: noticeable_loss(size, self.alpha) for size in sorted(sizes)}
        return {size: loss for size, loss in losses.items() if loss is not None}

    @property
    def is_regression(self) -> bool:
        """Whether any row fails the comparison."""
        return any(row.is_regression for row in self.rows)


Units = dict[str, dict[str, Run]]


def compare(baseline: Sequence[Run], new: Sequence[Run], options: CompareOptions) -> Comparison:
    """Judge every metric of BASELINE. Raises ValueError where the two have no run in common.

    Two sides of one run each are compared whatever their policies, but their identities must agree.
    """
    old_units, new_units = _units(baseline, options, "BASELINE"), _units(new, options, "NEW")
    new_units, differing = _joined(old_units, new_units)
    rows: list[Row] = []
    exact_runs, on_one_machine, versions = 0, False, dict[str, tuple[str, str]]()
    for key, tasks in old_units.items():
        new_tasks = new_units.get(key)
        if new_tasks is None:
            rows.append(Row(run=key, verdict=MISSING))
            continue
        shared = {task: (run, new_tasks[task]) for task, run in tasks.items() if task in new_tasks}
        for task, pair in shared.items():
            _check_identity(*pair, task, options)
            before, after = (run.environment.get("versions") or {} for run in pair)
            changed = _apart(before, after, "none").items()
            versions |= {k: sides for k, sides in changed if k in before and k in after}
        on_one_machine |= any(options.is_one_machine(*pair) for pair in shared.values())
        exact_runs += bool(shared) and all(_repeats(*p, options) for p in shared.values())
        for task in tasks:
            if task in shared:
                rows += _scores(key, task, *shared[task], options)
                rows += _speeds(key, task, *shared[task], options)
            else:
                rows.append(Row(run=key, task=task, verdict=MISSING))
        rows += _all_tasks(key, shared, options)
        for old, new_run in _whole_runs(shared):
            rows += _speeds(key, None, old, new_run, options)
        rows += [Row(run=key, task=task, verdict=NEW) for task in new_tasks if task not in tasks]
    rows += [Row(run=key, verdict=NEW) for key in new_units if key not in old_units]
    if not any(row.change is not None or row.is_regression for row in rows):
        raise ValueError(
            "BASELINE and NEW have no figure in common: nothing was compared. Allowed: runs that "
            f"report one of {', '.join(options.metrics)}, or scores of the same tasks."
        )

    # Correct for the number of tests, leaving out those that cannot reach significance.
    tests = {i: row.test for i, row in enumerate(rows) if row.test is not None}
    losses, gains = (
        (
            dict(zip(tests, _corrected(p, [*tests.values()], options.alpha), strict=True))
            for p in zip(*((test.p_loss, test.p_gain) for test in tests.values()), strict=True)
        )
        if tests
        else ({}, {})
    )
    weak = [rows[i] for i, test in tests.items() if test.least_possible > options.alpha]
    judged = [
        row if row.verdict else row.judged((gains if row.gained else losses).get(i), options.alpha)
        for i, row in enumerate(rows)
    ]
    return Comparison(
        rows=tuple(judged),
        alpha=options.alpha,
        differing=differing,
        versions=versions,
        exact_runs=exact_runs,
        on_one_machine=on_one_machine,
        tests=len(tests),
        weak_tests=tuple(dict.fromkeys(f"{row.task} {row.metric}" for row in weak)),
    )


def _corrected(p_values: Sequence[float], tests: Sequence[Test], alpha: float) -> list[float]:
    """Return Holm's p-values over the tests that can reach significance, and 1 for the others."""
    testable = tarone([test.least_p for test in tests], alpha)
    adjusted = iter(holm([*compress(p_values, testable)]))
    return [next(adjusted) if is_testable else 1.0 for is_testable in testable]


def _units(runs: Sequence[Run], options: CompareOptions, side: str) -> Units:
    """Return configuration (as given) -> task -> run. Tasks may be spread over several runs."""
    units: Units = {}
    for run in runs:
        arguments = {**run.model_args, **run.options}
        left_out = {*options.ignore, *ONLY_HOW}
        compared = {k: v for k, v in sorted(arguments.items()) if k not in left_out}
        key = ",".join([run.model, *(f"{k}={v}" for k, v in compared.items())])
        tasks = units.setdefault(key, {})
        # A replay has no tasks: its metrics are those of the whole run.
        for task in run.tasks or [WHOLE_RUN]:
            if task in tasks:
                raise ValueError(
                    f"{side} has two runs of {key!r} on {task!r}: {tasks[task].run_id} and "
                    f"{run.run_id}. Compare folders with one run a configuration."
                )
            tasks[task] = run
    return units


def _joined(old: Units, new: Units) -> tuple[Units, dict[str, tuple[str, str]]]:
    """Give a lone new run the key of the lone old one; return units and the differing arguments."""
    if old.keys() & new.keys():
        return new, {}
    (old_key, new_key) = next(iter(old)), next(iter(new))
    if len(old) != 1 or len(new) != 1:
        raise ValueError(
            f"BASELINE and NEW have no configuration in common: {old_key!r} is not {new_key!r}. "
            "`--ignore KEY,...` leaves settings out of the join."
        )
    runs = [next(iter(units.values())) for units in (old[old_key], new[new_key])]
    before, after = ({"model": run.model, **run.model_args, **run.options} for run in runs)
    return {old_key: new[new_key]}, _apart(before, after, "(not given)")


def _apart(
    one: Mapping[str, Any], other: Mapping[str, Any], absent: str
) -> dict[str, tuple[str, str]]:
    """Return the entries in which two mappings differ, as texts: name -> (one, other)."""
    sides = {
        key: (str(one.get(key, absent)), str(other.get(key, absent))) for key in {**one, **other}
    }
    return {key: pair for key, pair in sides.items() if pair[0] != pair[1]}


def _check_identity(old: Run, new: Run, task: str, options: CompareOptions) -> None:
    """Raise ValueError where the identities differ, naming each key not ignored."""
    differing = _apart(identity(old, [task]), identity(new, [task]), "none")
    read = [run.facts.get("inputs") for run in (old, new)]
    if all(read) and read[0] != read[1]:
        # Weights, drafts, artefacts or task files; older records do not say.
        differing["inputs"] = (str(read[0]), str(read[1]))
    unexpected = {key: pair for key, pair in differing.items() if key not in options.ignore}
    if unexpected:
        changes = ", ".join(f"{key} ({one} -> {other})" for key, (one, other) in unexpected.items())
        raise ValueError(
            f"{old.run_id} and {new.run_id} are runs of different identity on {task}: {changes}. "
            f"`--ignore {','.join(unexpected)}` compares them anyway."
        )


def _tested(
    row: Row, test: Test | None, exact: bool, options: CompareOptions, unit: float = 1.0
) -> Row:
    """Return the row of a score with its allowance and test; the floor is a share of `unit`."""
    floor = options.floor
    if floor is None:
        floor = 0.0 if exact else DEFAULT_FLOOR
    judged_by = EXACTLY if exact and not floor else f"floor {floor:g}"
    judged_by = judged_by if test is None else test.by
    return replace(row, allowed=floor * unit, judged_by=judged_by, test=test)


def _repeats(old: Run, new: Run, options: CompareOptions) -> bool:
    """Whether `new` must answer as `old` did: the same settings on one machine.

    Other settings answer otherwise by design, and which answers turn right is chance.
    """
    before, after = ([run.model, run.model_args, run.options] for run in (old, new))
    return before == after and options.is_exact(old, new)


def _scores(key: str, task: str, old: Run, new: Run, options: CompareOptions) -> Iterator[Row]:
    exact = _repeats(old, new, options)
    new_scores = {score.key: score for score in new.scores(task)}
    for score in old.scores(task):
        if score.metric in _SAME_AS_PERPLEXITY:
            continue
        if score.key not in new_scores:
            yield Row(run=key, task=task, metric=score.key, verdict=MISSING)
            continue
        after, higher = new_scores[score.key], score.higher_is_better
        sides = [run.samples.get(task, {}).get(score.key, {}) for run in (old, new)]
        # Of pairs (log-likelihood, words) the score is no mean over documents.
        is_mean = not any(isinstance(v, list) for side in sides for v in side.values())
        is_mean = is_mean and len(sides[0]) > 1 and sides[0].keys() == sides[1].keys()
        row = Row(
            run=key,
            task=task,
            metric=score.key,
            baseline=score.value,
            new=after.value,
            higher_is_better=higher,
            difference=paired(_losses(score, *sides))[1] if is_mean else None,
        )
        test = None if exact else score_test(score, after, *sides)
        # The floor: points for a share, relative to the baseline for any other score.
        unit = 1.0 if higher and 0 <= score.value <= 1 else abs(score.value)
        yield _tested(row, test, exact, options, unit)


def _all_tasks(
    key: str, shared: Mapping[str, tuple[Run, Run]], options: CompareOptions
) -> Iterator[Row]:
    """Judge the answers of all tasks together: many small losses make a large one."""
    answers: list[tuple[float, float]] = []
    tasks, exact = 0, True
    for task, pair in shared.items():
        score = pair[0].score(task)
        if score is None or not score.higher_is_better:
            continue
        old, new = (run.samples.get(task, {}).get(score.key, {}) for run in pair)
        both = [(value, new[doc]) for doc, value in old.items() if doc in new]
        if old and old.keys() == new.keys() and all(v in (0, 1) for two in both for v in two):
            tasks += 1
            answers += both
            exact &= _repeats(*pair, options)
    if tasks > 1:
        before, after = (sum(side) / len(answers) for side in zip(*answers, strict=True))
        test, found = paired([old - new for old, new in answers])
        row = Row(run=key, task=ALL_TASKS, metric="accuracy", baseline=before, new=after)
        row = replace(row, higher_is_better=True, difference=found)
        yield _tested(row, None if exact else test, exact, options)


def _whole_runs(shared: Mapping[str, tuple[Run, Run]]) -> list[tuple[Run, Run]]:
    """Return the pairs of runs with the same tasks, whose totals can be compared."""
    pairs = {(old.run_id, new.run_id): (old, new) for old, new in shared.values()}
    return [(old, new) for old, new in pairs.values() if set(old.tasks) == set(new.tasks)]


def _speeds(
    key: str, task: str | None, old: Run, new: Run, options: CompareOptions
) -> Iterator[Row]:
    """Judge a task's speed, or with None that of the whole run."""
    if task is not None and task not in old.moecache["tasks"]:
        return
    default = 0.0 if options.is_exact(old, new) else TOLERANCE.get(str(old.moecache["clock"]), 0.0)
    default = default if options.tolerance is None else options.tolerance
    for name in options.metrics:
        metric, at, wanted_task = name.partition("@")
        if at and wanted_task != task:
            continue
        figure = Figure.of(metric)
        assert figure is not None, metric
        told = metric if task is None else f"{metric}@{task}"
        before, after = (run[told].number for run in (old, new))
        row = Row(run=key, task=task, metric=metric, baseline=before, new=after)
        if before is not None and after is not None:
            tolerance = options.tolerances.get(name, default)
            yield replace(
                row,
                higher_is_better=figure.metric.higher_is_better,
                allowed=tolerance * abs(before),
                judged_by=f"tolerance {tolerance:g}" if tolerance else EXACTLY,
            )
        elif before is not after:
            yield replace(row, verdict=MISSING if after is None else NEW)


def as_json(comparison: Comparison, *, everything: bool = True) -> str:
    """Return `{"verdict", "alpha", "tests", "noticeable", "rows", ...}`, always with all rows."""
    report = {
        "verdict": "regression" if comparison.is_regression else "pass",
        "alpha": comparison.alpha,
        "tests": comparison.tests,
        "weak_tests": list(comparison.weak_tests),
        "noticeable": {str(size): loss for size, loss in comparison.noticeable.items()},
        "exact_runs": comparison.exact_runs,
        "versions": {name: list(pair) for name, pair in comparison.versions.items()},
        "differing": {name: list(pair) for name, pair in comparison.differing.items()},
        "rows": [
            {
                **{name: getattr(row, name) for name in _TOLD},
                "difference": None if row.difference is None else row.difference._asdict(),
                "p": row.p,
                "p_corrected": row.corrected,
                "verdict": row.verdict,
            }
            for row in comparison.rows
        ],
    }
    return json.dumps(report, indent=2) + "\n"


_TOLD = ("run", "task", "metric", "baseline", "new", "change", "allowed", "judged_by")


def as_text(comparison: Comparison, *, everything: bool = False) -> str:
    """Return one line per changed metric (or every metric); the verdict ends the log."""
    lines = _lines(comparison, everything)
    return "\n".join([*_notes(comparison), *lines, _summary(comparison)]) + "\n"


def as_markdown(comparison: Comparison, *, everything: bool = False) -> str:
    """Return the same as a pull-request comment: the verdict first, then a list."""
    lines = [f"- {text.strip()}" for text in _lines(comparison, everything)]
    notes = [*_notes(comparison), ""] if lines else _notes(comparison)
    return "\n".join([f"### moecache: {_summary(comparison)}", "", *notes, *lines]) + "\n"


FORMS: Mapping[str, Callable[..., str]] = {"text": as_text, "md": as_markdown, "json": as_json}


def _lines(comparison: Comparison, everything: bool) -> list[str]:
    lines = []
    for row in comparison.rows:
        if row.verdict == SAME and not everything:
            continue
        text = f"{row.verdict:8s} {' '.join(filter(None, (row.task or WHOLE_RUN, row.metric)))}"
        if row.change is not None:
            text += f": {row.baseline:.6g} -> {row.new:.6g} (change {row.change:+.4g}, "
            text += f"allowed {row.allowed:.4g}, {row.judged_by}"
            if row.corrected is not None and comparison.tests > 1:
                text += f", one-sided p {row.corrected:.2g}, corrected for {comparison.tests} tests"
            elif row.p is not None:
                text += f", one-sided p {row.p:.2g}"
            text += ")"
        lines.append(f"{text}  [{row.run}]")
    return lines + _differences(comparison, everything)


_MOST_TOLD = 20
"""Differences of scores that are printed without `--all`, changed or not."""


def _differences(comparison: Comparison, everything: bool) -> list[str]:
    """Return a line per score: how much it changed, how surely, by how many documents."""
    rows = [row for row in comparison.rows if row.difference is not None]
    several = len({row.run for row in rows}) > 1
    if len(rows) > _MOST_TOLD and not everything:
        rows = [row for row in rows if row.verdict != SAME]
    lines = []
    for row in rows:
        assert row.difference is not None, "chosen for having one"
        *figures, documents, p, by = row.difference
        scale, unit = (100, " points") if "McNemar" in by else (1, "")
        mean, low, high = (f"{scale * figure:+.3g}" for figure in figures)
        lines.append(
            f"difference of {row.task} {row.metric}: {mean}{unit}, 95% interval {low} to {high}, "
            f"n {documents}, p {p:.2g} ({by}, two-sided)" + (f"  [{row.run}]" if several else "")
        )
    return lines


def _notes(comparison: Comparison) -> list[str]:
    lines = [
        f"{kind} differs: {name}: {before} -> {after}"
        for kind, pairs in (("argument", comparison.differing), ("version", comparison.versions))
        for name, (before, after) in pairs.items()
    ]
    if comparison.exact_runs:
        lines.append(
            f"{comparison.exact_runs} runs were made on the baseline's machine and must "
            "repeat every digit."
        )
    elif comparison.is_regression and not (comparison.differing or comparison.on_one_machine):
        lines.append(
            "No run was made on the baseline's kind of CPU. Another kind rounds differently and "
            "routes near ties differently, which alone may fail a lossy policy: repeat the run "
            "with the baseline's arithmetic (results/baseline/README.md)."
        )
    if comparison.tests:
        lines.append(
            f"{comparison.tests} scores are tested; without a real change, this comparison fails "
            f"with a probability of at most {100 * comparison.alpha:g}% (Holm, Tarone)."
        )
    if comparison.noticeable:
        losses = [f"{100 * v:.2g} on {size}" for size, v in comparison.noticeable.items()]
        lines.append(
            "Smallest loss of accuracy, in points, that is found in four cases of five: "
            f"{', '.join(losses)} documents."
        )
    if comparison.weak_tests:
        lines.append(
            f"{len(comparison.weak_tests)} of them have too few documents to fail at all: "
            f"{', '.join(comparison.weak_tests)}."
        )
    return lines


def _summary(comparison: Comparison) -> str:
    verdicts = [row.verdict for row in comparison.rows]
    counts = ", ".join(f"{verdicts.count(name)} {name}" for name in dict.fromkeys(verdicts))
    kind = "REGRESSION" if comparison.is_regression else "pass"
    return f"{kind}: {len(verdicts)} figures: {counts}"

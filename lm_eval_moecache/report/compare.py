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
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, NamedTuple

import numpy as np

from lm_eval_moecache.records.numbers import unknown_name_error
from lm_eval_moecache.report.metrics import METRICS, Column, clustered_stderr, metric_column
from lm_eval_moecache.report.runs.answers import AN_HOUR_MS, rights_of, shares_of
from lm_eval_moecache.report.runs.run import ONLY_HOW, Run, Score, identity
from lm_eval_moecache.report.statistics import (
    Z_95,
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
ANSWERS = ("right_per_hour", "e2el_ms", "output_tokens", "goodput")
"""Figures of answers, which are tested over their documents as scores are."""
SPEED_METRICS = (*ANSWERS[:3], "tok_per_s", "tpot_ms", "ttft_ms", "miss_rate")
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
_NOTABLE = 0.02
"""From what share on a token is told to be faster, or an answer longer."""
ALL_TASKS, WHOLE_RUN = "(all)", "(whole run)"
# Perplexity in other forms: judging one of them is enough.
_SAME_AS_PERPLEXITY = ("byte_perplexity", "bits_per_byte")


@dataclass(frozen=True, kw_only=True, slots=True)
class CompareOptions:
    """How much worse a metric may get. `tolerances` override `tolerance` by metric.

    Tolerances are relative to the baseline. `floor` and `tolerance` None: 0 for two runs on one
    machine under the virtual clock, else `DEFAULT_FLOOR` and `TOLERANCE`; these also for scores and
    `ANSWERS` of two runs of other settings. `same_machine` None: read from the records.
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
            if metric_column(name) is None:
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

    def repeats(self, old: Run, new: Run) -> bool:
        """Whether `new` must answer as `old` did: the same settings on one machine.

        Other settings answer otherwise by design, and which answers turn right is chance.
        """
        before, after = ([run.model, run.model_args, run.options] for run in (old, new))
        return before == after and self.is_exact(old, new)


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
    difference: Difference | None = None
    """Of a test over the documents of both sides."""


def paired(losses: Sequence[float], *, are_answers: bool = True) -> Test:
    """Return what documents' losses (positive: worse) say: McNemar's test, else sign flips.

    The former of answers, right or wrong, where no loss is another than 1, 0 or -1.
    """
    values = -np.asarray(losses, dtype=np.float64)
    count = len(losses)
    if are_answers and np.isin(values, (-1, 0, 1)).all():
        won, lost = int((values > 0).sum()), int((values < 0).sum())
        low, high = answers_interval(won, lost, count)
        by, told = "McNemar's exact test", f"{MCNEMAR}: {lost} lost, {won} won of {count} documents"
        p_loss, p_gain = sign_test(won, lost), sign_test(lost, won)
        least_p, least_possible = 0.5 ** (won + lost), 0.5**count
    else:
        low, high = mean_interval(values)
        by, told = "sign flips", f"sign flips of {count} documents"
        p_loss, p_gain = sign_flip_test(-values), sign_flip_test(values)
        least_p, least_possible = least_flip_p(values), least_flip_p([1.0] * count)
    p = min(2 * min(p_loss, p_gain), 1.0)
    found = Difference(float(values.mean()), low, high, count, p, by)
    return Test(p_loss, p_gain, told, least_p, least_possible, found)


def score_test(baseline: Score, new: Score, old_samples: Samples, samples: Samples) -> Test | None:
    """Test whether a score changed: McNemar's exact test for right or wrong, else sign flips.

    Paired by document where both sides kept the same documents; pairs (log-likelihood, words) are
    judged by the log-likelihood (higher is better), and have no `difference`: their score is no
    mean over documents. Otherwise a z-test on the standard errors; None where lm-eval reports none.
    Raises ValueError where a document's word counts differ: it is then a different document.
    """
    sign = 1 if baseline.higher_is_better else -1
    if len(old_samples) < 2 or old_samples.keys() != samples.keys():
        if baseline.stderr is None or new.stderr is None:
            return None
        error = math.hypot(baseline.stderr, new.stderr)
        loss = sign * (baseline.value - new.value)
        return Test(z_test(loss, error), z_test(-loss, error), "standard errors")
    losses, is_mean = [], True
    for doc, before in old_samples.items():
        after = samples[doc]
        if not isinstance(before, list):
            losses.append(sign * (before - after))
            continue
        is_mean = False
        losses.append(before[0] - after[0])
        if before[1] != after[1]:
            raise ValueError(
                f"{baseline.key}: document {doc} has {before[1]:g} words or bytes in the "
                f"baseline, {after[1]:g} in the new run: they are different documents. "
                "Make the baseline again."
            )
    test = paired(losses)
    return test if is_mean else test._replace(difference=None)


_FIELDS = (
    *("run", "task", "metric", "baseline", "new", "higher_is_better", "allowed", "judged_by"),
    *("test", "difference", "verdict"),
)
_UNTESTED = {"allowed": 0.0, "judged_by": "presence"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Every judged metric, and what the verdict rests on."""

    rows: Any
    """A DataFrame of a row a metric of both sides: `_FIELDS`, then `change`, `p`, `p_corrected`.

    A missing run has no task, a missing task no metric. `allowed` is how much the figure may
    change, for better or worse, whatever the test finds. `higher_is_better` None: neither direction
    is better, and any change beyond `allowed` counts. `difference` is of a score whose documents
    are known on both sides, also where the digits must repeat. `p` is the one-sided p-value of the
    change that was seen, a loss or a gain; `p_corrected` after the correction over the whole
    comparison, 1 where too few samples changed to exclude chance.
    """
    alpha: float
    differing: Mapping[str, tuple[str, str]]
    """Arguments in which two single runs differ, compared nonetheless: name -> (baseline, new)."""
    versions: Mapping[str, tuple[str, str]]
    """Libraries whose versions differ between runs that were compared: name -> (baseline, new)."""
    exact_runs: int
    """Runs made on the baseline's machine, which had to repeat it to the digit."""
    on_one_machine: bool
    """Whether any run was made on the baseline's machine, under whatever settings."""
    trades: Sequence[str]
    """A sentence for each task in which a run is faster a token and less so an answer."""

    @property
    def tests(self) -> int:
        return int(self.rows.test.notna().sum())

    @property
    def weak_tests(self) -> list[str]:
        """Tests with too few samples: not even losing all of them would fail."""
        tested = self.rows[self.rows.test.notna()]
        weak = (row for row in tested.itertuples() if row.test.least_possible > self.alpha)
        return [*dict.fromkeys(f"{row.task} {row.metric}" for row in weak)]

    @property
    def noticeable(self) -> dict[int, float]:
        """Documents of a tested score of right answers -> the loss noticed in four cases of five.

        A share; of a change that turns answers wrong and none right, and of this score alone.
        """
        tests = self.rows.test.dropna()
        sizes = {t.difference.documents for t in tests if t.difference and MCNEMAR in t.by}
        losses = {size: noticeable_loss(size, self.alpha) for size in sorted(sizes)}
        return {size: loss for size, loss in losses.items() if loss is not None}

    @property
    def is_regression(self) -> bool:
        """Whether any row fails the comparison."""
        return bool(self.rows.verdict.isin(REGRESSIONS).any())


Units = dict[str, dict[str, Run]]
Row = dict[str, Any]


def compare(baseline: Sequence[Run], new: Sequence[Run], options: CompareOptions) -> Comparison:
    """Judge every metric of BASELINE. Raises ValueError where the two have no run in common.

    Two sides of one run each are compared whatever their policies, but their identities must agree.
    """
    old_units, new_units = _units(baseline, options, "BASELINE"), _units(new, options, "NEW")
    new_units, differing = _joined(old_units, new_units)
    rows: list[Row] = []
    exact_runs, on_one_machine, versions = 0, False, dict[str, tuple[str, str]]()
    trades: list[str] = []
    for key, tasks in old_units.items():
        if key not in new_units:
            rows.append({"run": key, "verdict": MISSING})
            continue
        new_tasks, found = new_units[key], list[Row]()
        shared = {task: (run, new_tasks[task]) for task, run in tasks.items() if task in new_tasks}
        for task, pair in shared.items():
            _check_identity(*pair, task, options)
            before, after = (run.environment.get("versions") or {} for run in pair)
            changed = _apart(before, after, "none").items()
            versions |= {k: sides for k, sides in changed if k in before and k in after}
        on_one_machine |= any(options.is_one_machine(*pair) for pair in shared.values())
        exact_runs += bool(shared) and all(options.repeats(*p) for p in shared.values())
        for task in tasks:
            if task in shared:
                trades += filter(None, [_trade(task, *shared[task])])
                found += [*_scores(task, *shared[task], options)]
                found += [*_speeds(task, *shared[task], options)]
            else:
                found.append({"task": task, "verdict": MISSING})
        found += _all_tasks(shared, options)
        # Totals can be compared where both runs have the same tasks.
        pairs = {(old.run_id, other.run_id): (old, other) for old, other in shared.values()}
        for old, other in pairs.values():
            if set(old.tasks) == set(other.tasks):
                found += _speeds(None, old, other, options)
        found += [{"task": task, "verdict": NEW} for task in new_tasks if task not in tasks]
        rows += [{"run": key, **row} for row in found]
    rows += [{"run": key, "verdict": NEW} for key in new_units if key not in old_units]
    judged = _judged(rows, options.alpha)
    if not (judged.change.notna() | judged.verdict.isin(REGRESSIONS)).any():
        raise ValueError(
            "BASELINE and NEW have no figure in common: nothing was compared. Allowed: runs that "
            f"report one of {', '.join(options.metrics)}, or scores of the same tasks."
        )
    return Comparison(
        rows=judged,
        alpha=options.alpha,
        differing=differing,
        versions=versions,
        exact_runs=exact_runs,
        on_one_machine=on_one_machine,
        trades=trades,
    )


def _judged(rows: Sequence[Row], alpha: float) -> Any:
    """Return the rows as a frame with their verdicts; without a test `allowed` alone decides."""
    import pandas

    filled = [{**dict.fromkeys(_FIELDS), **_UNTESTED, **row} for row in rows]
    frame = pandas.DataFrame(filled, columns=[*_FIELDS], dtype=object)
    frame = frame.astype({"baseline": float, "new": float, "allowed": float})
    frame["change"] = frame.new - frame.baseline
    loss = -frame.change.where(frame.higher_is_better == True, -frame.change)  # noqa: E712
    tests = frame.test.dropna()
    for name in ("p", "p_corrected"):
        frame[name] = math.nan
    for gained, side in ((False, "p_loss"), (True, "p_gain")):
        p_values = [getattr(test, side) for test in tests]
        at = tests.index[(loss[tests.index] < 0) == gained]
        frame.loc[at, "p"] = pandas.Series(p_values, tests.index)[at]
        corrected = pandas.Series(_corrected(p_values, [*tests], alpha), tests.index)
        frame.loc[at, "p_corrected"] = corrected[at]
    slack = _EPSILON * frame[["baseline", "new"]].abs().max(axis=1)
    is_within = (frame.p_corrected > alpha) | (loss.abs() <= frame.allowed + slack)
    known = frame.verdict.notna()
    conditions = [known, loss.abs() <= slack, is_within, frame.higher_is_better.isna(), loss < 0]
    frame["verdict"] = np.select(conditions, [frame.verdict, SAME, WITHIN, CHANGED, BETTER], WORSE)
    return frame


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


def _scores(task: str, old: Run, new: Run, options: CompareOptions) -> Iterator[Row]:
    exact = options.repeats(old, new)
    new_scores = {score.key: score for score in new.scores(task)}
    for score in old.scores(task):
        if score.metric in _SAME_AS_PERPLEXITY:
            continue
        if score.key not in new_scores:
            yield {"task": task, "metric": score.key, "verdict": MISSING}
            continue
        after, higher = new_scores[score.key], score.higher_is_better
        sides = [run.samples.get(task, {}).get(score.key, {}) for run in (old, new)]
        row = {"task": task, "metric": score.key, "baseline": score.value, "new": after.value}
        # The floor: points for a share, relative to the baseline for any other score.
        unit = 1.0 if higher and 0 <= score.value <= 1 else abs(score.value)
        test = score_test(score, after, *sides)
        yield {**row, "higher_is_better": higher, **_floored(test, exact, options, unit)}


def _all_tasks(shared: Mapping[str, tuple[Run, Run]], options: CompareOptions) -> Iterator[Row]:
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
            exact &= options.repeats(*pair)
    if tasks > 1:
        before, after = (sum(side) / len(answers) for side in zip(*answers, strict=True))
        row = {"task": ALL_TASKS, "metric": "accuracy", "baseline": before, "new": after}
        test = paired([old - new for old, new in answers])
        yield {**row, "higher_is_better": True, **_floored(test, exact, options)}


def _floored(test: Test | None, exact: bool, options: CompareOptions, unit: float = 1.0) -> Row:
    """Return a score's allowance, a floor that is a share of `unit`, and its test."""
    floor = options.floor
    if floor is None:
        floor = 0.0 if exact else DEFAULT_FLOOR
    by = EXACTLY if exact and not floor else f"floor {floor:g}"
    return _tested(test, exact, floor * unit, by)


def _tested(test: Test | None, exact: bool, allowed: float, untested: str) -> Row:
    """Return what judges a figure; where the digits must repeat, the test only tells by how much.

    `untested` says what judges it without a test.
    """
    difference, test = test.difference if test else None, None if exact else test
    by = test.by if test else untested
    return {"allowed": allowed, "judged_by": by, "test": test, "difference": difference}


def answers_test(column: Column, old: Run, new: Run) -> Test | None:
    """Test whether a figure of answers changed, over the documents of both sides.

    By sign flips of the documents' figures (within limits or not: McNemar's test); right answers an
    hour, a ratio, by the normal test of its paired error. None where the documents are not known,
    or not the same.
    """
    if column.base == "right_per_hour":
        return _ratio_test(column, old, new)
    before, after = (run.documents(column.name) for run in (old, new))
    if len(before) < 2 or before.keys() != after.keys():
        return None
    losses = [value - after[doc] for doc, value in before.items()]
    if column.base == "goodput":
        return paired(losses)
    test = paired(losses, are_answers=False)
    # More is worse here; the difference stays new minus baseline.
    return test._replace(p_loss=test.p_gain, p_gain=test.p_loss)


def _ratio_test(column: Column, old: Run, new: Run) -> Test | None:
    rates, residuals, known = [], [], []
    for run in (old, new):
        scores = shares_of(run, [column.task] if column.task else run.tasks)
        parts = [rights_of(run, task, score) for task, score in scores.items()]
        rate = run[column.name].number
        if rate is None or not parts or not all(part[0] for part in parts):
            return None
        right, times = (np.concatenate([part[place] for part in parts]) for place in (1, 2))
        labels = _first_of_batch([part[3] for part in parts])
        known.append(([*scores], [part[0] for part in parts], labels))
        rates.append(rate)
        residuals.append((AN_HOUR_MS * right - rate * times) / times.mean())
    if known[0] != known[1]:
        return None
    count, change = len(residuals[0]), residuals[1] - residuals[0]
    error = clustered_stderr(change - change.mean(), known[0][2], count)
    if error is None:
        return None
    gain = rates[1] - rates[0]
    p_loss, p_gain = z_test(-gain, error), z_test(gain, error)
    ends, p = (gain - Z_95 * error, gain + Z_95 * error), min(2 * min(p_loss, p_gain), 1.0)
    found = Difference(gain, *ends, count, p, "test of a ratio")
    return Test(p_loss, p_gain, f"right answers over time of {count} documents", difference=found)


def _first_of_batch(labels: Sequence[Sequence[float]]) -> list[int]:
    """Return for each document of the tasks the place of the first one of its batch.

    Of `labels`, task by task, those below 0 are of documents that were served alone.
    """
    first: dict[tuple[float, int], int] = {}
    keys = [(label, i if label < 0 else -1) for i, part in enumerate(labels) for label in part]
    return [first.setdefault(key, place) for place, key in enumerate(keys)]


def _trade(task: str, old: Run, new: Run) -> str | None:
    """Return in one sentence that a run is faster a token and less so an answer; None if not so.

    tok/s counts all the time of an answer, so that the two differ by the answers' length.
    """
    names = ("tok_per_s", "e2el_ms", "output_tokens")
    sides = [[run[f"{name}@{task}"].number or 0.0 for name in names] for run in (old, new)]
    if not all(map(all, sides)):
        return None
    (rate, time, tokens), (new_rate, new_time, new_tokens) = sides
    token, answer, length = new_rate / rate, time / new_time, new_tokens / tokens
    if min(token, length) < 1 + _NOTABLE:
        return None
    times = f"{answer:.2f} times as fast" if answer >= 1 else f"{1 / answer:.2f} times as slow"
    rates = [run[f"right_per_hour@{task}"].number for run in (old, new)]
    hours = [f"{rate:.0f}" for rate in rates if rate is not None]
    told = f"; right answers an hour {hours[0]} -> {hours[1]}" if hours[1:] else ""
    return (
        f"{task}: {token:.2f} times as fast a token (tok/s {rate:.1f} -> {new_rate:.1f}) but "
        f"{times} an answer ({time:.0f} -> {new_time:.0f} ms), as answers are {length:.2f} times "
        f"as long (tokens {tokens:.1f} -> {new_tokens:.1f}){told}."
    )


def _speeds(task: str | None, old: Run, new: Run, options: CompareOptions) -> Iterator[Row]:
    """Judge a task's speed, or with None that of the whole run."""
    if task is not None and task not in old.moecache["tasks"]:
        return
    for name in options.metrics:
        metric, at, wanted_task = name.partition("@")
        if at and wanted_task != task:
            continue
        column = metric_column(metric if task is None else f"{metric}@{task}")
        assert column is not None, metric
        before, after = (run[column.name].number for run in (old, new))
        row = {"task": task, "metric": metric, "baseline": before, "new": after}
        is_tested = column.base in ANSWERS
        if is_tested and task is None and len(old.tasks) == 1:
            continue  # the figure of its only task
        exact = (options.repeats if is_tested else options.is_exact)(old, new)
        if before is not None and after is not None:
            usual = 0.0 if exact else TOLERANCE.get(str(old.moecache["clock"]), 0.0)
            usual = usual if options.tolerance is None else options.tolerance
            tolerance = options.tolerances.get(name, usual)
            test = answers_test(column, old, new) if is_tested else None
            by = f"tolerance {tolerance:g}" if tolerance else EXACTLY
            judged = _tested(test, exact, tolerance * abs(before), by)
            yield {**row, "higher_is_better": column.higher_is_better, **judged}
        elif before is not after:
            yield {**row, "verdict": MISSING if after is None else NEW}


# --- what is printed ---

_TOLD = (
    *("run", "task", "metric", "baseline", "new", "change", "allowed", "judged_by", "difference"),
    *("p", "p_corrected", "verdict"),
)


def as_json(comparison: Comparison, *, everything: bool = True) -> str:
    """Return `{"verdict", "alpha", "tests", "noticeable", "rows", ...}`, always with all rows."""
    rows = comparison.rows[[*_TOLD]]
    told = rows.astype(object).where(rows.notna(), None).to_dict("records")
    report = {
        "verdict": "regression" if comparison.is_regression else "pass",
        "alpha": comparison.alpha,
        "tests": comparison.tests,
        "weak_tests": comparison.weak_tests,
        "noticeable": {str(size): loss for size, loss in comparison.noticeable.items()},
        "exact_runs": comparison.exact_runs,
        "trades": [*comparison.trades],
        "versions": {name: list(pair) for name, pair in comparison.versions.items()},
        "differing": {name: list(pair) for name, pair in comparison.differing.items()},
        "rows": [
            {**row, "difference": row["difference"] and row["difference"]._asdict()} for row in told
        ],
    }
    return json.dumps(report, indent=2) + "\n"


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
_MOST_TOLD = 20
"""Differences of scores that are printed without `--all`, changed or not."""


def _lines(comparison: Comparison, everything: bool) -> list[str]:
    """Return a line a metric, then one a score: how much it changed, and how surely."""
    changed = comparison.rows[comparison.rows.verdict != SAME]
    shown = comparison.rows if everything else changed
    lines = []
    for row in shown.itertuples():
        text = f"{row.verdict:8s} {' '.join(filter(None, (row.task or WHOLE_RUN, row.metric)))}"
        if not math.isnan(row.change):
            text += f": {row.baseline:.6g} -> {row.new:.6g} (change {row.change:+.4g}, "
            text += f"allowed {row.allowed:.4g}, {row.judged_by}"
            if row.test is not None and comparison.tests > 1:
                text += f", one-sided p {row.p_corrected:.2g}, "
                text += f"corrected for {comparison.tests} tests"
            elif row.test is not None:
                text += f", one-sided p {row.p:.2g}"
            text += ")"
        lines.append(f"{text}  [{row.run}]")
    known = comparison.rows.difference.notna()
    several = comparison.rows.run[known].nunique() > 1
    rows = comparison.rows if everything or known.sum() <= _MOST_TOLD else changed
    for row in rows[rows.difference.notna()].itertuples():
        *figures, documents, p, by = row.difference
        scale, unit = (100, " points") if MCNEMAR in by else (1, "")
        mean, low, high = (f"{scale * figure:+.3g}" for figure in figures)
        lines.append(
            f"difference of {row.task} {row.metric}: {mean}{unit}, 95% interval {low} to {high}, "
            f"n {documents}, p {p:.2g} ({by}, two-sided)" + (f"  [{row.run}]" if several else "")
        )
    return lines


def _notes(comparison: Comparison) -> list[str]:
    lines = [*comparison.trades]
    lines += [
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
            f"{comparison.tests} figures are tested; without a real change, this comparison fails "
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
    verdicts = [*comparison.rows.verdict]
    counts = ", ".join(f"{verdicts.count(name)} {name}" for name in dict.fromkeys(verdicts))
    kind = "REGRESSION" if comparison.is_regression else "pass"
    return f"{kind}: {len(verdicts)} figures: {counts}"

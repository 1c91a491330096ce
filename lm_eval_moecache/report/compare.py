"""Joins two sets of runs by configuration and judges every figure: the regression gate."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lm_eval_moecache.records.errors import unknown
from lm_eval_moecache.report.columns import METRICS, metric_value
from lm_eval_moecache.report.judgement import (
    MISSING,
    NEW,
    WORSE,
    Judgement,
    judge_score,
    judge_speed,
)
from lm_eval_moecache.report.results import Run

SPEED_METRICS = ("ttft_ms", "tpot_ms", "tok_per_s", "miss_rate")
# The virtual clock repeats itself to the last digit; a measured one does not.
DEFAULT_TOLERANCE = {"virtual": 0.0, "wall": 0.1}
# A perplexity in its other forms: one of them is enough to judge.
_SAME_AS_PERPLEXITY = ("byte_perplexity", "bits_per_byte")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """How much worse a figure may get. `tolerances` hold a metric's own, relative to baseline."""

    sigmas: float = 1.0
    tolerance: float | None = None
    tolerances: Mapping[str, float] = field(default_factory=dict)
    metrics: tuple[str, ...] = SPEED_METRICS
    ignore: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in (*self.metrics, *self.tolerances):
            base = name.removeprefix("prefill_").removeprefix("decode_").partition(".")[0]
            if base not in METRICS or METRICS[base][2] is None:
                allowed = [n for n, (_, _, higher) in METRICS.items() if higher is not None]
                raise unknown("metric", name, allowed)

    def tolerance_of(self, metric: str, clock: str) -> float:
        whole = DEFAULT_TOLERANCE.get(clock, 0.0) if self.tolerance is None else self.tolerance
        return self.tolerances.get(metric, whole)


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
        return self.verdict in (WORSE, MISSING)

    def as_dict(self) -> dict[str, Any]:
        judged = self.judgement
        return {
            "run": self.run,
            "task": self.task,
            "metric": self.metric,
            "baseline": judged.baseline,
            "new": judged.new,
            "change": judged.change,
            "allowed": judged.allowed,
            "judged_by": judged.judged_by,
            "verdict": judged.verdict,
        }


def compare(baseline: Sequence[Run], new: Sequence[Run], rules: Rules) -> list[Row]:
    """Return every judged figure. Raises ValueError where the two have no run in common."""
    old_units, new_units = _units(baseline, rules, "BASELINE"), _units(new, rules, "NEW")
    if not old_units.keys() & new_units.keys():
        ours, theirs = next(iter(old_units)), next(iter(new_units))
        raise ValueError(
            f"BASELINE and NEW have no configuration in common: {ours!r} is not {theirs!r}. "
            "`--ignore KEY,...` leaves settings out of the join."
        )
    rows: list[Row] = []
    for key, tasks in old_units.items():
        found = new_units.get(key)
        if found is None:
            rows.append(_absent(key, None, MISSING))
            continue
        for task, run in tasks.items():
            if task in found:
                rows += _compare_task(key, task, run, found[task], rules)
            else:
                rows.append(_absent(key, task, MISSING))
        rows += [_absent(key, task, NEW) for task in found if task not in tasks]
    rows += [_absent(key, None, NEW) for key in new_units if key not in old_units]
    return rows


def _units(runs: Sequence[Run], rules: Rules, side: str) -> dict[str, dict[str, Run]]:
    """Return configuration as given -> task -> run. Tasks may be spread over several runs."""
    units: dict[str, dict[str, Run]] = {}
    for run in runs:
        given = {**run.model_args, **run.options}
        kept = {k: v for k, v in sorted(given.items()) if k not in rules.ignore}
        key = ",".join([run.model, *(f"{k}={v}" for k, v in kept.items())])
        tasks = units.setdefault(key, {})
        for task in run.tasks:
            if task in tasks:
                raise ValueError(
                    f"{side} has two runs of {key!r} on {task!r}: {tasks[task].path.name} and "
                    f"{run.path.name}. Compare folders with one run a configuration."
                )
            tasks[task] = run
    return units


def _compare_task(key: str, task: str, old: Run, new: Run, rules: Rules) -> list[Row]:
    rows: list[Row] = []
    new_scores = {score.key: score for score in new.scores(task)}
    for score in old.scores(task):
        if score.metric in _SAME_AS_PERPLEXITY:
            continue
        if score.key not in new_scores:
            rows.append(_absent(key, task, MISSING, score.key))
            continue
        samples = tuple(run.samples.get(task, {}).get(score.key) for run in (old, new))
        judged = judge_score(score, new_scores[score.key], (samples[0], samples[1]), rules.sigmas)
        rows.append(Row(run=key, task=task, metric=score.key, judgement=judged))
    clock = str(old.moecache["clock"])
    if task not in old.moecache["tasks"]:
        return rows
    for metric in rules.metrics:
        before, after = (metric_value(run, f"{metric}@{task}").number for run in (old, new))
        if before is None and after is None:
            continue
        higher = METRICS[_plain(metric)][2] is True
        judged = judge_speed(before, after, higher, rules.tolerance_of(metric, clock))
        rows.append(Row(run=key, task=task, metric=metric, judgement=judged))
    return rows


def _plain(metric: str) -> str:
    return metric.removeprefix("prefill_").removeprefix("decode_").partition(".")[0]


def _absent(key: str, task: str | None, verdict: str, metric: str | None = None) -> Row:
    judged = Judgement(baseline=None, new=None, allowed=0.0, judged_by="presence", verdict=verdict)
    return Row(run=key, task=task, metric=metric, judgement=judged)


def as_json(rows: Sequence[Row]) -> str:
    verdict = "regression" if any(row.is_regression for row in rows) else "pass"
    return json.dumps({"verdict": verdict, "rows": [r.as_dict() for r in rows]}, indent=2) + "\n"


def as_text(rows: Sequence[Row], *, everything: bool = False) -> str:
    """One line a figure that changed (or all), and the verdict last, where a log is read first."""
    lines = [_line(row) for row in rows if everything or row.verdict != "same"]
    return "\n".join([*lines, _summary(rows)]) + "\n"


def as_markdown(rows: Sequence[Row], *, everything: bool = False) -> str:
    """A pull-request comment: verdict first, then a table of what changed."""
    lines = [f"### moecache: {_summary(rows)}", ""]
    chosen = [row for row in rows if everything or row.verdict != "same"]
    if chosen:
        lines += ["| | Run | Task | Metric | Baseline | New | Change | Allowed | Judged by |"]
        lines += ["| --- | --- | --- | --- | --: | --: | --: | --: | --- |"]
    for row in chosen:
        judged = row.judgement
        cells = [
            f"**{row.verdict}**" if row.is_regression else row.verdict,
            f"`{row.run}`",
            row.task or "(whole run)",
            row.metric or "",
            *map(_number, (judged.baseline, judged.new, judged.change)),
            _number(judged.allowed) if judged.baseline is not None else "",
            judged.judged_by,
        ]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _line(row: Row) -> str:
    judged = row.judgement
    place = " ".join(filter(None, (row.task or "(whole run)", row.metric)))
    text = f"{row.verdict:8s} {place}"
    if judged.change is not None:
        text += (
            f": {_number(judged.baseline)} -> {_number(judged.new)} "
            f"(change {judged.change:+.4g}, allowed {judged.allowed:.4g}, {judged.judged_by})"
        )
    return f"{text}  [{row.run}]"


def _summary(rows: Sequence[Row]) -> str:
    bad = sum(row.is_regression for row in rows)
    counts = {verdict: 0 for verdict in dict.fromkeys(row.verdict for row in rows)}
    for row in rows:
        counts[row.verdict] += 1
    told = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    return f"{'REGRESSION' if bad else 'pass'}: {len(rows)} figures: {told}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"

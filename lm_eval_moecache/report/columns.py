"""What a column of a table is called, how it is read from a run, and which way is better."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lm_eval_moecache.algorithms.registry import AXES
from lm_eval_moecache.records.errors import nearest
from lm_eval_moecache.report.identity import KEYS, identity
from lm_eval_moecache.report.metrics import METRICS
from lm_eval_moecache.report.results import Run, Score

_PHASES = {"prefill_": "prefill ", "decode_": "decode ", "verify_": "verify "}
SETTINGS = (
    *("run", "experiment", "model", "tasks", "policy", *AXES, "parameters"),
    *("capacity", "capacity_bytes"),
)
REPORTED = ("link", "warm", "store")
PERCENTILES = ("mean", "p50", "p90", "p99")
DEFAULT_METRICS = ("ttft_ms", "tpot_ms", "tok_per_s", "hit_rate", "miss_rate")


@dataclass(frozen=True, slots=True)
class Column:
    """One column; `higher_is_better` is None for settings and for metrics without a better end."""

    name: str
    heading: str
    decimals: int = 0
    higher_is_better: bool | None = None
    is_number: bool = False
    words: str = ""
    """What an axis calls it, with its unit; the heading unless given."""


@dataclass(frozen=True, slots=True)
class Value:
    """One cell: a setting's text, a figure with or without standard error, or nothing."""

    raw: float | str | None
    stderr: float | None = None
    asked: str | None = None
    """By what name a view asks for it, where that is not what is shown: a policy's composition."""

    @property
    def identity(self) -> str:
        return str(self.raw) if self.asked is None else self.asked

    @property
    def number(self) -> float | None:
        return self.raw if isinstance(self.raw, (int, float)) else None


def metric_column(name: str) -> Column | None:
    """Describe `miss_rate`, `decode_miss_rate`, `ttft_ms.p99` or `tok_per_s@task`."""
    metric, at, task = name.partition("@")
    base, dot, percentile = metric.partition(".")
    if dot and percentile not in PERCENTILES:
        return None
    phase = next((p for p in _PHASES if base.startswith(p)), "")
    if base.removeprefix(phase) not in METRICS:
        return None
    found = METRICS[base.removeprefix(phase)]
    after = (f" {percentile}" if dot else "") + (f" ({task})" if at else "")
    heading = f"{phase[:-1].capitalize()} {found.heading.lower()}" if phase else found.heading
    shown, words = heading + after, _PHASES.get(phase, "") + found.words + after
    return Column(name, shown, found.decimals, found.higher_is_better, True, words)


def metric_value(run: Run, name: str) -> Value:
    """Read a metric; means of requests and miss rates have a standard error where it was kept."""
    metric, at, task = name.partition("@")
    base, _, percentile = metric.partition(".")
    figures = run.moecache["tasks"].get(task, {}) if at else run.moecache["totals"]
    found, stderr = figures.get(base), figures.get(f"{base}_stderr")
    if isinstance(found, Mapping):
        stderr = found.get("stderr") if percentile in ("", "mean") else None
        found = found.get(percentile or "mean")
    number = isinstance(found, (int, float))
    return Value(found if number else None, stderr if number else None)


def score_column(runs: Sequence[Run], name: str) -> Column | None:
    """Describe a task (its primary metric) or `task:metric` (or `task:metric,filter`)."""
    for run in runs:
        score = find_score(run, name)
        if score is not None:
            task = name.partition(":")[0]
            arrow = "" if score.higher_is_better else " (lower is better)"
            decimals = 3 if score.higher_is_better else 2
            heading = f"{task} {score.metric}{arrow}"
            words = f"{task} {score.metric.replace('_', ' ')}"
            return Column(name, heading, decimals, score.higher_is_better, True, words)
    return None


def find_score(run: Run, name: str) -> Score | None:
    task, colon, wanted = name.partition(":")
    if not colon:
        return run.score(task)
    found = [s for s in run.scores(task) if wanted in (s.metric, s.key)]
    return found[0] if found else None


def accuracy(run: Run) -> Value:
    """Mean of the primary scores for which higher is better; the errors are independent."""
    scores = [s for name in run.scored if (s := run.score(name)) and s.higher_is_better]
    if not scores:
        return Value(None)
    errors = [s.stderr for s in scores if s.stderr is not None]
    stderr = None
    if len(errors) == len(scores):
        stderr = math.sqrt(sum(e * e for e in errors)) / len(scores)
    return Value(sum(s.value for s in scores) / len(scores), stderr)


def setting(run: Run, name: str) -> Value:
    """Return a setting as text: as given, or else as resolved in the run's report.

    What nobody gave and changes figures all the same (`batch_size`) is told by the run's identity.
    """
    report = run.moecache
    if name == "run":
        return Value(run.label or run.run_id)
    if name in ("experiment", "model"):
        return Value(str(getattr(run, name)))
    if name == "tasks":
        return Value("+".join(run.tasks_given or run.scored))
    if name == "parameters":
        given = [f"{k}={v}" for k, v in run.model_args.items() if k.partition(".")[0] in AXES]
        return Value(", ".join(text for text in given if "." in text.partition("=")[0]) or None)
    if name in AXES:
        return Value(_choice(report["policy"][name]))
    if name == "policy":
        policy = report["policy"]
        return Value(str(policy["name"]), asked=policy.get("composition"))
    if name == "hardware":
        return Value(str(report["hardware"]["name"]))
    for source in (run.model_args, run.options, report):
        found = source.get(name)
        if found is not None and not isinstance(found, (Mapping, list)):
            return Value(found if name == "capacity_bytes" else str(found))
    # A prompt's template by whether there is one, which more settings may have changed.
    return Value(identity(run).get(name))


def _choice(choice: Mapping[str, Any]) -> str:
    return str(choice.get("name", choice.get("class_path")))


def is_setting(name: str, given: Iterable[str]) -> bool:
    """Whether every run has this setting, or one that was given these arguments."""
    return name in (*SETTINGS, *REPORTED, *KEYS, *given)


def unknown_column(name: str, allowed: Sequence[str]) -> ValueError:
    return ValueError(
        f"column {name!r} is not known.{nearest(name, allowed)} Allowed: "
        f"{', '.join(allowed)}; with `prefill_`, `decode_` or `verify_` before a rate, `.p50`, "
        "`.p90` or `.p99` after a latency, `@TASK` after a metric, and `TASK:METRIC` for another "
        "score."
    )


def shown(column: Column, value: Value) -> str:
    """Return a cell as text: figures rounded to the column's decimals, `±` one standard error."""
    if value.raw is None:
        return ""
    if value.number is None:
        return str(value.raw)
    text = f"{value.number:.{column.decimals}f}"
    text = text if float(text) else text.removeprefix("-")
    return text if value.stderr is None else f"{text} ±{value.stderr:.{column.decimals}f}"

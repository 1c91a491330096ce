"""What a column of a table is called, how it is read from a run, and which way is better."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lm_eval_moecache.algorithms.registry import AXES
from lm_eval_moecache.records.errors import nearest
from lm_eval_moecache.report.metrics import METRICS
from lm_eval_moecache.report.results import KEYS, Run, Score, identity

PARETO, ACCURACY = "pareto", "accuracy"
_PHASES = {"prefill_": "prefill ", "decode_": "decode ", "verify_": "verify "}
SETTINGS = (
    *("run", "experiment", "model", "tasks", "policy", *AXES, "parameters"),
    *("capacity", "capacity_bytes"),
)
REPORTED = ("link", "warm", "store")
PERCENTILES = ("mean", "p50", "p90", "p99")
# Of these the means over documents have names of their own.
_BY_DOCUMENT = {"hit_rate": ("request_miss_rate", -1.0)} | {
    name: (f"request_{name}", 1.0) for name in ("tok_per_s", "miss_rate", "collision_miss_rate")
}


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


@dataclass(frozen=True, slots=True)
class Column:
    """One column and how it is read; settings, and some metrics, have no better end."""

    name: str
    heading: str
    decimals: int = 0
    higher_is_better: bool | None = None
    is_number: bool = False
    words: str = ""
    """What an axis calls it, with its unit; the heading unless given."""
    read: Callable[[Run], Value] = lambda run: Value(None)
    samples: Callable[[Run], Mapping[str, float]] = lambda run: {}
    """A run's figures by document, where they were kept."""


def column(runs: Sequence[Run], name: str) -> Column:
    """Return a column by name. Raises ValueError where no run has it."""
    if name == PARETO:
        return Column(PARETO, "Pareto")
    found = figure_column(runs, name)
    if found is not None:
        return found
    if is_setting(name, ()) or any(setting(run, name).raw is not None for run in runs):
        heading, is_number = name.replace("_", " ").capitalize(), name == "capacity_bytes"
        return Column(name, heading, is_number=is_number, read=lambda run: setting(run, name))
    tasks = [task for run in runs for task in run.results]
    given = [key for run in runs for key in (*run.model_args, *KEYS)]
    known = dict.fromkeys([*SETTINGS, *given, ACCURACY, *METRICS, *tasks, PARETO])
    raise unknown_column(name, list(known))


def figure_column(runs: Sequence[Run], name: str) -> Column | None:
    """Describe the mean accuracy, a metric or a score; None for what is none of these."""
    if name == ACCURACY:
        return Column(name, "Accuracy", 3, True, True, "", accuracy, _answers)
    return metric_column(name) or score_column(runs, name)


def metric_column(name: str) -> Column | None:
    """Describe `miss_rate`, `decode_miss_rate`, `ttft_ms.p99` or `tok_per_s@task`."""
    metric, at, task = name.partition("@")
    base, dot, percentile = metric.partition(".")
    phase = next((p for p in _PHASES if base.startswith(p)), "")
    found = METRICS.get(base.removeprefix(phase))
    if found is None or (dot and percentile not in PERCENTILES):
        return None
    # Of a percentile there are no samples by document.
    mean = metric.removesuffix(".mean")
    kept, sign = _BY_DOCUMENT.get(mean, (mean, 1.0))

    def samples(run: Run) -> dict[str, float]:
        return {
            f"{of} {doc}": sign * value
            for of, metrics in run.speed.items()
            if task in ("", of)
            for doc, value in metrics.get(kept, {}).items()
        }

    heading = f"{phase[:-1].capitalize()} {found.heading.lower()}" if phase else found.heading
    after = (f" {percentile}" if dot else "") + (f" ({task})" if at else "")
    words = _PHASES.get(phase, "") + found.words + after
    return Column(
        name,
        heading + after,
        found.decimals,
        found.higher_is_better,
        True,
        words,
        lambda run: metric_value(run, name),
        samples,
    )


def metric_value(run: Run, name: str) -> Value:
    """Read a metric; means of requests and miss rates have a standard error where it was kept."""
    metric, at, task = name.partition("@")
    base, _, percentile = metric.partition(".")
    figures = run.moecache["tasks"].get(task, {}) if at else run.moecache["totals"]
    found, stderr = figures.get(base), figures.get(f"{base}_stderr")
    if isinstance(found, Mapping):
        stderr = found.get("stderr") if percentile in ("", "mean") else None
        found = found.get(percentile or "mean")
    return Value(found, stderr) if isinstance(found, (int, float)) else Value(None)


def score_column(runs: Sequence[Run], name: str) -> Column | None:
    """Describe a task (its primary metric) or `task:metric` (or `task:metric,filter`)."""
    first = next((score for run in runs if (score := find_score(run, name))), None)
    if first is None:
        return None
    task, higher = name.partition(":")[0], first.higher_is_better
    heading = f"{task} {first.metric}{'' if higher else ' (lower is better)'}"
    words = f"{task} {first.metric.replace('_', ' ')}"

    def read(run: Run) -> Value:
        score = find_score(run, name)
        return Value(None) if score is None else Value(score.value, score.stderr)

    def samples(run: Run) -> dict[str, float]:
        return _documents(run, task, find_score(run, name))

    return Column(name, heading, 3 if higher else 2, higher, True, words, read, samples)


def find_score(run: Run, name: str) -> Score | None:
    """Return a task's primary score, or that of `task:metric` (or `task:metric,filter`)."""
    task, colon, wanted = name.partition(":")
    if not colon:
        return run.score(task)
    return next((s for s in run.scores(task) if wanted in (s.metric, s.key)), None)


def accuracy(run: Run) -> Value:
    """Mean of the primary scores for which higher is better; the errors are independent."""
    scores = [score for _, score in _primary(run)]
    if not scores:
        return Value(None)
    errors = [score.stderr for score in scores if score.stderr is not None]
    stderr = math.sqrt(sum(e * e for e in errors)) / len(scores)
    mean = sum(score.value for score in scores) / len(scores)
    return Value(mean, stderr if len(errors) == len(scores) else None)


def _primary(run: Run) -> list[tuple[str, Score]]:
    found = [(task, score) for task in run.scored if (score := run.score(task))]
    return [(task, score) for task, score in found if score.higher_is_better]


def _answers(run: Run) -> dict[str, float]:
    """Return the answers to all documents whose primary score `accuracy` is the mean of."""
    parts = [_documents(run, task, score) for task, score in _primary(run)]
    return {doc: value for part in parts for doc, value in part.items()}


def _documents(run: Run, task: str, score: Score | None) -> dict[str, float]:
    """Return the scores of a task's documents; of texts their log-likelihoods, less is worse."""
    if score is None:
        return {}
    sign = 1.0 if score.higher_is_better else -1.0
    return {
        f"{task} {doc}": sign * value[0] if isinstance(value, list) else float(value)
        for doc, value in run.samples.get(task, {}).get(score.key, {}).items()
    }


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
        return Value(choice_name(report["policy"][name]))
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


def choice_name(choice: Mapping[str, Any]) -> str:
    """Return an algorithm's name, or the path of its class."""
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


def selected(run: Run, where: Mapping[str, Any]) -> bool:
    """Whether a run has these settings; a list allows several values."""

    def has(name: str, wanted: Any) -> bool:
        found, values = setting(run, name), wanted if isinstance(wanted, list) else [wanted]
        return not {str(found.raw), found.identity}.isdisjoint(map(str, values))

    return all(has(name, wanted) for name, wanted in where.items())

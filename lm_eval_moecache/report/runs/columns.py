"""Columns of runs: name, heading, how each is read from a run, and which direction is better."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lm_eval_moecache.algorithms.registry import AXES
from lm_eval_moecache.records.numbers import listed, nearest
from lm_eval_moecache.report.metrics import METRICS
from lm_eval_moecache.report.runs.run import BATCH, KEYS, Run, Score, identity

PARETO, ACCURACY = "pareto", "accuracy"
_PHASES = {"prefill_": "prefill ", "decode_": "decode ", "verify_": "verify "}
SETTINGS = (
    *("run", "experiment", "model", "tasks", "policy", *AXES, "parameters"),
    *("capacity", "capacity_bytes"),
)
REPORTED = ("link", "warm", "store")
PERCENTILES = ("mean", "p50", "p90", "p99")
# Metrics whose per-document values have another name: metric -> (name, sign).
_BY_DOCUMENT = {"hit_rate": ("request_miss_rate", -1.0)} | {
    name: (f"request_{name}", 1.0) for name in ("tok_per_s", "miss_rate", "collision_miss_rate")
}


@dataclass(frozen=True, slots=True)
class Value:
    """One cell: a setting's text, a number with or without standard error, or nothing."""

    raw: float | str | None
    stderr: float | None = None
    asked: str | None = None
    """The name a view selects it by, where it is not the one shown: a policy's composition."""

    @property
    def identity(self) -> str:
        """The text that views select and join by."""
        return str(self.raw) if self.asked is None else self.asked

    @property
    def number(self) -> float | None:
        """The raw value where it is a number, else None."""
        return self.raw if isinstance(self.raw, (int, float)) else None


_ROUND_OFF = 1e-9
"""Standard errors up to this share of their value are of rounding: sums in another order."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column and how to read it; settings, and some metrics, have no better direction."""

    name: str
    heading: str
    decimals: int = 0
    higher_is_better: bool | None = None
    is_number: bool = False
    words: str = ""
    """Name and unit on an axis; empty for the heading."""
    read: Callable[[Run], Value] = lambda run: Value(None)
    samples: Callable[[Run], Mapping[str, float]] = lambda run: {}
    """Returns a run's values by document; empty where the record keeps none."""

    def text(self, value: Value) -> str:
        """Return a cell as text: numbers rounded to `decimals`, `±` one standard error."""
        if value.raw is None:
            return ""
        if value.number is None:
            return str(value.raw)
        text = f"{value.number:.{self.decimals}f}"
        text = text if float(text) else text.removeprefix("-")
        if value.stderr is None:
            return text
        error = f"{value.stderr:.{self.decimals}f}"
        if value.stderr > _ROUND_OFF * abs(value.number) and not float(error):
            # 0 is said of an error that is 0; a smaller one has as many digits as it needs.
            error = f"{value.stderr:.{-math.floor(math.log10(value.stderr))}f}"
        return f"{text} ±{error}"


def find_column(runs: Sequence[Run], name: str) -> Column:
    """Return a column by name. Raises ValueError where no run has it."""
    if name == PARETO:
        return Column(PARETO, "Pareto")
    column = figure_column(runs, name)
    if column is not None:
        return column
    if is_setting(name, ()) or any(setting(run, name).raw is not None for run in runs):
        # Parameters keep their spelling as heading: capitalising `routing.M` would change the key.
        heading = name if "." in name else name.replace("_", " ").capitalize()
        is_number = name == "capacity_bytes"
        return Column(name, heading, is_number=is_number, read=lambda run: setting(run, name))
    tasks = [task for run in runs for task in run.results]
    arguments = [key for run in runs for key in (*run.model_args, *KEYS)]
    names = dict.fromkeys([*SETTINGS, *arguments, ACCURACY, *METRICS, *tasks, PARETO])
    raise unknown_column_error(name, list(names))


def figure_column(runs: Sequence[Run], name: str) -> Column | None:
    """Return the column of the mean accuracy, a metric or a score; None for any other name."""
    if name == ACCURACY:
        return Column(name, "Accuracy", 3, True, True, "", accuracy, _answers)
    return metric_column(name) or score_column(runs, name)


def metric_column(name: str) -> Column | None:
    """Return the column `miss_rate`, `decode_miss_rate`, `ttft_ms.p99` or `tok_per_s@task`.

    None where no metric has that name.
    """
    metric, at, task = name.partition("@")
    base, dot, percentile = metric.partition(".")
    phase = next((p for p in _PHASES if base.startswith(p)), "")
    entry = METRICS.get(base.removeprefix(phase))
    if entry is None or (dot and percentile not in PERCENTILES):
        return None
    # A percentile has no samples by document.
    mean = metric.removesuffix(".mean")
    by_document, sign = _BY_DOCUMENT.get(mean, (mean, 1.0))

    def samples(run: Run) -> dict[str, float]:
        return independent(
            {
                f"{task_name} {doc}": (sign * value, metrics.get(BATCH, {}).get(doc))
                for task_name, metrics in run.speed.items()
                if task in ("", task_name)
                for doc, value in metrics.get(by_document, {}).items()
            }
        )

    heading = f"{phase[:-1].capitalize()} {entry.heading.lower()}" if phase else entry.heading
    suffix = (f" {percentile}" if dot else "") + (f" ({task})" if at else "")
    words = _PHASES.get(phase, "") + entry.words + suffix
    return Column(
        name,
        heading + suffix,
        entry.decimals,
        entry.higher_is_better,
        True,
        words,
        lambda run: metric_value(run, name),
        samples,
    )


def independent(figures: Mapping[str, tuple[float, float | None]]) -> dict[str, float]:
    """Return document -> value with the documents of one batch joined: they are one sample.

    Given is document -> (value, batch; None if it was served alone). A batch is named after all of
    its documents; its figure is their sum, scaled so that the mean over all samples stays.
    """
    batches: dict[Any, dict[str, float]] = {}
    for document, (figure, batch) in figures.items():
        batches.setdefault((document,) if batch is None else batch, {})[document] = figure
    scale = len(batches) / len(figures) if figures else 1.0
    return {" + ".join(batch): sum(batch.values()) * scale for batch in batches.values()}


def metric_value(run: Run, name: str) -> Value:
    """Read a metric; means over requests and miss rates carry a standard error where recorded."""
    metric, at, task = name.partition("@")
    base, _, percentile = metric.partition(".")
    figures = run.moecache["tasks"].get(task, {}) if at else run.moecache["totals"]
    figure, stderr = figures.get(base), figures.get(f"{base}_stderr")
    if isinstance(figure, Mapping):
        stderr = figure.get("stderr") if percentile in ("", "mean") else None
        figure = figure.get(percentile or "mean")
    return Value(figure, stderr) if isinstance(figure, (int, float)) else Value(None)


def score_column(runs: Sequence[Run], name: str) -> Column | None:
    """Return the column of `task` (primary metric), `task:metric` or `task:metric,filter`.

    None where no run has that score.
    """
    first_score = next((score for run in runs if (score := find_score(run, name))), None)
    if first_score is None:
        return None
    task, higher = name.partition(":")[0], first_score.higher_is_better
    heading = f"{task} {first_score.metric}{'' if higher else ' (lower is better)'}"
    words = f"{task} {first_score.metric.replace('_', ' ')}"

    def read(run: Run) -> Value:
        score = find_score(run, name)
        return Value(None) if score is None else Value(score.value, score.stderr)

    def samples(run: Run) -> dict[str, float]:
        return _documents(run, task, find_score(run, name))

    return Column(name, heading, 3 if higher else 2, higher, True, words, read, samples)


def find_score(run: Run, name: str) -> Score | None:
    """Return the score of `task` (primary metric), `task:metric` or `task:metric,filter`."""
    task, colon, metric = name.partition(":")
    if not colon:
        return run.score(task)
    return next((s for s in run.scores(task) if metric in (s.metric, s.key)), None)


def accuracy(run: Run) -> Value:
    """Return the mean of the primary scores where higher is better; errors count as independent."""
    scores = [score for _, score in _primary(run)]
    if not scores:
        return Value(None)
    errors = [score.stderr for score in scores if score.stderr is not None]
    stderr = math.sqrt(sum(e * e for e in errors)) / len(scores)
    mean = sum(score.value for score in scores) / len(scores)
    return Value(mean, stderr if len(errors) == len(scores) else None)


def _primary(run: Run) -> list[tuple[str, Score]]:
    scores = [(task, score) for task in run.scored if (score := run.score(task))]
    return [(task, score) for task, score in scores if score.higher_is_better]


def _answers(run: Run) -> dict[str, float]:
    """Return the scores by document of all tasks that `accuracy` averages."""
    parts = [_documents(run, task, score) for task, score in _primary(run)]
    return {doc: value for part in parts for doc, value in part.items()}


def _documents(run: Run, task: str, score: Score | None) -> dict[str, float]:
    """Return a task's scores by document, more being better (of texts the log-likelihood)."""
    if score is None:
        return {}
    sign = 1.0 if score.higher_is_better else -1.0
    return {
        f"{task} {doc}": sign * value[0] if isinstance(value, list) else float(value)
        for doc, value in run.samples.get(task, {}).get(score.key, {}).items()
    }


def setting(run: Run, name: str) -> Value:
    """Return a setting as text: as given, else as resolved in the run's report.

    Defaults that change metrics (`streams`) are read from the run's identity.
    """
    report = run.moecache
    if name == "run":
        return Value(run.label or run.run_id)
    if name in ("experiment", "model"):
        return Value(str(getattr(run, name)))
    if name == "tasks":
        return Value("+".join(run.tasks_given or run.scored))
    if name == "parameters":
        parameters = [f"{k}={v}" for k, v in run.model_args.items() if k.partition(".")[0] in AXES]
        return Value(
            ", ".join(text for text in parameters if "." in text.partition("=")[0]) or None
        )
    if name in AXES:
        return Value(choice_name(report["policy"][name]))
    if name == "policy":
        policy = report["policy"]
        return Value(str(policy["name"]), asked=policy.get("composition"))
    if name == "hardware":
        return Value(str(report["hardware"]["name"]))
    for source in (run.model_args, run.options, report):
        value = source.get(name)
        if value is not None and not isinstance(value, (Mapping, list)):
            return Value(value if name == "capacity_bytes" else str(value))
    # Else as the run's identity has it: defaults, and chat templates by their digest.
    return Value(identity(run).get(name))


def choice_name(choice: Mapping[str, Any]) -> str:
    """Return an algorithm's name, or its class path."""
    return str(choice.get("name", choice.get("class_path")))


def is_setting(name: str, arguments: Iterable[str]) -> bool:
    """Whether `name` is a setting of every run, or one of `arguments`."""
    return name in (*SETTINGS, *REPORTED, *KEYS, *arguments)


def unknown_column_error(name: str, allowed: Sequence[str]) -> ValueError:
    """Return the error for a column that no run has; it names the nearest and all allowed ones."""
    return ValueError(
        f"column {name!r} is not known.{nearest(name, allowed)} Allowed: "
        f"{listed(allowed, name)}; with `prefill_`, `decode_` or `verify_` before a rate, `.p50`, "
        "`.p90` or `.p99` after a latency, `@TASK` after a metric, and `TASK:METRIC` for another "
        "score."
    )


def selected(run: Run, where: Mapping[str, Any]) -> bool:
    """Whether a run has these settings; a list allows any of its values."""

    def has(name: str, wanted: Any) -> bool:
        value, values = setting(run, name), wanted if isinstance(wanted, list) else [wanted]
        return not {str(value.raw), value.identity}.isdisjoint(map(str, values))

    return all(has(name, wanted) for name, wanted in where.items())


def chosen_runs(runs: Sequence[Run], option: str, where: str | None) -> list[Run]:
    """Return the runs with the settings of `--OPTION=SETTING=VALUE,...`, or all without it.

    A value may have commas in it, as labels have. Raises ValueError where no run has them.
    """
    items = re.split(r",(?=[\w.]+=)", where or "")
    wanted = dict(item.split("=", 1) for item in items if "=" in item)
    chosen = [run for run in runs if selected(run, wanted)]
    if not chosen or (where and not wanted):
        raise ValueError(
            f"--{option}={where!r}: no run has these settings. Form: SETTING=VALUE,..., as "
            "policy=specmd,capacity=25% or run=LABEL."
        )
    return chosen


FRAME_SETTINGS = (
    *("policy", *AXES, "capacity", "capacity_bytes", "precision", "hardware", "emulate", "clock"),
    *("link", "streams", "num_fewshot", "limit", "seed"),
)
FRAME_FIGURES = (
    *("ttft_ms", "ttft_ms.p99", "tpot_ms", "tpot_ms.p99", "itl_ms.p99", "tok_per_s", "hit_rate"),
    *("miss_rate", "decode_miss_rate", "stall_ms_per_token", "bytes_per_token"),
    *("prefetch_precision", "prefetch_recall", "routing_fidelity", "low_precision_share"),
    "draft_acceptance",
)


class Runs(list[Run]):
    """Runs, in order, with their settings and metrics as a table."""

    def to_dataframe(self) -> Any:
        """Return a pandas DataFrame of a line per run and the same forty columns for any runs.

        A column that a run has nothing for is empty: `accuracy` where nothing is scored,
        `draft_acceptance` where nothing is drafted. Columns have the names of `moecache table`.
        """
        import pandas

        return pandas.DataFrame([_frame_row(run) for run in self])


def _frame_row(run: Run) -> dict[str, Any]:
    mean = accuracy(run)
    row: dict[str, Any] = {
        "run_id": run.run_id,
        "experiment": run.experiment,
        "label": run.label,
        "model": run.model,
        "pretrained": identity(run).get("pretrained"),
        "tasks": "+".join(run.tasks),
        **{name: setting(run, name).raw for name in FRAME_SETTINGS},
        "accuracy": mean.raw,
        "accuracy_stderr": mean.stderr,
    }
    return row | {name: metric_value(run, name).raw for name in FRAME_FIGURES}

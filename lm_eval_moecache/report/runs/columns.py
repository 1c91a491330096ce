"""The columns that runs have: figures and scores, settings, and the frames of `load_runs`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from lm_eval_moecache.algorithms.registry import AXES
from lm_eval_moecache.records.numbers import listed, nearest
from lm_eval_moecache.records.schemas.keys import RARE, REPORTED, keys_with
from lm_eval_moecache.report.metrics import METRICS, Column, metric_column
from lm_eval_moecache.report.runs.run import ACCURACY, KEYS, PARETO, SPEED_FILTER, Run

SETTINGS = (
    *("run", "experiment", "model", "tasks", "policy", *AXES, "parameters"),
    *("capacity", "capacity_bytes"),
)
_DECLARED = {
    column.name: column
    for column in (
        Column(PARETO, "Pareto"),
        Column(ACCURACY, "Accuracy", 3, True),
        Column("capacity_bytes", "Capacity bytes", 0),
    )
}
"""What is neither a metric, nor the score of a task, nor a setting's text."""


def find_column(runs: Sequence[Run], name: str) -> Column:
    """Return a column by name. Raises ValueError where no run has it."""
    column = _DECLARED.get(name) or metric_column(name) or score_column(runs, name)
    if column is not None:
        return column
    if is_setting(name, ()) or any(run.setting(name).raw is not None for run in runs):
        # Parameters keep their spelling as heading: capitalising `routing.M` would change the key.
        return Column(name, name if "." in name else name.replace("_", " ").capitalize())
    tasks = [task for run in runs for task in run.results]
    arguments = [key for run in runs for key in (*run.model_args, *KEYS)]
    names = dict.fromkeys([*SETTINGS, *arguments, ACCURACY, *METRICS, *tasks, PARETO])
    raise unknown_column_error(name, list(names))


def score_column(runs: Sequence[Run], name: str) -> Column | None:
    """Return the column of `task` (primary metric), `task:metric` or `task:metric,filter`.

    None where no run has that score.
    """
    score = next((score for run in runs if (score := run.find_score(name))), None)
    if score is None:
        return None
    task, higher = name.partition(":")[0], score.higher_is_better
    heading = f"{task} {score.metric}{'' if higher else ' (lower is better)'}"
    words = f"{task} {score.metric.replace('_', ' ')}"
    return Column(name, heading, 3 if higher else 2, higher, words)


def is_setting(name: str, arguments: Iterable[str]) -> bool:
    """Whether `name` is a setting of every run, or one of `arguments`."""
    return name in (*SETTINGS, *keys_with(REPORTED | RARE), *KEYS, *arguments)


def unknown_column_error(name: str, allowed: Sequence[str]) -> ValueError:
    """Return the error for a column that no run has; it names the nearest and all allowed ones."""
    return ValueError(
        f"column {name!r} is not known.{nearest(name, allowed)} Allowed: "
        f"{listed(allowed, name)}; with `prefill_`, `decode_` or `verify_` before a rate, `.p50`, "
        "`.p90` or `.p99` after a latency, `@TASK` after a metric, and `TASK:METRIC` for another "
        "score."
    )


def chosen_runs(runs: Sequence[Run], option: str, where: str | None) -> list[Run]:
    """Return the runs with the settings of `--OPTION=SETTING=VALUE,...`, or all without it.

    A value may have commas in it, as labels have. Raises ValueError where no run has them.
    """
    items = re.split(r",(?=[\w.]+=)", where or "")
    wanted = dict(item.split("=", 1) for item in items if "=" in item)
    chosen = [run for run in runs if run.matches(wanted)]
    if not chosen or (where and not wanted):
        raise ValueError(
            f"--{option}={where!r}: no run has these settings. Form: SETTING=VALUE,..., as "
            "policy=specmd,capacity=25% or run=LABEL."
        )
    return chosen


# --- runs as two tables: a line a run, and a line a document and metric ---

FRAME_SETTINGS = (
    *("policy", *AXES, "capacity", "capacity_bytes", "precision", "hardware", "emulate", "clock"),
    *("link", "streams", "num_fewshot", "limit", "seed"),
)
FRAME_FIRST = ("right_per_hour", "e2el_ms", "tok_per_s", "ttft_ms", "miss_rate")
FRAME_FIGURES = (
    *("ttft_ms.p99", "tpot_ms", "tpot_ms.p99", "itl_ms.p99", "output_tokens"),
    *("hit_rate", "decode_miss_rate", "stall_ms_per_token", "bytes_per_token"),
    *("prefetch_precision", "prefetch_recall", "routing_fidelity", "low_precision_share"),
    "draft_acceptance",
)


def frame_row(run: Run) -> dict[str, Any]:
    """Return a run under the names of `moecache table`, the same for any runs, what one asks first.

    A column that a run has nothing for is None: `accuracy` where nothing is scored.
    """
    mean = run[ACCURACY]
    row: dict[str, Any] = {
        "tasks": "+".join(run.tasks),
        **{name: run.setting(name).raw for name in ("policy", "capacity")},
        ACCURACY: mean.raw,
        **{name: run[name].raw for name in FRAME_FIRST},
        "label": run.label,
        "accuracy_stderr": mean.stderr,
        "run_id": run.run_id,
        "experiment": run.experiment,
        "model": run.model,
        "pretrained": run.identity.get("pretrained"),
    }
    row |= {name: run.setting(name).raw for name in FRAME_SETTINGS}
    return row | {name: run[name].raw for name in FRAME_FIGURES}


SAMPLE_COLUMNS = ("run_id", "task", "document", "metric", "value", "words")
"""`metric` is lm-eval's `metric,filter` (`...,speed` for figures of speed), `words` what a
perplexity's log-likelihood is divided by."""


class Runs(NamedTuple):
    """Stored runs as two pandas DataFrames."""

    runs: Any
    """A line a run: tasks, policy, capacity, accuracy, right answers an hour, time an answer ..."""
    samples: Any
    """A line a run, task, document and metric (`acc,none`, or `tpot_ms,speed`)."""


def as_frames(runs: Sequence[Run]) -> Runs:
    """Return runs as two tables, in their order; columns have the names of `moecache table`."""
    import pandas

    samples: dict[str, list[Any]] = {name: [] for name in SAMPLE_COLUMNS}
    for run in runs:
        for task in dict.fromkeys([*run.samples, *run.speed]):
            speeds = {f"{k},{SPEED_FILTER}": v for k, v in run.speed.get(task, {}).items()}
            for metric, values in {**run.samples.get(task, {}), **speeds}.items():
                for name, text in (("run_id", run.run_id), ("task", task), ("metric", metric)):
                    samples[name] += [text] * len(values)
                samples["document"] += values
                pairs = [v if isinstance(v, list) else (v, math.nan) for v in values.values()]
                samples["value"] += [float(value) for value, _ in pairs]
                samples["words"] += [float(words) for _, words in pairs]
    return Runs(pandas.DataFrame([frame_row(run) for run in runs]), pandas.DataFrame(samples))

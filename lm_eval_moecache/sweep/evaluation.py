"""One quiet run through lm-eval, and the part of its results that a record keeps.

With `worker`, the only module of the sweep that depends on lm-eval.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any
from unittest import mock

import lm_eval.evaluator
from lm_eval.tasks import TaskManager

from lm_eval_moecache.harness import hub
from lm_eval_moecache.harness.task_names import check_known
from lm_eval_moecache.harness.tasks import REQUEST_BYTES, SAMPLE_KEY
from lm_eval_moecache.records.files import task_configs_dir
from lm_eval_moecache.records.numbers import nearest
from lm_eval_moecache.report.metrics import BATCH
from lm_eval_moecache.report.runs.run import SPEED_FILTER
from lm_eval_moecache.sweep.spec import Cell

# lm-eval's default of 100,000 draws costs more than a tiny run; 1,000 place the standard error
# of a bootstrapped metric (BLEU, medians) within about 2%. Means have a closed form.
BOOTSTRAP_DRAWS = 1000
_KEPT = ("results", "groups", "group_subtasks", "versions", "n-shot", "higher_is_better")
#: Metrics stored per document, for paired comparisons of speed.
RECORDED_SPEED = (
    *("ttft_ms", "tpot_ms", "e2el_ms", "request_tok_per_s", "request_miss_rate"),
    *("request_collision_miss_rate", REQUEST_BYTES, BATCH),
)
# The keys of lm-eval's own `config` that follow from the configuration, not from the machine.
_KEPT_CONFIG = (
    "model_num_parameters model_dtype model_revision model_sha limit bootstrap_iters "
    "gen_kwargs random_seed numpy_seed torch_seed fewshot_seed moecache"
).split()
_QUIET = ("lm_eval", "transformers", "datasets", "accelerate")
# lm-eval runs subprocesses (pip, nvidia-smi, git) to describe the machine in every run: half a
# second or more, and git's complaint on the terminal. `worker.environment` asks once per process.
_COLLECTORS = ("add_env_info", "get_git_commit_hash")


@lru_cache(maxsize=4)
def _task_manager(include_path: tuple[str, ...], defaults: bool) -> TaskManager:
    folders = [str(task_configs_dir()), *include_path]
    return TaskManager(include_path=folders, include_defaults=defaults)


def check_task_names(tasks: Sequence[str], include_path: tuple[str, ...]) -> None:
    """Raise ValueError for a name that is neither in the include paths nor one of lm-eval's."""
    if all(name in _task_manager(include_path, False).task_index for name in tasks):
        return
    check_known(tasks, [str(task_configs_dir()), *include_path])
    with quiet():
        index = _task_manager(include_path, True).task_index
    for name in tasks:
        if name not in index:
            raise ValueError(
                f"tasks={name!r} is not known.{nearest(name, index)} Allowed: the tasks and groups "
                "of include_path, of this package's task_configs/, and of `lm_eval ls tasks`."
            )


def loadable(tasks: Sequence[str], include_path: tuple[str, ...]) -> TaskManager:
    """Return a task manager that can load these tasks.

    It indexes lm-eval's own 10,000 tasks, which takes seconds, only where these need it.
    """
    manager = _task_manager(include_path, False)
    try:
        manager.load(list(tasks))
    except KeyError:
        return _task_manager(include_path, True)
    return manager


def leaf_tasks(tasks: Sequence[str], include_path: tuple[str, ...] = ()) -> dict[str, Any]:
    """Load tasks and groups quietly; return lm-eval's leaf tasks by name.

    Raises ValueError for an unknown name, or data that cannot be fetched.
    """
    check_task_names(tasks, include_path)
    hub.answers(tasks)
    with quiet(), hub.naming_data_sets():
        return dict(loadable(tasks, include_path).load(list(tasks))["tasks"])


@lru_cache(maxsize=64)
def check_data(tasks: tuple[str, ...], include_path: tuple[str, ...]) -> None:
    """Raise ValueError where the tasks need a hub that does not answer, and no cache has them."""
    if not hub.answers(tasks):
        leaf_tasks(tasks, include_path)


def answers_of(tasks: Mapping[str, Any]) -> list[str]:
    """Return the kinds of requests that leaf tasks make, sorted, without duplicates."""
    return sorted({str(task.OUTPUT_TYPE) for task in tasks.values()})


def evaluate(cell: Cell, lm: Any) -> dict[str, Any]:
    """Run a cell's tasks; return the part of lm-eval's results that a rerun reproduces."""
    hub.answers(cell.tasks)
    with contextlib.ExitStack() as stack:
        stack.enter_context(hub.naming_data_sets())
        for name in _COLLECTORS:
            if hasattr(lm_eval.evaluator, name):
                stack.enter_context(mock.patch.object(lm_eval.evaluator, name))
        results = lm_eval.evaluator.simple_evaluate(
            model=lm,
            model_args=dict(cell.model_args),
            tasks=list(cell.tasks),
            task_manager=loadable(cell.tasks, cell.include_path),
            log_samples=True,
            bootstrap_iters=BOOTSTRAP_DRAWS,
            **cell.options,
        )
    assert results is not None, "only the first rank of a distributed run has results"
    record: dict[str, Any] = {key: results[key] for key in _KEPT if key in results}
    for part in {"results", "groups"} & record.keys():
        record[part] = {name: without_speed(row) for name, row in record[part].items()}
    record["n-samples"] = results["n-samples"]
    record["config"] = {key: results["config"].get(key) for key in _KEPT_CONFIG}
    record["scores"] = {name: scores(rows) for name, rows in sorted(results["samples"].items())}
    return record


def without_speed(by_metric: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out the figures of speed, which `config.moecache` has as well."""
    return {key: value for key, value in by_metric.items() if not key.endswith(f",{SPEED_FILTER}")}


def scores(samples: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return what paired comparisons need of each sample: `metric,filter` -> doc_id -> score.

    A perplexity's per-sample value is a pair (log-likelihood, words) and stays one. Of a document's
    speed the metrics in `RECORDED_SPEED` are stored, to six digits.
    """
    figures = []
    for sample in samples:
        figures.append((sample["doc_id"], recorded_speed(sample.get(SAMPLE_KEY, {}))))
        if sample["filter"] != SPEED_FILTER:
            names = sample["metrics"]
            answers = {f"{name},{sample['filter']}": _plain(sample[name]) for name in names}
            figures.append((sample["doc_id"], answers))
    return by_metric(figures)


def by_metric(
    figures: Iterable[tuple[object, Mapping[str, Any]]],
) -> dict[str, dict[str, Any]]:
    """Turn (document, metric -> value) into metric -> document -> value, sorted by metric."""
    found: dict[str, dict[str, Any]] = {}
    for document, values in figures:
        for key, value in values.items():
            if value is not None:
                found.setdefault(key, {})[str(document)] = value
    return dict(sorted(found.items()))


def recorded_speed(figures: Mapping[str, float]) -> dict[str, float]:
    """Return the speed metrics of a document that records keep, to six digits.

    Further digits of a mean are noise, and half of a record's size.
    """
    selected = {name: figures[name] for name in RECORDED_SPEED if name in figures}
    return {f"{name},{SPEED_FILTER}": float(f"{value:.6g}") for name, value in selected.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        pair = [_plain(item) for item in value]
        return pair if len(pair) == 2 and all(isinstance(x, (int, float)) for x in pair) else None
    if isinstance(value, bool):
        return int(value)
    if hasattr(value, "item"):
        value = value.item()
    # NaN, infinities and other types can be neither compared nor written to JSON.
    return value if isinstance(value, (int, float)) and math.isfinite(value) else None


@contextlib.contextmanager
def quiet() -> Iterator[io.StringIO]:
    """Keep per-run output of lm-eval, transformers and this package off the terminal; yield it."""
    captured = io.StringIO()
    loggers = [logging.getLogger(name) for name in _QUIET]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(captured), contextlib.redirect_stderr(captured):
            yield captured
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)

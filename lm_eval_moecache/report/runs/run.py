"""A run as it is read back: figures and settings by name, and the identity of comparisons."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from lm_eval_moecache.algorithms.registry import AXES
from lm_eval_moecache.records.schemas.keys import COMPARED, REPORTED, keys_with
from lm_eval_moecache.report.metrics import BATCH, Column, metric_column
from lm_eval_moecache.report.runs.answers import ANSWERS, costs_of

# A task's primary metric is the first of these that it reports, else its first metric.
_PREFERRED = ("exact_match", "acc", "mc2", "f1", "word_perplexity", "rouge1_max", "bleu")
SPEED_FILTER = "speed"
PLACEHOLDER = "bypass"
"""lm-eval's metric of answers that nothing scores (`--predict_only`), always 999."""
ONLY_HOW = ("batch_size", "max_batch_size")
"""Arguments that say how many requests are computed together, and change no figure."""
_COMPARED = {*keys_with(COMPARED), "label", *ONLY_HOW}
"""Model arguments that comparisons vary (and the axes' parameters: `eviction.NAME`)."""
_SETTING = tuple(key for key in keys_with(REPORTED) if key not in _COMPARED)
RATES = (
    *("link_bytes_per_s", "link_latency_s", "peak_flops", "memory_bytes_per_s"),
    *("kernel_overhead_s", "layer_overhead_s", "host_flops", "host_memory_bytes_per_s"),
)
_SEEDS = ("random_seed", "numpy_seed", "torch_seed", "fewshot_seed")
_MODEL = ("model_revision", "model_sha", "model_num_parameters", "model_dtype")
_PROMPTS = (("chat_template", "apply_chat_template"), ("system_instruction", "system_instruction"))
_OPTIONS = ("limit", "fewshot_as_multiturn")
KEYS = (
    *("pretrained", *_MODEL, "tasks", "task_versions", "num_fewshot"),
    *("chat_template", "system_instruction", "gen_kwargs", *_OPTIONS, *_SEEDS, *_SETTING),
    *("hardware", "emulate", *RATES, "device"),
)
"""The keys of `identity`, but for further model arguments (`dtype`, `max_length` ...)."""
PARETO, ACCURACY = "pareto", "accuracy"


@dataclass(frozen=True, slots=True)
class Value:
    """One cell: a setting's text, a number with or without standard error, or nothing."""

    raw: float | str | None = None
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """One metric of one task: its value and standard error (None where lm-eval has none)."""

    metric: str
    filter: str
    value: float
    stderr: float | None
    higher_is_better: bool

    @property
    def key(self) -> str:
        """`metric,filter`, as lm-eval's results name it."""
        return f"{self.metric},{self.filter}"


def scores_of(
    figures: Mapping[str, Any], directions: Mapping[str, bool | None] | None = None
) -> list[Score]:
    """Return the accuracy metrics among one task's `results` of lm-eval, in its order.

    `directions`: metric -> whether more is better, which it is where nothing else is said.
    """
    scores = []
    for key, value in figures.items():
        metric, comma, filter_name = key.partition(",")
        if not comma or metric.endswith("_stderr") or filter_name == SPEED_FILTER:
            continue
        if metric == PLACEHOLDER:
            continue
        if isinstance(value, (int, float)):
            error = figures.get(f"{metric}_stderr,{filter_name}")
            score = Score(
                metric=metric,
                filter=filter_name,
                value=float(value),
                stderr=float(error) if isinstance(error, (int, float)) else None,
                higher_is_better=(directions or {}).get(metric) is not False,
            )
            scores.append(score)
    return scores


@dataclass(frozen=True, kw_only=True)
class Run:
    """One results file. `model_args` are as given by users; `moecache` is the resolved report."""

    path: Path
    run_id: str
    experiment: str
    label: str | None
    model: str
    tasks_given: tuple[str, ...]
    """Tasks and groups as requested; empty for lm-eval's own files, which do not record them."""
    model_args: Mapping[str, Any]
    options: Mapping[str, Any]
    moecache: Mapping[str, Any]
    results: Mapping[str, Mapping[str, Any]]
    higher_is_better: Mapping[str, Mapping[str, bool | None]]
    subtasks: Mapping[str, list[str]]
    samples: Mapping[str, Mapping[str, Mapping[str, Any]]]
    """Task -> `metric,filter` -> doc_id -> score, or of perplexities [log-likelihood, words]; empty
    for lm-eval's own files."""
    speed: Mapping[str, Mapping[str, Mapping[str, float]]]
    """Task -> metric -> doc_id -> that document's value; empty for records without them."""
    environment: Mapping[str, Any]
    """Date, duration, machine and versions; empty for lm-eval's own files."""
    facts: Mapping[str, Any]
    """lm-eval's other entries: `versions`, `n-shot`, `config`, `chat_template_sha` ..."""
    slo: Mapping[str, float] = field(default_factory=dict)
    """Limits that `goodput` counts: metric of a request -> the most it may be, in ms."""

    def __getitem__(self, name: str) -> Value:
        """Return what the column of this name shows: a figure, a score, or a setting."""
        if name == ACCURACY:
            return self._accuracy
        column = metric_column(name)
        if column is not None:
            return self._figure(column)
        score = self.find_score(name)
        return self.setting(name) if score is None else Value(score.value, score.stderr)

    def _figure(self, column: Column) -> Value:
        """Read a metric; means and miss rates carry a standard error where recorded."""
        tasks, task = self.moecache["tasks"], column.task
        figures = tasks.get(task, {}) if task else self.moecache["totals"]
        value, stderr = figures.get(column.base), figures.get(f"{column.base}_stderr")
        if isinstance(value, Mapping):
            stderr = value.get("stderr") if column.percentile in ("", "mean") else None
            value = value.get(column.percentile or "mean")
        if value is None and column.base in ANSWERS:
            key = (column.base, task)
            if key not in self._answered:
                self._answered[key] = ANSWERS[column.base](self, [task] if task else self.tasks)
            value, stderr = self._answered[key]
        return Value(value, stderr) if isinstance(value, (int, float)) else Value()

    @cached_property
    def _accuracy(self) -> Value:
        """The mean of the primary scores where higher is better; errors count as independent."""
        scores = [score for _, score in self._primary]
        if not scores:
            return Value()
        errors = [score.stderr for score in scores if score.stderr is not None]
        stderr = math.sqrt(sum(e * e for e in errors)) / len(scores)
        mean = sum(score.value for score in scores) / len(scores)
        return Value(mean, stderr if len(errors) == len(scores) else None)

    def setting(self, name: str) -> Value:
        """Return a setting as text: as given, else as resolved in the run's report.

        Defaults that change metrics (`streams`) are read from the run's identity.
        """
        policy = self.moecache["policy"]
        if name == "policy":
            return Value(str(policy["name"]), asked=policy.get("composition"))
        if name in AXES:
            return Value(choice_name(policy[name]))
        if name == "parameters":
            given = self.model_args.items()
            texts = [f"{k}={v}" for k, v in given if "." in k and k.partition(".")[0] in AXES]
            return Value(", ".join(texts) or None)
        named = {
            "run": self.label or self.run_id,
            "experiment": self.experiment,
            "model": self.model,
            "tasks": "+".join(self.tasks_given or self.scored),
            "hardware": self.moecache["hardware"]["name"],
        }
        for source in (named, self.model_args, self.options, self.moecache):
            value = source.get(name)
            if value is not None and not isinstance(value, (Mapping, list)):
                return Value(value if name == "capacity_bytes" else str(value))
        # Else as the run's identity has it: defaults, and chat templates by their digest.
        return Value(self.identity.get(name))

    def documents(self, name: str) -> dict[str, float]:
        """Return a column's values by document, more being better of scores; empty without any.

        Of texts it is the log-likelihood. The documents of one batch are one sample of speed.
        """
        if name == ACCURACY:
            parts = [self._answers(task, score) for task, score in self._primary]
            return {doc: value for part in parts for doc, value in part.items()}
        column = metric_column(name)
        if column is None:
            score = self.find_score(name)
            return {} if score is None else self._answers(name.partition(":")[0], score)
        sign = -1.0 if column.tested_by.startswith("-") else 1.0
        by_document = column.tested_by.removeprefix("-")
        return independent(
            {
                f"{task} {doc}": (sign * value, metrics.get(BATCH, {}).get(doc))
                for task, metrics in self.costs.items()
                if column.task in ("", task)
                for doc, value in metrics.get(by_document, {}).items()
            }
        )

    @cached_property
    def _answered(self) -> dict[tuple[str, str], tuple[float | None, float | None]]:
        """Metric and task -> its figure, once it was asked for."""
        return {}

    @cached_property
    def costs(self) -> dict[str, dict[str, Mapping[str, float]]]:
        """`speed` with the tokens and time of each answer."""
        return {task: costs_of(metrics, self.slo) for task, metrics in self.speed.items()}

    def _answers(self, task: str, score: Score) -> dict[str, float]:
        sign = 1.0 if score.higher_is_better else -1.0
        return {
            f"{task} {doc}": sign * value[0] if isinstance(value, list) else float(value)
            for doc, value in self.samples.get(task, {}).get(score.key, {}).items()
        }

    def scores(self, task: str) -> list[Score]:
        """Return the accuracy metrics of a task or group, in lm-eval's order."""
        return self._scores.get(task, [])

    @cached_property
    def _scores(self) -> dict[str, list[Score]]:
        return {
            t: scores_of(row, self.higher_is_better.get(t, {})) for t, row in self.results.items()
        }

    def score(self, task: str) -> Score | None:
        """Return a task's primary metric under its first filter."""
        scores = self.scores(task)
        preferred = (score for metric in _PREFERRED for score in scores if score.metric == metric)
        return next(preferred, scores[0] if scores else None)

    def find_score(self, name: str) -> Score | None:
        """Return the score of `task` (primary metric), `task:metric` or `task:metric,filter`."""
        task, colon, metric = name.partition(":")
        if not colon:
            return self.score(task)
        return next((s for s in self.scores(task) if metric in (s.metric, s.key)), None)

    @cached_property
    def _primary(self) -> list[tuple[str, Score]]:
        scores = [(task, score) for task in self.scored if (score := self.score(task))]
        return [(task, score) for task, score in scores if score.higher_is_better]

    @property
    def tasks(self) -> list[str]:
        """The tasks without the groups."""
        return [name for name in self.results if name not in self.subtasks]

    @cached_property
    def scored(self) -> list[str]:
        """The names a table shows: groups with a score of their own, else their tasks."""

        def below(name: str) -> list[str]:
            if self.score(name) is not None:
                return [name]
            return [leaf for child in self.subtasks.get(name, []) for leaf in below(child)]

        children = {name for names in self.subtasks.values() for name in names}
        return [n for root in self.results if root not in children for n in below(root)]

    @cached_property
    def identity(self) -> dict[str, str]:
        """`identity` of all tasks."""
        return identity(self)

    @property
    def is_lossless(self) -> bool:
        """Whether the record says that it computed what the model without a cache computes."""
        return self["routing_fidelity"].raw == 1 and not self["low_precision_share"].raw

    def matches(self, where: Mapping[str, Any]) -> bool:
        """Whether a run has these settings; a list allows any of its values."""
        for name, wanted in where.items():
            value, values = self.setting(name), wanted if isinstance(wanted, list) else [wanted]
            if {str(value.raw), value.identity}.isdisjoint(map(str, values)):
                return False
        return True


def choice_name(choice: Mapping[str, Any]) -> str:
    """Return an algorithm's name, or its class path."""
    return str(choice.get("name", choice.get("class_path")))


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


def identity(run: Run, tasks: Sequence[str] | None = None) -> dict[str, str]:
    """Return the settings that change a run's metrics but are not under comparison: name -> text.

    Two runs are ranked, joined or drawn as one line only where their identities agree: the same
    documents, streams, prompts, seeds and device. Entries that a record lacks are left out.
    `tasks` restricts whose versions count; the default takes all tasks, and their names as well.
    """
    facts, config = run.facts, run.facts.get("config", {})
    report, hardware, arguments = run.moecache, run.moecache["hardware"], run.model_args
    versioned = run.tasks if tasks is None else tasks
    settings: dict[str, Any] = {
        "pretrained": arguments.get("pretrained", arguments.get("trace", "tiny")),
        **{key: config.get(key) for key in _MODEL},
        "tasks": "+".join(sorted(run.tasks)) if tasks is None else None,
        "task_versions": _by_task(facts.get("versions"), versioned),
        "num_fewshot": _by_task(facts.get("n-shot"), versioned),
        **{
            # lm-eval's files keep only a digest of a prompt's text.
            name: str(facts.get(f"{name}_sha") or "")[:12] or run.options.get(option) or "none"
            for name, option in _PROMPTS
        },
        "gen_kwargs": run.options.get("gen_kwargs") or config.get("gen_kwargs") or None,
        **{key: run.options.get(key, config.get(key)) for key in _OPTIONS},
        **{key: config.get(key) for key in _SEEDS},
        **{key: report.get(key) for key in _SETTING},
        # Before `streams`, the rows of a batch shared the cache.
        "streams": report.get("streams")
        or arguments.get("batch_size")
        or config.get("batch_size")
        or 1,
        "hardware": hardware["name"],
        "emulate": (report.get("emulate") or {}).get("name"),
        **{key: hardware.get(key) or None for key in RATES},
    }
    if report["clock"] == "wall":
        settings["device"] = arguments.get("device", config.get("device"))
    others = {k: v for k, v in arguments.items() if k.partition(".")[0] not in _COMPARED}
    settings |= {k: v for k, v in others.items() if k not in (*settings, "bandwidth", "device")}
    return {key: _text(value) for key, value in settings.items() if value not in (None, "")}


def _by_task(values: Any, tasks: Sequence[str]) -> str | None:
    """Return the value that all tasks share, else `task=value` for each."""
    texts = {task: _text(values[task]) for task in tasks if task in (values or {})}
    if len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    return ", ".join(f"{task}={value}" for task, value in sorted(texts.items())) or None


def _text(value: Any) -> str:
    """Return `40` for 40 and 40.0, and the text of anything else."""
    return str(int(value) if isinstance(value, float) and value.is_integer() else value)


def varying(runs: Sequence[Run]) -> list[str]:
    """Return the keys that distinguish these runs' identities, without redundant ones."""
    names = dict.fromkeys(key for run in runs for key in run.identity)
    return distinguishing(names, lambda name: [run.identity.get(name) for run in runs])


def distinguishing(
    names: Iterable[str],
    values: Callable[[str], Sequence[Any]],
    besides: Iterable[str] = (),
) -> list[str]:
    """Return the names, in order, that distinguish more than `besides` and the names before them.

    `values` maps a name to its value in each run.
    """
    told: list[Any] = []
    chosen = []
    for name in (besides := [*besides]):
        told = [*zip(told, values(name), strict=True)] if told else [*values(name)]
    count = max(1, len(set(told)))
    for name in names:
        column = values(name)
        places = [*zip(told, column, strict=True)] if told else [*column]
        if len(set(places)) > count:
            chosen.append(name)
            told, count = places, len(set(places))
    return chosen


def groups(runs: Sequence[Run]) -> list[list[int]]:
    """Return the positions of the runs of each identity, one list per identity."""
    by_identity: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for place, run in enumerate(runs):
        by_identity.setdefault(tuple(sorted(run.identity.items())), []).append(place)
    return list(by_identity.values())

"""A run as it is read back: its scores, its settings, and the identity that comparisons rest on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lm_eval_moecache.algorithms.registry import AXES

# A task's primary metric is the first of these that it reports, else its first metric.
_PREFERRED = ("exact_match", "acc", "mc2", "f1", "word_perplexity", "rouge1_max", "bleu")
SPEED_FILTER = "speed"
PLACEHOLDER = "bypass"
"""lm-eval's metric of answers that nothing scores (`--predict_only`), always 999."""
BATCH = "batch"
"""Number of the batch that a document shares with others, among its speed metrics."""
ONLY_HOW = ("batch_size", "max_batch_size")
"""Arguments that say how many requests are computed together, and change no figure."""
_COMPARED = {
    *("policy", "phases", "capacity", "precision", "link", "warm", "draft", "draft_tokens"),
    *("store", "store_dir", "encoded_dir", "trace", "trace_keep", "label", *AXES),
    *ONLY_HOW,
}
"""Model arguments that comparisons vary (and the axes' parameters: `eviction.NAME`)."""
RATES = (
    *("link_bytes_per_s", "link_latency_s", "peak_flops", "memory_bytes_per_s"),
    *("kernel_overhead_s", "layer_overhead_s", "host_flops", "host_memory_bytes_per_s"),
)
_SEEDS = ("random_seed", "numpy_seed", "torch_seed", "fewshot_seed")
_MODEL = ("model_revision", "model_sha", "model_num_parameters", "model_dtype")
_PROMPTS = (("chat_template", "apply_chat_template"), ("system_instruction", "system_instruction"))
_OPTIONS = ("limit", "fewshot_as_multiturn")
KEYS = (
    *("pretrained", *_MODEL, "tasks", "task_versions", "num_fewshot", "streams"),
    *("chat_template", "system_instruction", "gen_kwargs", *_OPTIONS, *_SEEDS, "seed", "clock"),
    *("scoring", "cache_reset", "hardware", "emulate", *RATES, "device"),
)
"""The keys of `identity`, but for further model arguments (`dtype`, `max_length` ...)."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
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

    def scores(self, task: str) -> list[Score]:
        """Return the accuracy metrics of a task or group, in lm-eval's order."""
        return scores_of(self.results.get(task, {}), self.higher_is_better.get(task, {}))

    def score(self, task: str) -> Score | None:
        """Return a task's primary metric under its first filter."""
        scores = self.scores(task)
        preferred = (score for metric in _PREFERRED for score in scores if score.metric == metric)
        return next(preferred, scores[0] if scores else None)

    @property
    def tasks(self) -> list[str]:
        """The tasks without the groups."""
        return [name for name in self.results if name not in self.subtasks]

    @property
    def scored(self) -> list[str]:
        """The names a table shows: groups with a score of their own, else their tasks."""

        def below(name: str) -> list[str]:
            if self.score(name) is not None:
                return [name]
            return [leaf for child in self.subtasks.get(name, []) for leaf in below(child)]

        children = {name for names in self.subtasks.values() for name in names}
        return [n for root in self.results if root not in children for n in below(root)]


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
        # Before `streams`, the rows of a batch shared the cache.
        "streams": report.get("streams")
        or arguments.get("batch_size")
        or config.get("batch_size")
        or 1,
        **{
            # lm-eval's files keep only a digest of a prompt's text.
            name: str(facts.get(f"{name}_sha") or "")[:12] or run.options.get(option) or "none"
            for name, option in _PROMPTS
        },
        "gen_kwargs": run.options.get("gen_kwargs") or config.get("gen_kwargs") or None,
        **{key: run.options.get(key, config.get(key)) for key in _OPTIONS},
        **{key: config.get(key) for key in _SEEDS},
        **{key: report.get(key) for key in ("seed", "clock", "scoring", "cache_reset")},
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
    identities = [identity(run) for run in runs]
    names = dict.fromkeys(key for settings in identities for key in settings)
    return distinguishing(
        names, lambda keys: {tuple(settings.get(n) for n in keys) for settings in identities}
    )


def distinguishing(
    names: Iterable[str],
    places: Callable[[Sequence[str]], set[tuple[Any, ...]]],
    besides: Sequence[str] = (),
) -> list[str]:
    """Return the names, in order, that distinguish more than `besides` and the names before them.

    `places` maps names to the set of distinct tuples of their values.
    """
    chosen = list(besides)
    for name in names:
        if len(places([*chosen, name])) > len(places(chosen)):
            chosen.append(name)
    return chosen[len(besides) :]


def groups(runs: Sequence[Run]) -> list[list[int]]:
    """Return the positions of the runs of each identity, one list per identity."""
    by_identity: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for place, run in enumerate(runs):
        by_identity.setdefault(tuple(sorted(identity(run).items())), []).append(place)
    return list(by_identity.values())

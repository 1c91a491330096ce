"""Reads results JSONs (a sweep's records, or lm-eval's own files) into runs and columns.

A sweep writes `runs/<run-id>.json`, one file per run, so that each run appears whole or not at all;
`moecache pack` puts them into one compressed file, `runs.jsonl.gz`, one record per line. All
commands read both forms, and a resumed sweep unpacks the file. In pandas:
`pd.read_json("runs.jsonl.gz", lines=True)`.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lm_eval_moecache.algorithms.registry import AXES
from lm_eval_moecache.records.files import (
    exists,
    parse_json,
    read_gzip,
    read_json,
    write_whole,
)
from lm_eval_moecache.records.numbers import nearest, shown
from lm_eval_moecache.records.schemas.results import check_record
from lm_eval_moecache.report.metrics import METRICS

logger = logging.getLogger(__name__)
PACKED = "runs.jsonl.gz"
RUNS = "runs"
Record = dict[str, Any]
# A task's primary metric is the first of these that it reports, else its first metric.
_PREFERRED = ("exact_match", "acc", "mc2", "f1", "word_perplexity", "rouge1_max", "bleu")
# Those whose documents are pairs: log-likelihood, and words or bytes.
_PERPLEXITIES = ("word_perplexity", "byte_perplexity", "bits_per_byte")
SPEED_FILTER = "speed"
BATCH = "batch"
"""Number of the batch that a document shares with others, among its speed metrics."""
_FACTS = (
    *("inputs", "config", "versions", "n-shot", "chat_template_sha", "system_instruction_sha"),
    *("date", "lm_eval_version"),
)
# Old records name means over requests like the pooled metrics: old name -> today's.
_NAMED_SINCE = {
    name: f"request_{name}"
    for name in ("tok_per_s", "hit_rate", "miss_rate", "collision_miss_rate")
}
_COMPARED = {
    *("policy", "phases", "capacity", "precision", "link", "warm", "draft", "draft_tokens"),
    *("store", "store_dir", "encoded_dir", "trace", "trace_keep", "label", *AXES),
    *("batch_size", "max_batch_size"),  # how many are computed together changes no figure
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


def load_runs(place: str | Path) -> list[Run]:
    """Load every results JSON under a folder (or one file), in order of experiment and run id.

    In a folder, an unreadable file is skipped with a warning that names file and field, other JSON
    files silently. Raises FileNotFoundError where `place` does not exist, ValueError where it holds
    no run.
    """
    if not str(place):
        raise ValueError(
            "'' is no path. Allowed: a folder of results (`.` for this one), or a file."
        )
    if not exists(place):
        raise FileNotFoundError(f"{str(place)!r}: there is no such file or folder.")
    place = Path(place)
    is_file, runs = place.is_file(), []
    for path in [place] if is_file else sorted([*place.rglob("*.json"), *place.rglob(PACKED)]):
        try:
            packed = path.name == PACKED
            records = read_packed(path) if packed else [read_json(path, repr(str(path)))]
            runs += [run for record in records if (run := _run(record, path)) is not None]
        except ValueError as error:
            if is_file:
                raise
            logger.warning("skipping unreadable results file: %s", error)
    if not runs:
        raise ValueError(
            f"{str(place)!r} holds no results of moecache runs: JSON files written by "
            "`moecache sweep`, or by `lm_eval run --model moecache --output_path`."
        )
    return sorted(runs, key=lambda run: (run.experiment, run.run_id, str(run.path)))


def _run(data: Any, path: Path) -> Run | None:
    if not isinstance(data, dict) or not isinstance(data.get("config"), dict):
        return None
    if "moecache" not in data["config"] or "results" not in data:
        return None
    schema = check_record(data, repr(str(path)))
    options = dict(data.get("configuration") or {})
    tasks_given = options.pop("tasks", ())
    if not options:
        # lm-eval's own file, whose `config` has the user's arguments, perhaps as one text.
        config = data["config"]
        keys = ("model", "model_args", "limit")
        options = {key: config[key] for key in keys if config.get(key) is not None}
    model, arguments = options.pop("model", "moecache"), options.pop("model_args", {})
    if isinstance(arguments, str):
        pairs = (item.partition("=") for item in arguments.split(",") if item)
        arguments = {key.strip(): value for key, _, value in pairs}
    scores: dict[str, dict[str, Any]] = {}
    speed: dict[str, dict[str, Any]] = {}
    for task, metrics in schema.scores.items():
        for key, values in metrics.items():
            name = key.removesuffix(f",{SPEED_FILTER}")
            if name != key:
                speed.setdefault(task, {})[_NAMED_SINCE.get(name, name)] = values
            else:
                scores.setdefault(task, {})[key] = _comparable(key.partition(",")[0], values)
    return Run(
        path=path,
        run_id=schema.run_id or path.stem,
        experiment=schema.experiment or path.parent.name,
        label=schema.label,
        model=str(model),
        tasks_given=tuple(tasks_given),
        model_args=dict(arguments),
        options=options,
        moecache=data["config"]["moecache"],
        results=data["results"],
        higher_is_better={k: v or {} for k, v in schema.higher_is_better.items()},
        subtasks={k: v for k, v in schema.group_subtasks.items() if v},
        samples=scores,
        speed=speed,
        environment=data.get("environment", {}),
        facts={key: data[key] for key in _FACTS if isinstance(data.get(key), (str, dict, float))},
    )


def _comparable(metric: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what two runs may compare of a score's documents, as `Run.samples` holds it.

    `perplexity` records log-likelihoods, where more is better, of one text each. Other pairs than
    the perplexities' (gold and prediction, for F1) are parts of a sum and no document's score.
    """
    if metric in _PERPLEXITIES:
        return dict(values)
    single = {doc: value for doc, value in values.items() if not isinstance(value, list)}
    if metric == "perplexity":
        return {doc: [value, 1] for doc, value in single.items()}
    return single


def read_packed(path: Path) -> list[Record]:
    """Return the records of a packed file, in order. Raises ValueError naming file and line."""
    data = read_gzip(path, repr(str(path)))
    try:
        # Not splitlines: a text may contain Unicode line separators.
        lines = data.decode().removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{str(path)!r} is no text in UTF-8: {error}") from error
    records = []
    for number, line in enumerate(lines, 1):
        record = parse_json(line, f"{str(path)!r}: line {number}")
        if not isinstance(record, dict) or not isinstance(record.get("run_id"), str):
            raise ValueError(f"{str(path)!r}: line {number} is no run: it has no `run_id`.")
        records.append(record)
    return records


def write_packed(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Write the records in order of run id; equal records give equal bytes."""
    ordered = sorted(records, key=lambda record: str(record["run_id"]))
    lines = (
        json.dumps(r, ensure_ascii=False, allow_nan=False, separators=(",", ":")) for r in ordered
    )
    text = "".join(f"{line}\n" for line in lines)
    write_whole(path, gzip.compress(text.encode(), compresslevel=9, mtime=0))


def pack(folder: Path) -> int:
    """Pack every run of an experiment's folder into one file; return the number of runs in it.

    A run in both forms is taken from its own file, the newer one. The files are removed only after
    the packed one was read back and compared equal. Raises ValueError, and changes nothing, where a
    file of `runs/` is unreadable or two packed runs share an id.
    """
    target = folder / PACKED
    files = sorted((folder / RUNS).glob("*.json"))
    records = _by_id(target) if target.is_file() else {}
    records |= {path.stem: _own_record(path) for path in files}
    if not records:
        raise ValueError(f"{str(folder)!r} has no runs to pack: {RUNS}/*.json.")
    write_packed(target, records.values())
    if {r["run_id"]: r for r in read_packed(target)} != records:
        raise ValueError(f"{str(target)!r} does not hold what was written to it.")
    for path in files:
        path.unlink()
    with contextlib.suppress(OSError):
        (folder / RUNS).rmdir()
    return len(records)


def unpack(folder: Path) -> int:
    """Write every packed run to its own file and remove the packed one; return the number of runs.

    An existing file is kept: it holds a later run. Raises ValueError, and changes nothing, where a
    run would be lost (two of one id, or a file of that name that is not the run) or an id would
    lead out of the folder.
    """
    source = folder / PACKED
    if not source.is_file():
        return 0
    records, targets = _by_id(source), {}
    for name in records:
        # The id becomes a file name: an untrusted archive must not write elsewhere.
        if set(name) & {"/", "\\", "\0"}:
            raise ValueError(f"{str(source)!r}: run_id={shown(name)} is no name of a file.")
        path = folder / RUNS / f"{name}.json"
        if path.exists():
            _own_record(path)
        else:
            targets[name] = path
    for name, path in targets.items():
        text = json.dumps(records[name], indent=1, ensure_ascii=False, allow_nan=False)
        write_whole(path, f"{text}\n")
        if _own_record(path) != records[name]:
            raise ValueError(f"{str(path)!r} does not hold what was written to it.")
    source.unlink()
    return len(records)


def _by_id(packed: Path) -> dict[str, Record]:
    records = read_packed(packed)
    counts = Counter(record["run_id"] for record in records)
    if duplicates := [name for name, count in counts.items() if count > 1]:
        raise ValueError(
            f"{str(packed)!r} has several runs of one run_id, of which only one could be kept: "
            f"{', '.join(map(shown, duplicates))}."
        )
    return {record["run_id"]: record for record in records}


def _own_record(path: Path) -> Record:
    """Read `runs/<run-id>.json`. Raises ValueError unless it is a file that holds that run."""
    if not path.is_file():
        raise ValueError(f"{str(path)!r} is no file, where the run of its name should be.")
    record = read_json(path, repr(str(path)))
    if not isinstance(record, dict) or record.get("run_id") != path.stem:
        raise ValueError(f"{str(path)!r} is not the run that its name says.")
    return record


# --- columns: name, heading, how they are read from a run, and which direction is better ---

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
        f"{', '.join(allowed)}; with `prefill_`, `decode_` or `verify_` before a rate, `.p50`, "
        "`.p90` or `.p99` after a latency, `@TASK` after a metric, and `TASK:METRIC` for another "
        "score."
    )


def selected(run: Run, where: Mapping[str, Any]) -> bool:
    """Whether a run has these settings; a list allows any of its values."""

    def has(name: str, wanted: Any) -> bool:
        value, values = setting(run, name), wanted if isinstance(wanted, list) else [wanted]
        return not {str(value.raw), value.identity}.isdisjoint(map(str, values))

    return all(has(name, wanted) for name, wanted in where.items())


# --- runs in pandas ---

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

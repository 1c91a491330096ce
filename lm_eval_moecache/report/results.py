"""Reads results JSONs - a sweep's records, or lm-eval's own files - into runs and columns.

A sweep writes `runs/<run-id>.json`, one file a run, so that each appears whole or not at all;
`moecache pack` puts them into one compressed file, `runs.jsonl.gz`, one record a line. All
commands read both forms, and a sweep that goes on unpacks again. In pandas:
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
from lm_eval_moecache.records.files import exists, parse_json, read_gzip, read_json, write_whole
from lm_eval_moecache.records.numbers import nearest, shown
from lm_eval_moecache.records.schemas import check
from lm_eval_moecache.records.schemas.results import ResultsFile
from lm_eval_moecache.report.metrics import METRICS

logger = logging.getLogger(__name__)
PACKED = "runs.jsonl.gz"
RUNS = "runs"
Record = dict[str, Any]
# Of several metrics of a task the first of these is its accuracy; else the first it reports.
_PREFERRED = ("exact_match", "acc", "mc2", "f1", "word_perplexity", "rouge1_max", "bleu")
SPEED_FILTER = "speed"
_FACTS = ("config", "versions", "n-shot", "chat_template_sha", "system_instruction_sha")
# Records from before the means over requests had names of their own.
_NAMED_SINCE = {
    name: f"request_{name}"
    for name in ("tok_per_s", "hit_rate", "miss_rate", "collision_miss_rate")
}
_COMPARED = {
    *("policy", "phases", "capacity", "precision", "link", "warm", "draft", "draft_tokens"),
    *("store", "store_dir", "encoded_dir", "trace", "trace_keep", "label", *AXES),
}
"""Model arguments that runs are compared in (and axes' own: `eviction.NAME`)."""
RATES = (
    *("link_bytes_per_s", "link_latency_s", "peak_flops", "memory_bytes_per_s"),
    *("kernel_overhead_s", "layer_overhead_s", "host_flops", "host_memory_bytes_per_s"),
)
_SEEDS = ("random_seed", "numpy_seed", "torch_seed", "fewshot_seed")
_MODEL = ("model_revision", "model_sha", "model_num_parameters", "model_dtype")
_PROMPTS = (("chat_template", "apply_chat_template"), ("system_instruction", "system_instruction"))
_OPTIONS = ("limit", "fewshot_as_multiturn")
KEYS = (
    *("pretrained", *_MODEL, "tasks", "task_versions", "num_fewshot", "batch_size"),
    *("chat_template", "system_instruction", "gen_kwargs", *_OPTIONS, *_SEEDS, "seed", "clock"),
    *("scoring", "cache_reset", "hardware", "emulate", *RATES, "device"),
)
"""Every key but those that only a run's own model arguments have (`dtype`, `max_length` ...)."""


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
        return f"{self.metric},{self.filter}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One results file. `model_args` are as given; `moecache` is the resolved report."""

    path: Path
    run_id: str
    experiment: str
    label: str | None
    model: str
    tasks_given: tuple[str, ...]
    """Tasks and groups as asked for; empty for lm-eval's own files, which do not say."""
    model_args: Mapping[str, Any]
    options: Mapping[str, Any]
    moecache: Mapping[str, Any]
    results: Mapping[str, Mapping[str, Any]]
    higher_is_better: Mapping[str, Mapping[str, bool | None]]
    subtasks: Mapping[str, list[str]]
    samples: Mapping[str, Mapping[str, Mapping[str, Any]]]
    """Task -> `metric,filter` -> doc_id -> score; empty for lm-eval's own files."""
    speed: Mapping[str, Mapping[str, Mapping[str, float]]]
    """Task -> metric -> doc_id -> figure of that document; empty for records that keep none."""
    environment: Mapping[str, Any]
    """When, how long and on what machine; empty for lm-eval's own files."""
    facts: Mapping[str, Any]
    """What else lm-eval tells of it: `versions`, `n-shot`, `config`, `chat_template_sha` ..."""

    def scores(self, task: str) -> list[Score]:
        """Return the accuracy metrics of a task or group, in lm-eval's order."""
        figures, directions = self.results.get(task, {}), self.higher_is_better.get(task, {})
        found = []
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
                    higher_is_better=directions.get(metric) is not False,
                )
                found.append(score)
        return found

    def score(self, task: str) -> Score | None:
        """Return a task's primary metric under its first filter."""
        found = self.scores(task)
        preferred = (each for metric in _PREFERRED for each in found if each.metric == metric)
        return next(preferred, found[0] if found else None)

    @property
    def tasks(self) -> list[str]:
        """The leaf tasks, without groups."""
        return [name for name in self.results if name not in self.subtasks]

    @property
    def scored(self) -> list[str]:
        """What a table shows: groups that have a score of their own, else their tasks."""

        def below(name: str) -> list[str]:
            if self.score(name) is not None:
                return [name]
            return [leaf for child in self.subtasks.get(name, []) for leaf in below(child)]

        children = {name for names in self.subtasks.values() for name in names}
        return [n for root in self.results if root not in children for n in below(root)]


def identity(run: Run, tasks: Sequence[str] | None = None) -> dict[str, str]:
    """Return what changes a run's figures and is not what runs are compared in, as texts by name.

    Two runs are ranked, joined or drawn as one line only where their identities agree: the same
    documents, batch size, prompts, seeds and device. What a record leaves out is missing.
    `tasks` are those whose versions count; by default all, and then which they are counts, too.
    """
    facts, config = run.facts, run.facts.get("config", {})
    report, hardware, given = run.moecache, run.moecache["hardware"], run.model_args
    of_tasks = run.tasks if tasks is None else tasks
    found: dict[str, Any] = {
        "pretrained": given.get("pretrained", given.get("trace", "tiny")),
        **{key: config.get(key) for key in _MODEL},
        "tasks": "+".join(sorted(run.tasks)) if tasks is None else None,
        "task_versions": _by_task(facts.get("versions"), of_tasks),
        "num_fewshot": _by_task(facts.get("n-shot"), of_tasks),
        "batch_size": given.get("batch_size") or config.get("batch_size") or 1,
        **{
            # lm-eval's files keep a digest of a prompt's text.
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
        found["device"] = given.get("device", config.get("device"))
    others = {k: v for k, v in given.items() if k.partition(".")[0] not in _COMPARED}
    found |= {k: v for k, v in others.items() if k not in (*found, "bandwidth", "device")}
    return {key: _text(value) for key, value in found.items() if value not in (None, "")}


def _by_task(values: Any, tasks: Sequence[str]) -> str | None:
    """Return one value for all tasks, or `task=value` for each."""
    told = {task: _text(values[task]) for task in tasks if task in (values or {})}
    if len(set(told.values())) == 1:
        return next(iter(told.values()))
    return ", ".join(f"{task}={value}" for task, value in sorted(told.items())) or None


def _text(value: Any) -> str:
    """Return `40` for 40 and 40.0, and the text of anything else."""
    return str(int(value) if isinstance(value, float) and value.is_integer() else value)


def varying(runs: Sequence[Run]) -> list[str]:
    """Return the keys that tell these runs' identities apart, each only where it tells more."""
    identities = [identity(run) for run in runs]
    names = dict.fromkeys(key for each in identities for key in each)
    return telling(names, lambda keys: {tuple(each.get(n) for n in keys) for each in identities})


def telling(
    names: Iterable[str],
    places: Callable[[Sequence[str]], set[tuple[Any, ...]]],
    besides: Sequence[str] = (),
) -> list[str]:
    """Return those names, one after another, that tell more apart than `besides` and the earlier.

    `places` returns what the values of some names tell apart.
    """
    kept = list(besides)
    for name in names:
        if len(places([*kept, name])) > len(places(kept)):
            kept.append(name)
    return kept[len(besides) :]


def groups(runs: Sequence[Run]) -> list[list[int]]:
    """Return the places of the runs of each identity."""
    found: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for place, run in enumerate(runs):
        found.setdefault(tuple(sorted(identity(run).items())), []).append(place)
    return list(found.values())


def load_runs(place: Path) -> list[Run]:
    """Load every results JSON under a folder (or one file), in order of experiment and run id.

    A file of a folder that cannot be read is left out with a warning that names file and field;
    some other JSON is no run. Raises FileNotFoundError where there is no such place, ValueError
    where nothing is usable.
    """
    if not exists(place):
        raise FileNotFoundError(f"{str(place)!r}: there is no such file or folder.")
    single, runs = place.is_file(), []
    for path in [place] if single else sorted([*place.rglob("*.json"), *place.rglob(PACKED)]):
        try:
            packed = path.name == PACKED
            records = read_packed(path) if packed else [read_json(path, repr(str(path)))]
            runs += [run for each in records if (run := _run(each, path)) is not None]
        except ValueError as error:
            if single:
                raise
            logger.warning("left out: %s", error)
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
    found = check(ResultsFile, data, repr(str(path)))
    config, report = data["config"], data["config"]["moecache"]
    if found.configuration is not None:
        given = data["configuration"]
        options = {k: v for k, v in given.items() if k not in ("model", "model_args", "tasks")}
    else:
        # lm-eval's own file: what a user gave it, in the form of a sweep's `configuration`.
        given = {"model": "moecache", **config, "model_args": config.get("model_args") or {}}
        options = {"limit": config["limit"]} if config.get("limit") is not None else {}
        if isinstance(given["model_args"], str):
            pairs = (item.partition("=") for item in given["model_args"].split(",") if item)
            given["model_args"] = {key.strip(): value for key, _, value in pairs}
    scores: dict[str, dict[str, Any]] = {}
    speed: dict[str, dict[str, Any]] = {}
    for task, metrics in found.scores.items():
        for key, values in metrics.items():
            name = key.removesuffix(f",{SPEED_FILTER}")
            if name != key:
                speed.setdefault(task, {})[_NAMED_SINCE.get(name, name)] = values
            else:
                scores.setdefault(task, {})[key] = values
    return Run(
        path=path,
        run_id=found.run_id or path.stem,
        experiment=found.experiment or path.parent.name,
        label=found.label,
        model=str(given["model"]),
        tasks_given=() if found.configuration is None else tuple(found.configuration.tasks),
        model_args=dict(given["model_args"]),
        options=options,
        moecache=report,
        results=data["results"],
        higher_is_better={k: v or {} for k, v in found.higher_is_better.items()},
        subtasks={k: v for k, v in found.group_subtasks.items() if v},
        samples=scores,
        speed=speed,
        environment=data.get("environment", {}),
        facts={key: data[key] for key in _FACTS if isinstance(data.get(key), (str, dict))},
    )


def read_packed(path: Path) -> list[Record]:
    """Return the records of a packed file, in order. Raises ValueError naming file and line."""
    data = read_gzip(path, repr(str(path)))
    try:
        # Not splitlines: a text may hold what Unicode calls the end of a line.
        lines = data.decode().removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{str(path)!r} is no text in UTF-8: {error}") from error
    found = []
    for number, line in enumerate(lines, 1):
        record = parse_json(line, f"{str(path)!r}: line {number}")
        if not isinstance(record, dict) or not isinstance(record.get("run_id"), str):
            raise ValueError(f"{str(path)!r}: line {number} is no run: it has no `run_id`.")
        found.append(record)
    return found


def write_packed(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Write the records in order of run id: the same records give the same bytes."""
    ordered = sorted(records, key=lambda record: str(record["run_id"]))
    lines = (
        json.dumps(r, ensure_ascii=False, allow_nan=False, separators=(",", ":")) for r in ordered
    )
    text = "".join(f"{line}\n" for line in lines)
    write_whole(path, gzip.compress(text.encode(), compresslevel=9, mtime=0))


def pack(folder: Path) -> int:
    """Put every run of an experiment's folder into its packed file; return how many it holds.

    A run that is in both forms is taken from its own file, which is the newer. The files go only
    when the packed one has been read back and holds the same. Raises ValueError where a file of
    `runs/` is not readable or two packed runs have one id, and then changes nothing.
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
    """Write every packed run to its own file, and remove the packed one; return how many.

    A run that has a file already was run later, and that file is kept. Raises ValueError, and
    changes nothing, where a run would be lost: two of one id, or a file of that name that is not
    the run; and where an id would lead out of the folder.
    """
    source = folder / PACKED
    if not source.is_file():
        return 0
    records, waiting = _by_id(source), {}
    for name in records:
        # It becomes a file's name: what somebody else packed writes nowhere else.
        if set(name) & {"/", "\\", "\0"}:
            raise ValueError(f"{str(source)!r}: run_id={shown(name)} is no name of a file.")
        path = folder / RUNS / f"{name}.json"
        if path.exists():
            _own_record(path)
        else:
            waiting[name] = path
    for name, path in waiting.items():
        text = json.dumps(records[name], indent=1, ensure_ascii=False, allow_nan=False)
        write_whole(path, f"{text}\n")
        if _own_record(path) != records[name]:
            raise ValueError(f"{str(path)!r} does not hold what was written to it.")
    source.unlink()
    return len(records)


def _by_id(packed: Path) -> dict[str, Record]:
    records = read_packed(packed)
    counts = Counter(record["run_id"] for record in records)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise ValueError(
            f"{str(packed)!r} has several runs of one run_id, of which only one could be kept: "
            f"{', '.join(map(shown, twice))}."
        )
    return {record["run_id"]: record for record in records}


def _own_record(path: Path) -> Record:
    """Read `runs/<run-id>.json`. Raises ValueError where it is no file, broken, or another run."""
    if not path.is_file():
        raise ValueError(f"{str(path)!r} is no file, where the run of its name should be.")
    record = read_json(path, repr(str(path)))
    if not isinstance(record, dict) or record.get("run_id") != path.stem:
        raise ValueError(f"{str(path)!r} is not the run that its name says.")
    return record


# --- what a column is called, how it is read from a run, and which way is better ---

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

    def text(self, value: Value) -> str:
        """Return a cell as text: figures rounded to these decimals, `±` one standard error."""
        if value.raw is None:
            return ""
        if value.number is None:
            return str(value.raw)
        text = f"{value.number:.{self.decimals}f}"
        text = text if float(text) else text.removeprefix("-")
        return text if value.stderr is None else f"{text} ±{value.stderr:.{self.decimals}f}"


def find_column(runs: Sequence[Run], name: str) -> Column:
    """Return a column by name. Raises ValueError where no run has it."""
    if name == PARETO:
        return Column(PARETO, "Pareto")
    found = figure_column(runs, name)
    if found is not None:
        return found
    if is_setting(name, ()) or any(setting(run, name).raw is not None for run in runs):
        # An algorithm's parameter is headed as one types it: routing.M is no other key's name.
        heading = name if "." in name else name.replace("_", " ").capitalize()
        is_number = name == "capacity_bytes"
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


def selected(run: Run, where: Mapping[str, Any]) -> bool:
    """Whether a run has these settings; a list allows several values."""

    def has(name: str, wanted: Any) -> bool:
        found, values = setting(run, name), wanted if isinstance(wanted, list) else [wanted]
        return not {str(found.raw), found.identity}.isdisjoint(map(str, values))

    return all(has(name, wanted) for name, wanted in where.items())

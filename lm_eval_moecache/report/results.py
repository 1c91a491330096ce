"""Reads results JSONs - a sweep's records, or lm-eval's own files - into runs to compare.

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
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lm_eval_moecache.records.files import exists, parse_json, read_gzip, read_json, write_whole
from lm_eval_moecache.records.hardware import RENAMED
from lm_eval_moecache.records.numbers import shown
from lm_eval_moecache.records.schemas.base import check
from lm_eval_moecache.records.schemas.results import ResultsFile

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
        directions = self.higher_is_better.get(task, {})
        found = []
        for key, value in self.results.get(task, {}).items():
            metric, comma, filter_name = key.partition(",")
            if not comma or metric.endswith("_stderr") or filter_name == SPEED_FILTER:
                continue
            if not isinstance(value, (int, float)):
                continue
            stderr = self.results[task].get(f"{metric}_stderr,{filter_name}")
            found.append(
                Score(
                    metric=metric,
                    filter=filter_name,
                    value=float(value),
                    stderr=float(stderr) if isinstance(stderr, (int, float)) else None,
                    higher_is_better=directions.get(metric) is not False,
                )
            )
        return found

    def score(self, task: str) -> Score | None:
        """Return a task's primary metric under its first filter."""
        found = self.scores(task)
        for metric in _PREFERRED:
            for score in found:
                if score.metric == metric:
                    return score
        return found[0] if found else None

    @property
    def tasks(self) -> list[str]:
        """The leaf tasks, without groups."""
        return [name for name in self.results if name not in self.subtasks]

    @property
    def scored(self) -> list[str]:
        """What a table shows: groups that have a score of their own, else their tasks."""
        children = {name for names in self.subtasks.values() for name in names}
        return [n for root in self.results if root not in children for n in self._scored(root)]

    def _scored(self, name: str) -> Iterable[str]:
        if self.score(name) is not None:
            return [name]
        return [n for child in self.subtasks.get(name, []) for n in self._scored(child)]


def load_runs(place: Path) -> list[Run]:
    """Load every results JSON under a folder (or one file), in order of experiment and run id.

    A file of a folder that cannot be read is left out with a warning that names file and field.
    Raises FileNotFoundError where there is no such place, ValueError where nothing is usable.
    """
    if not exists(place):
        raise FileNotFoundError(f"{str(place)!r}: there is no such file or folder.")
    if place.is_file():
        runs = _load(place)
    else:
        paths = [*place.rglob("*.json"), *place.rglob(PACKED)]
        runs = [run for path in sorted(paths) for run in _load_or_tell(path)]
    if not runs:
        raise ValueError(
            f"{str(place)!r} holds no results of moecache runs: JSON files written by "
            "`moecache sweep`, or by `lm_eval run --model moecache --output_path`."
        )
    return sorted(runs, key=lambda run: (run.experiment, run.run_id, str(run.path)))


def _load_or_tell(path: Path) -> list[Run]:
    try:
        return _load(path)
    except ValueError as error:
        logger.warning("left out: %s", error)
        return []


def _load(path: Path) -> list[Run]:
    """Return the runs in a file; none where the file is some other JSON."""
    if path.name == PACKED:
        return [run for record in read_packed(path) if (run := _run(record, path))]
    run = _run(read_json(path, repr(str(path))), path)
    return [] if run is None else [run]


def _run(data: Any, path: Path) -> Run | None:
    if not isinstance(data, dict) or not isinstance(data.get("config"), dict):
        return None
    if "moecache" not in data["config"] or "results" not in data:
        return None
    found = check(ResultsFile, data, repr(str(path)))
    config, report = data["config"], data["config"]["moecache"]
    given = _given(config) if found.configuration is None else data["configuration"]
    options = {k: v for k, v in given.items() if k not in ("model", "model_args", "tasks")}
    return Run(
        path=path,
        run_id=found.run_id or path.stem,
        experiment=found.experiment or path.parent.name,
        label=found.label,
        model=str(given["model"]),
        tasks_given=tuple(given.get("tasks", ())),
        model_args=_renamed(given["model_args"], "hardware"),
        options=options,
        moecache={**report, "hardware": _renamed(report["hardware"], "name")},
        results=data["results"],
        higher_is_better={k: v or {} for k, v in found.higher_is_better.items()},
        subtasks={k: v for k, v in found.group_subtasks.items() if v},
        samples=_part(found.scores, speed=False),
        speed=_part(found.scores, speed=True),
        environment=data.get("environment", {}),
        facts={key: data[key] for key in _FACTS if isinstance(data.get(key), (str, dict))},
    )


def _part(scores: Mapping[str, Mapping[str, Any]], *, speed: bool) -> dict[str, dict[str, Any]]:
    """Return the scores of a record's documents, or their figures of speed (without the filter)."""
    end = f",{SPEED_FILTER}"
    found = {}
    for task, metrics in scores.items():
        kept = {key: values for key, values in metrics.items() if key.endswith(end) == speed}
        if speed:
            names = {key: key.removesuffix(end) for key in kept}
            kept = {_NAMED_SINCE.get(names[key], names[key]): kept[key] for key in kept}
        if kept:
            found[task] = kept
    return found


def _renamed(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the values with this hardware profile under the name that it has now."""
    found = dict(values)
    if isinstance(found.get(key), str):
        found[key] = RENAMED.get(found[key], found[key])
    return found


def _given(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a user gave to lm-eval, in the form of a sweep's `configuration`."""
    model_args = config.get("model_args") or {}
    if isinstance(model_args, str):
        pairs = (item.partition("=") for item in model_args.split(",") if item)
        model_args = {key.strip(): value for key, _, value in pairs}
    given = {"model": config.get("model", "moecache"), "model_args": model_args}
    return given | ({"limit": config["limit"]} if config.get("limit") is not None else {})


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
    records = _by_id(source)
    for name in records:
        # It becomes a file's name: what somebody else packed writes nowhere else.
        if set(name) & {"/", "\\", "\0"}:
            raise ValueError(f"{str(source)!r}: run_id={shown(name)} is no name of a file.")
    paths = {name: folder / RUNS / f"{name}.json" for name in records}
    for path in paths.values():
        if path.exists():
            _own_record(path)
    waiting = [name for name, path in paths.items() if not path.exists()]
    for name in waiting:
        text = json.dumps(records[name], indent=1, ensure_ascii=False, allow_nan=False)
        write_whole(paths[name], f"{text}\n".encode())
    for name in waiting:
        if _own_record(paths[name]) != records[name]:
            raise ValueError(f"{str(paths[name])!r} does not hold what was written to it.")
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

"""Reads results JSONs (a sweep's records, or lm-eval's own files) into runs.

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
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lm_eval_moecache.algorithms.registry import AXES
from lm_eval_moecache.records.files import (
    as_text,
    exists,
    lines_of,
    parse_json,
    read_gzip,
    read_json,
    write_whole,
)
from lm_eval_moecache.records.numbers import shown
from lm_eval_moecache.report.runs.run import SPEED_FILTER, Run
from lm_eval_moecache.report.runs.schema import check_record

logger = logging.getLogger(__name__)
PACKED = "runs.jsonl.gz"
RUNS = "runs"
Record = dict[str, Any]
# Those whose documents are pairs: log-likelihood, and words or bytes.
_PERPLEXITIES = ("word_perplexity", "byte_perplexity", "bits_per_byte")
_FACTS = (
    *("inputs", "config", "versions", "n-shot", "chat_template_sha", "system_instruction_sha"),
    *("date", "lm_eval_version"),
)
# Old records name means over requests like the pooled metrics: old name -> today's.
_NAMED_SINCE = {
    name: f"request_{name}"
    for name in ("tok_per_s", "hit_rate", "miss_rate", "collision_miss_rate")
}


def load_runs(place: str | Path) -> list[Run]:
    """Load every results JSON under a folder (or one file), in order of experiment and run id.

    In a folder, an unreadable file is skipped with a warning that names file and field, other JSON
    files silently. Raises FileNotFoundError where `place` does not exist, ValueError where it holds
    no run.
    """
    if not str(place):
        raise ValueError(
            "'' is not a path. Allowed: a folder of results (`.` for this one), or a file."
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
        model_args=_dotted(arguments),
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


def _dotted(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Spell the parameters of an axis given as a mapping by the dotted keys that give the same.

    Tables and plots read one argument a column, and could not tell mappings apart.
    """
    policy = arguments.get("policy")
    composed = {k: v for k, v in policy.items() if k in AXES} if isinstance(policy, dict) else {}
    flat: dict[str, Any] = {}
    for key, value in (composed | dict(arguments)).items():
        if key in AXES and isinstance(value, dict):
            inner = value.get("init_args")
            given = {**inner, **value} if isinstance(inner, dict) else value
            for name, each in given.items():
                if name == "init_args":
                    continue
                # A dotted key given beside the mapping overrides it.
                flat.setdefault(key if name in ("name", "class_path") else f"{key}.{name}", each)
        else:
            flat[key] = value
    return flat


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
    text = as_text(read_gzip(path, repr(str(path))), repr(str(path)))
    records = []
    for number, line in enumerate(lines_of(text), 1):
        record = parse_json(line, f"{str(path)!r}: line {number}")
        if not isinstance(record, dict) or not isinstance(record.get("run_id"), str):
            raise ValueError(f"{str(path)!r}: line {number} is not a run: it has no `run_id`.")
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
            raise ValueError(f"{str(source)!r}: run_id={shown(name)} is not a name of a file.")
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
        raise ValueError(f"{str(path)!r} is not a file, where the run of its name should be.")
    record = read_json(path, repr(str(path)))
    if not isinstance(record, dict) or record.get("run_id") != path.stem:
        raise ValueError(f"{str(path)!r} is not the run that its name says.")
    return record

"""Runs and where they lie: two tables an experiment, and the results JSONs they are made of.

    <experiment>/runs.parquet      a line a run: setting and figures, and its whole record as JSON
    <experiment>/samples.parquet   a line a run, task, document and metric
    <experiment>/runs/<run-id>.json    a run that a sweep has finished and not yet put into them

A sweep writes one file a run, so that a run appears whole or not at all, and puts them into the
tables when it ends. lm-eval's own results JSONs are read as they are.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lm_eval_moecache.algorithms.registry import AXES
from lm_eval_moecache.records.files import (
    MOST_JSON_BYTES,
    check_file,
    exists,
    read_json,
    write_whole,
)
from lm_eval_moecache.report.runs.columns import SAMPLE_COLUMNS, frame_row
from lm_eval_moecache.report.runs.run import SPEED_FILTER, Run
from lm_eval_moecache.report.runs.schema import check_record

logger = logging.getLogger(__name__)
TABLE, SAMPLES, RUNS = "runs.parquet", "samples.parquet", "runs"
Record = dict[str, Any]
# Those whose documents are pairs: log-likelihood, and words or bytes.
_PERPLEXITIES = ("word_perplexity", "byte_perplexity", "bits_per_byte")
_FACTS = (
    *("inputs", "config", "versions", "n-shot", "chat_template_sha", "system_instruction_sha"),
    *("date", "lm_eval_version"),
)


def load_runs(place: str | Path, slo: Mapping[str, float] | None = None) -> list[Run]:
    """Load every run under a folder (or in one file), in order of experiment and run id.

    `slo` are the limits that `goodput` counts (`answers.read_slo`).

    In a folder, an unreadable file is skipped with a warning that names file and field, other JSON
    files silently; of a run in both forms the JSON counts, the newer one. Raises FileNotFoundError
    where `place` does not exist, ValueError where it holds no run.
    """
    if not str(place):
        raise ValueError(
            "'' is not a path. Allowed: a folder of results (`.` for this one), or a file."
        )
    if not exists(place):
        raise FileNotFoundError(f"{str(place)!r}: there is no such file or folder.")
    place = Path(place)
    runs: dict[tuple[Path, str], Run] = {}
    # Tables first: a folder's JSONs replace what they hold.
    files = [place] if place.is_file() else [*place.rglob(TABLE), *sorted(place.rglob("*.json"))]
    for path in files:
        try:
            found = _runs_in(path)
        except ValueError as error:
            if place.is_file():
                raise
            logger.warning("skipping unreadable results file: %s", error)
            continue
        folder = path.parent.parent if path.parent.name == RUNS else path.parent
        runs |= {(folder, run.run_id): run for run in found}
    if not runs:
        raise ValueError(
            f"{str(place)!r} holds no results of moecache runs: files written by `moecache sweep`, "
            "or by `lm_eval run --model moecache --output_path`."
        )
    ordered = sorted(runs.values(), key=lambda run: (run.experiment, run.run_id, str(run.path)))
    return [replace(run, slo=slo) for run in ordered] if slo else ordered


def _runs_in(path: Path) -> list[Run]:
    if path.name != TABLE:
        run = _run(read_json(path, repr(str(path))), path)
        return [] if run is None else [run]
    runs = (
        _run(record, path, f"{str(path)!r}: row {row}")
        for row, record in enumerate(read_tables(path.parent), 1)
    )
    return [run for run in runs if run is not None]


def _run(data: Any, path: Path, where: str = "") -> Run | None:
    if not isinstance(data, dict) or not isinstance(data.get("config"), dict):
        return None
    if "moecache" not in data["config"] or "results" not in data:
        return None
    schema = check_record(data, where or repr(str(path)))
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
                speed.setdefault(task, {})[name] = values
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


# --- the two tables ---


def read_tables(folder: Path, *, samples: bool = True) -> list[Record]:
    """Return the records of a folder's tables, in order; with `samples` their documents' scores.

    Raises ValueError naming the file, and the row or column, that does not fit.
    """
    path = folder / TABLE
    if not path.is_file():
        return []
    table = _read(path, ("run_id", "record"))
    scores = _read_samples(folder / SAMPLES) if samples else {}
    records = []
    for row, (run_id, text) in enumerate(
        zip(*(table[name].to_pylist() for name in table.column_names), strict=True), 1
    ):
        what = f"{str(path)!r}: row {row}"
        try:
            record = json.loads(str(text))
        except ValueError as error:
            raise ValueError(f"{what} is not readable JSON: {error}") from None
        if not isinstance(record, dict) or record.get("run_id") != run_id:
            raise ValueError(f"{what} is not the run that its run_id={run_id!r} says.")
        records.append({**record, "scores": scores.get(run_id, {})} if samples else record)
    return records


def _read(path: Path, names: Collection[str]) -> Any:
    import pyarrow
    from pyarrow import parquet

    what = repr(str(path))
    check_file(path, what, MOST_JSON_BYTES)
    try:
        file = parquet.ParquetFile(path)
        groups = [file.metadata.row_group(i) for i in range(file.num_row_groups)]
        if sum(group.total_byte_size for group in groups) > MOST_JSON_BYTES:
            raise ValueError(f"holds more than the {MOST_JSON_BYTES} bytes that are read")
        if absent := [name for name in names if name not in file.schema_arrow.names]:
            raise ValueError(f"lacks the column {', '.join(map(repr, absent))}")
        return file.read([*names])
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise ValueError(f"{what} is not readable: {error}.") from None


def _read_samples(path: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Return run id -> task -> `metric,filter` -> document -> score, or [log-likelihood, words]."""
    frame = _read(path, SAMPLE_COLUMNS).to_pandas(strings_to_categorical=True)
    scores: dict[str, dict[str, dict[str, Any]]] = {}
    if frame.empty:
        return scores
    keys = [frame[name].cat for name in ("run_id", "task", "metric")]
    codes, names = [key.codes.to_numpy() for key in keys], [[*key.categories] for key in keys]
    starts = np.flatnonzero(sum((np.diff(code, prepend=-2) != 0) for code in codes))
    documents, values, words = (frame[name].to_numpy() for name in ("document", "value", "words"))
    for start, end in zip(starts, [*starts[1:], len(frame)], strict=True):
        run_id, task, metric = (text[code[start]] for text, code in zip(names, codes, strict=True))
        parts: list[Any] = values[start:end].tolist()
        if not np.isnan(words[start]):
            parts = [[*pair] for pair in zip(parts, words[start:end].tolist(), strict=True)]
        by_document = dict(zip(documents[start:end], parts, strict=True))
        scores.setdefault(run_id, {}).setdefault(task, {})[metric] = by_document
    return scores


def write_tables(folder: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Write the tables, in order of run id; equal records give equal bytes."""
    rows, samples = list[Record](), list[tuple[Any, ...]]()
    for record in sorted(records, key=lambda record: str(record["run_id"])):
        about = {key: value for key, value in record.items() if key != "scores"}
        run, run_id = _run(about, folder / TABLE), record["run_id"]
        text = json.dumps(about, allow_nan=False, separators=(",", ":"))
        rows.append({**(frame_row(run) if run else {}), "run_id": run_id, "record": text})
        for task, metrics in record.get("scores", {}).items():
            for metric, scores in metrics.items():
                for document, score in scores.items():
                    value, words = score if isinstance(score, list) else (score, None)
                    samples.append((run_id, task, document, metric, float(value), words))
    columns = zip(*samples, strict=True) if samples else [()] * len(SAMPLE_COLUMNS)
    _write(folder / SAMPLES, dict(zip(SAMPLE_COLUMNS, columns, strict=True)))
    names = dict.fromkeys(name for row in rows for name in row)
    _write(folder / TABLE, {name: [row.get(name) for row in rows] for name in names})


def _write(path: Path, columns: Mapping[str, Sequence[Any]]) -> None:
    import pyarrow
    from pyarrow import parquet

    kinds = dict.fromkeys(SAMPLE_COLUMNS, pyarrow.string())
    kinds |= dict.fromkeys(SAMPLE_COLUMNS[-2:], pyarrow.float64())
    data = {name: pyarrow.array(cells, kinds.get(name)) for name, cells in columns.items()}
    image = io.BytesIO()
    parquet.write_table(pyarrow.table(data), image, compression="zstd", compression_level=9)
    write_whole(path, image.getvalue())


def cells(folder: Path) -> Iterator[tuple[Path, Record]]:
    """Yield the runs that are not in the tables yet: file, record. Warns of files that are none."""
    for path in sorted((folder / RUNS).glob("*.json")):
        try:
            record = read_json(path, str(path))
            check_record(record, str(path))
            if record.get("run_id") != path.stem:
                raise ValueError(f"{path} is not the run that its name says")
        except ValueError as error:
            logger.warning("no finished run: %s", error)
            continue
        yield path, record


def fold(folder: Path, without: Collection[str] = ()) -> None:
    """Put the finished runs into the tables, and leave out those of the ids `without`.

    The JSONs are removed after the tables are written: a kill loses nothing.
    """
    new = dict(cells(folder))
    old = {record["run_id"]: record for record in read_tables(folder)} if new or without else {}
    records = old | {record["run_id"]: record for record in new.values()}
    if new or old.keys() & set(without):
        write_tables(folder, (r for name, r in records.items() if name not in without))
    for path in new:
        path.unlink()
    with contextlib.suppress(OSError):
        (folder / RUNS).rmdir()

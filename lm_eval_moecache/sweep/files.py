"""The files of an experiment's folder: written whole or not at all, and looked up by hash.

<experiment>/sweep.yaml
<experiment>/runs/<run-id>.json       one finished run
<experiment>/runs.jsonl.gz            or all of them, after `moecache pack`
<experiment>/failed/<run-id>.txt      why a run failed; removed when it succeeds
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from lm_eval_moecache.records.files import (
    PART,
    check_replaceable,
    check_writable,
    parse_json,
    read_json,
    write_whole,
)
from lm_eval_moecache.records.numbers import finite
from lm_eval_moecache.report.runs.files import PACKED, RUNS, read_packed, unpack
from lm_eval_moecache.report.runs.schema import check_record

if TYPE_CHECKING:
    from lm_eval_moecache.sweep.identity import ResolvedCell

logger = logging.getLogger(__name__)
FAILED, TRACES = "failed", "traces"
LOCK = ".sweep.lock"


def write_record(folder: Path, record: Mapping[str, Any]) -> Path:
    """Write a finished run, whole or not at all; remove its earlier failure.

    Returns the path.
    """
    path = folder / RUNS / f"{record['run_id']}.json"
    # `default`: lm-eval's own config holds a torch.dtype.
    plain = parse_json(json.dumps(finite(record), default=str, allow_nan=False), str(path))
    text = json.dumps(plain, indent=1, ensure_ascii=False)
    write_whole(path, text + "\n")
    (folder / FAILED / f"{record['run_id']}.txt").unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        (folder / FAILED).rmdir()
    return path


def write_failure(folder: Path, run_id: str, text: str) -> None:
    """Write why a run failed: its traceback and output."""
    write_whole(folder / FAILED / f"{run_id}.txt", text)


def finished(folder: Path) -> dict[str, dict[str, Any]]:
    """Return configuration hash -> what identifies a finished run, without its scores and metrics.

    Packed runs count. An invalid file is skipped with a warning: its cell runs again.
    """
    packed = folder / PACKED
    records = read_packed(packed) if packed.is_file() else []
    for record in records:
        check_record(record, str(packed))
    by_hash = {str(record.get("configuration_hash")): _about(record) for record in records}
    for path in sorted((folder / RUNS).glob("*.json")):
        try:
            record = read_json(path, str(path))
            check_record(record, str(path))
        except ValueError as error:
            logger.warning("no finished run: %s", error)
            continue
        if record.get("run_id") != path.stem:
            logger.warning("no finished run: %s is not the run that its name says", path)
            continue
        if record.get("configuration_hash") is not None:
            by_hash[record["configuration_hash"]] = _about(record)
    return by_hash


def _about(record: Mapping[str, Any]) -> dict[str, Any]:
    # Without scores and metrics, most of a record's size.
    kept = ("run_id", "label", "configuration", "sources", "inputs", "environment")
    return {key: record.get(key) for key in kept}


def unedited(
    done: Mapping[str, dict[str, Any]], planned: Iterable[ResolvedCell]
) -> dict[str, dict[str, Any]]:
    """Leave out the finished runs whose algorithms, weights, artefacts or tasks changed since.

    Records that did not note them count as finished.
    """
    current = dict(done)
    for cell in planned:
        record = current.get(cell.configuration_hash)
        if record is not None and any(
            record[key] not in (None, getattr(cell, key)) for key in ("sources", "inputs")
        ):
            del current[cell.configuration_hash]
    return current


def former_ids(folder: Path, planned: Iterable[ResolvedCell]) -> dict[str, list[str]]:
    """Return run id -> ids of the finished runs that this run will replace.

    Those of its configuration under a former id, and those of the same settings whose files
    (a trace, a policy, a profile) held something else.
    """
    done, planned = finished(folder), list(planned)
    current = {cell.configuration_hash for cell in planned}
    by_settings: dict[str, list[str]] = {}
    for digest, record in done.items():
        if digest not in current:
            by_settings.setdefault(_settings(record["configuration"]), []).append(record["run_id"])
    ids = {}
    for cell in planned:
        same = done.get(cell.configuration_hash)
        former = [] if same is None else [same["run_id"]]
        former += by_settings.get(_settings(cell.settings), [])
        ids[cell.run_id] = [run_id for run_id in former if run_id != cell.run_id]
    return ids


def _settings(configuration: Any) -> str:
    return json.dumps(configuration, sort_keys=True, default=str)


@contextlib.contextmanager
def only_sweep(folder: Path) -> Iterator[None]:
    """Lock the folder against a second sweep; the lock ends with the process, however it dies.

    A killed sweep leaves the lock file behind, which the next one takes over. Packed runs are
    unpacked: a sweep changes runs one by one. Raises ValueError where another sweep holds the lock,
    OSError where the folder is not writable.
    """
    runs = folder / RUNS
    runs.mkdir(parents=True, exist_ok=True)
    check_writable(runs)
    path = folder / LOCK
    check_replaceable(path)
    lock = FileLock(path, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise ValueError(f"another sweep is at work in {str(folder)!r}.") from None
    try:
        _remove_leftovers(folder)
        unpack(folder)
        yield
    finally:
        _remove_leftovers(folder)
        with contextlib.suppress(OSError):  # Windows does not remove open files
            path.unlink()
        lock.release()


def _remove_leftovers(folder: Path) -> None:
    """Remove the partial files of killed sweeps and interrupted workers."""
    for part in (RUNS, FAILED, TRACES):
        for leftover in (folder / part).glob(f".*{PART}"):
            shutil.rmtree(leftover, ignore_errors=True)  # a recording is a folder; others are files
            with contextlib.suppress(OSError):
                leftover.unlink()

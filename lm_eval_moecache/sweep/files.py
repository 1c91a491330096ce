"""The files of an experiment's folder: written whole or not at all, and looked up by hash.

<experiment>/sweep.yaml
<experiment>/runs/<run-id>.json       a run that has finished, until the sweep ends
<experiment>/runs.parquet             the finished runs, with samples.parquet (`report.runs.files`)
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
    write_whole,
)
from lm_eval_moecache.records.numbers import finite
from lm_eval_moecache.report.runs.files import RUNS, TABLE, cells, fold, read_tables
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
    text = json.dumps(finite(record), default=str, allow_nan=False, indent=1, ensure_ascii=False)
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

    An invalid file is skipped with a warning: its cell runs again.
    """
    return {r["configuration_hash"]: r for r in _heads(folder) if r["configuration_hash"]}


def _heads(folder: Path) -> list[dict[str, Any]]:
    by_id = {record["run_id"]: record for record in read_tables(folder, samples=False)}
    for record in by_id.values():
        check_record(record, f"{folder / TABLE}: {record['run_id']}")
    by_id |= {record["run_id"]: record for _, record in cells(folder)}
    # Without scores and metrics, most of a record's size.
    kept = ("run_id", "label", "configuration", "configuration_hash", "sources", "inputs")
    return [{key: record.get(key) for key in (*kept, "environment")} for record in by_id.values()]


def relabel(folder: Path, labels: Mapping[str, str | None]) -> None:
    """Write new labels into finished runs: run id -> label."""
    found = {r["run_id"]: r for r in read_tables(folder)} if labels else {}
    found |= {record["run_id"]: record for _, record in cells(folder)}
    for run_id, label in labels.items():
        write_record(folder, {**found[run_id], "label": label})


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


def replaced_ids(folder: Path, planned: Iterable[ResolvedCell]) -> set[str]:
    """Return the ids of finished runs that one of these cells, which has run, replaces.

    Those of its configuration under a former id, and those of the same settings whose files
    (a trace, a policy, a profile) held something else.
    """
    heads, planned = _heads(folder), list(planned)
    ids, current = {r["run_id"] for r in heads}, {cell.configuration_hash for cell in planned}
    done = [cell for cell in planned if cell.run_id in ids]
    own = {cell.run_id: (cell.configuration_hash, _settings(cell.settings)) for cell in done}
    digests, settings = ({pair[i] for pair in own.values()} for i in (0, 1))
    return {
        record["run_id"]
        for record in heads
        if record["run_id"] not in own
        if (digest := record["configuration_hash"]) in digests
        or (digest not in current and _settings(record["configuration"]) in settings)
    }


def _settings(configuration: Any) -> str:
    return json.dumps(configuration, sort_keys=True, default=str)


@contextlib.contextmanager
def only_sweep(folder: Path) -> Iterator[set[str]]:
    """Lock the folder against a second sweep; the lock ends with the process, however it dies.

    A killed sweep leaves the lock file behind, which the next one takes over. At the end finished
    runs are put into the folder's tables, without those of the ids that the block adds to the set
    it is given. Raises ValueError where another sweep holds the lock, OSError where the folder is
    not writable.
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
    without: set[str] = set()
    try:
        _remove_leftovers(folder)
        yield without
    finally:
        _remove_leftovers(folder)
        try:
            fold(folder, without)
        except (OSError, ValueError) as error:  # a full disk: the runs are still files
            logger.warning("the runs stay in %s: %s", runs, error)
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

"""The files of an experiment's folder: results appear whole or not at all, and are found by hash.

<experiment>/sweep.yaml
<experiment>/runs/<run-id>.json       one finished run
<experiment>/failed/<run-id>.txt      why a run failed; removed when it succeeds
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

RUNS, FAILED = "runs", "failed"
_TEMPORARY = ".part"


def write_atomically(path: Path, text: str) -> None:
    """Write beside `path`, then rename: a reader, or a kill, sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}{_TEMPORARY}")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def write_record(folder: Path, record: Mapping[str, Any]) -> Path:
    path = folder / RUNS / f"{record['run_id']}.json"
    # `default`: lm-eval's own facts hold a torch.dtype.
    text = json.dumps(record, indent=1, ensure_ascii=False, default=str)
    write_atomically(path, text + "\n")
    (folder / FAILED / f"{record['run_id']}.txt").unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        (folder / FAILED).rmdir()
    return path


def write_failure(folder: Path, run_id: str, text: str) -> None:
    write_atomically(folder / FAILED / f"{run_id}.txt", text)


def finished(folder: Path) -> dict[str, Path]:
    """Return configuration hash -> file of every finished run. Raises ValueError if unreadable."""
    found: dict[str, Path] = {}
    for path in sorted((folder / RUNS).glob("*.json")):
        try:
            found.setdefault(json.loads(path.read_text())["configuration_hash"], path)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} is not a run of this sweep ({error!r}). Move it away, or repair it."
            ) from error
    return found


@contextlib.contextmanager
def only_sweep(folder: Path) -> Iterator[None]:
    """Hold the folder against a second sweep; the lock goes with the process, however it ends."""
    runs = folder / RUNS
    runs.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        try:
            import fcntl
        except ImportError:  # Windows has no flock: there the user has to take care.
            pass
        else:
            # The folder itself is locked, so that no lock file is left to be committed.
            handle = os.open(runs, os.O_RDONLY)
            stack.callback(os.close, handle)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ValueError(f"another sweep is at work in {str(folder)!r}.") from None
        for leftover in runs.glob(f".*{_TEMPORARY}"):
            leftover.unlink()
        yield

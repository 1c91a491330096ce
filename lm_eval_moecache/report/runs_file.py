"""All runs of an experiment in one compressed file: `runs.jsonl.gz`, one record a line.

A sweep writes `runs/<run-id>.json`, one file a run, so that each appears whole or not at all;
`moecache pack` puts them into one file, `table`, `plot` and `compare` read both forms, and a sweep
that goes on unpacks again. In pandas: `pd.read_json("runs.jsonl.gz", lines=True)`.
"""

from __future__ import annotations

import contextlib
import gzip
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lm_eval_moecache.records.files import parse_json, read_gzip, read_json, write_whole
from lm_eval_moecache.records.numbers import shown

PACKED = "runs.jsonl.gz"
RUNS = "runs"
Record = dict[str, Any]


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
    `runs/` is not readable, and then changes nothing.
    """
    target = folder / PACKED
    files = sorted((folder / RUNS).glob("*.json"))
    records = {r["run_id"]: r for r in (read_packed(target) if target.is_file() else [])}
    for path in files:
        record = read_json(path, repr(str(path)))
        if not isinstance(record, dict) or record.get("run_id") != path.stem:
            raise ValueError(f"{str(path)!r} is not the run that its name says.")
        records[path.stem] = record
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

    Raises ValueError, and writes nothing, where a run's id would lead out of the folder.
    """
    source = folder / PACKED
    if not source.is_file():
        return 0
    records = read_packed(source)
    for record in records:
        # It becomes a file's name: what somebody else packed writes nowhere else.
        if set(record["run_id"]) & {"/", "\\", "\0"}:
            raise ValueError(
                f"{str(source)!r}: run_id={shown(record['run_id'])} is no name of a file."
            )
    for record in records:
        path = folder / RUNS / f"{record['run_id']}.json"
        # What has a file of its own was run later.
        if not path.exists():
            text = json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False)
            write_whole(path, f"{text}\n".encode())
    source.unlink()
    return len(records)

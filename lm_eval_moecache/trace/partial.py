"""A recording that is not finished: an Arrow stream beside the trace it will become.

A stream needs no ending to be read, so that what a killed run has recorded is there up to its last
finished request. Batches are marked: those up to the last mark belong to finished requests.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from lm_eval_moecache.records.files import lock
from lm_eval_moecache.trace.header import HEADER_KEY, Settled, check_seal, sealed, write_settled

logger = logging.getLogger(__name__)
SUFFIX = ".partial"
_KEPT, _DRAFTS = b"kept", b"drafts"
ROW_GROUP = 32768
FRESH_S = 10
"""An empty stream may be one that its run is about to lock: for so long it is left alone."""
MOST_STEM = 100
"""File systems hold names of 255 bytes."""
_LEVEL = 9
"""Of zstd: beyond it the last percent costs more than all before."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What of a stream belongs to finished requests: its first batches."""

    schema: Any
    num_batches: int
    metadata: Mapping[bytes, bytes]
    """What the trace's metadata says beside the schema's."""


class WholeWrites(io.FileIO):
    """A new file whose writes are whole, or fail.

    Arrow does not look at how much was written, and a part is what a disk that is nearly full, a
    quota or a network's file system may take: the stream would go on behind a gap.
    """

    def write(self, data: Any) -> int:
        left = whole = memoryview(data).cast("B")
        while left:
            left = left[os.write(self.fileno(), left) :]
        return len(whole)


def mark(scans: Sequence[tuple[int, int]], drafts: Settled = ()) -> dict[bytes, bytes]:
    """Return what a batch says that ends a finished request.

    `scans` and `drafts` (pass, drafted, accepted) are new since the last mark.
    """
    told = {_KEPT: json.dumps(list(scans)).encode()}
    return {**told, _DRAFTS: json.dumps(list(drafts)).encode()} if drafts else told


def kept_batches(path: Path) -> Kept:
    """Find what of a stream belongs to finished requests. The last batch may be torn.

    Raises ValueError where not even the schema can be read.
    """
    kept = 0
    scans: list[tuple[int, int]] = []
    drafts: list[tuple[int, int, int]] = []
    try:
        with pa.ipc.open_stream(path) as reader:
            for number, (_, told) in enumerate(_batches(reader), start=1):
                said = {} if told is None else dict(told.items())
                if _KEPT in said:
                    kept = number
                    scans += [(first, count) for first, count in json.loads(said[_KEPT])]
                    drafts += [(p, d, a) for p, d, a in json.loads(said.get(_DRAFTS, b"[]"))]
            if HEADER_KEY in (reader.schema.metadata or {}):
                check_seal(path.name, reader.schema.metadata, reader.schema, num_rows=0)
            return Kept(reader.schema, kept, write_settled(scans, drafts))
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path.name} holds no recording that can be read: {error}.") from error


def read_partial(path: Path) -> Any:
    """Return what is kept of an unfinished recording as a table, its metadata included."""
    kept = kept_batches(path)
    with pa.ipc.open_stream(path) as reader:
        pairs = zip(_batches(reader), range(kept.num_batches), strict=False)
        table = pa.Table.from_batches([batch for (batch, _), _ in pairs], kept.schema)
    return table.replace_schema_metadata({**(kept.schema.metadata or {}), **kept.metadata})


def write_parquet(
    partial: Path, target: Path, num_batches: int, extra: Mapping[bytes, bytes]
) -> None:
    """Write the first batches of a stream as a trace that appears whole, under its name."""
    with pa.ipc.open_stream(partial) as reader:
        num_rows = sum(len(batch) for batch, _ in islice(_batches(reader), num_batches))
        told = sealed({**reader.schema.metadata, **extra}, reader.schema, num_rows)
        schema = reader.schema.with_metadata(told)
    encodings = dict.fromkeys(("request", "pass", "token", "layer"), "DELTA_BINARY_PACKED")
    for field in schema:
        if pa.types.is_list(field.type):
            # Streams of first, second, ... bytes: those of small numbers vanish.
            encodings[f"{field.name}.list.element"] = "BYTE_STREAM_SPLIT"
    writing = target.with_name(f".{target.name}.writing")
    try:
        with (
            pa.ipc.open_stream(partial) as reader,
            pq.ParquetWriter(
                writing,
                schema,
                compression="zstd",
                compression_level=_LEVEL,
                write_page_checksum=True,
                use_dictionary=["phase"],
                column_encoding=encodings,
            ) as file,
        ):
            for batches in _groups(batch for batch, _ in islice(_batches(reader), num_batches)):
                table = pa.Table.from_batches(batches).combine_chunks()
                file.write_table(table.replace_schema_metadata(told))
        os.replace(writing, target)
    except BaseException:
        writing.unlink(missing_ok=True)
        raise


def _groups(batches: Iterable[Any]) -> Iterator[list[Any]]:
    """Yield batches together that make a row group."""
    group: list[Any] = []
    for batch in batches:
        group.append(batch)
        if sum(map(len, group)) >= ROW_GROUP:
            yield group
            group = []
    if group:
        yield group


def reserve(folder: Path, stem: str) -> tuple[Path, Any]:
    """Return the name of the next trace, and its stream's open file: no two runs get the same."""
    number = 0
    while True:
        target = folder / f"{stem[:MOST_STEM]}-{number:03d}.parquet"
        number += 1
        if target.exists():
            continue
        with contextlib.suppress(FileExistsError):
            raw = WholeWrites(target.with_name(f"{target.name}{SUFFIX}"), "xb")
            lock(raw.fileno())
            if not target.exists():
                return target, raw
            # Another run has finished this one since: it removes its stream last.
            Path(raw.name).unlink()
            raw.close()


def recover(folder: Path) -> list[Path]:
    """Finish what dead runs have left in a folder of traces; return the traces it became.

    A recording that is still going on holds a lock on its stream and is left alone.
    """
    found = []
    for partial in sorted(folder.glob(f"*{SUFFIX}")):
        # It may be gone by now, finished by its own run.
        with contextlib.suppress(FileNotFoundError), partial.open("rb") as held:
            age = time.time() - partial.stat().st_mtime
            is_new = not partial.stat().st_size and age < FRESH_S
            if is_new or not lock(held.fileno()) or not partial.exists():
                continue
            target = partial.with_name(partial.name.removesuffix(SUFFIX))
            try:
                kept = kept_batches(partial)
            except ValueError:
                kept = Kept(None, 0, {})
            if not kept.num_batches:
                told = "trace: removed %s, of a run that was killed before a request."
                logger.warning(told, partial)
            elif not target.exists():
                write_parquet(partial, target, kept.num_batches, kept.metadata)
                logger.warning("trace: %s is what a run that was killed had finished.", target)
            partial.unlink()
            found += [target] if kept.num_batches else []
    return found


def _batches(reader: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the whole batches with their marks, up to the end or to what is torn."""
    while True:
        try:
            yield reader.read_next_batch_with_custom_metadata()
        except (StopIteration, pa.ArrowException, OSError):
            return

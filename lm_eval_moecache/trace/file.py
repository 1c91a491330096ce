"""Routing traces as Parquet files, read whole or a part after another; a reader repairs nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq

from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.trace.drafting import Drafted
from lm_eval_moecache.trace.header import (
    REQUESTS_KEY,
    Header,
    check_seal,
    read_drafts,
    read_header,
    read_requests,
    read_scans,
)
from lm_eval_moecache.trace.partial import SUFFIX, read_partial
from lm_eval_moecache.trace.rows import check_schema, columns_of, trace_of
from lm_eval_moecache.trace.trace import Trace, TracedRequest

WHOLE_ROWS = 1 << 18
"""A trace of no more rows is read at once, and kept."""
PART_ROWS = 1 << 17


def read_trace(path: Path, *, logits: bool = False, predicted: bool = False) -> Trace:
    """Read and check a trace. The two large columns are read only where asked for.

    Raises ValueError that names the row and the field of whatever does not fit the format; a
    trace that lacks an asked optional column has None in its place.
    """
    name, is_whole = path.name, path.suffix != SUFFIX
    read = _read_whole(path, logits, predicted) if is_whole else _read_stream(path)
    table, metadata, schema = read
    header = read_header(name, metadata)
    num_passes = (pa.compute.max(table["pass"]).as_py() or 0) + 1
    settled = read_drafts(name, metadata, num_passes)
    requests = read_requests(name, metadata, num_passes)
    trace = trace_of(name, table, header, settled, requests)
    if is_whole:
        check_seal(name, metadata, schema, len(table))
    return dataclasses.replace(trace, scans=read_scans(name, metadata, num_passes))


Read = tuple[Any, Mapping[bytes, bytes], Any]
"""The table, its metadata, and the whole file's schema."""


def _read_whole(path: Path, logits: bool, predicted: bool) -> Read:
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            schema = file.schema_arrow
            check_schema(path.name, schema)
            table = file.read(columns=columns_of(schema, logits, predicted), use_threads=False)
            table.validate(full=True)
            return table.combine_chunks(), file.metadata.metadata or {}, schema
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise _unreadable(path.name, error) from error


def _read_stream(path: Path) -> Read:
    """Read what a killed run had finished."""
    try:
        table = read_partial(path)
        check_schema(path.name, table.schema)
        table.validate(full=True)
        return table.combine_chunks(), table.schema.metadata or {}, table.schema
    except ValueError as error:
        raise ValueError(f"trace {path.name}: {error}") from error
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"trace {path.name} is not a readable stream: {error}.") from error


def _unreadable(name: str, error: Exception) -> ValueError:
    """Build the error for a file that is no Parquet file, or a damaged one."""
    reason = str(error).split("\n")[0].rstrip(".")
    return ValueError(f"trace {name} is not a readable Parquet file: {reason}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamedTrace:
    """What a replay asks of a trace, without its rows: `parts` reads and checks them.

    Memory holds one part of about PART_ROWS rows, and more only where a single pass or scanned
    text is longer. What knows the future (`Future`) needs the whole trace.
    """

    path: Path
    name: str
    header: Header
    requests: tuple[TracedRequest, ...]
    num_passes: int
    scans: tuple[tuple[int, int], ...]
    drafted: Drafted
    columns: tuple[str, ...]
    has_sizes: bool = True

    @property
    def geometry(self) -> Geometry:
        return self.header.geometry

    @property
    def seed(self) -> int:
        return self.header.seed

    def parts(self) -> Iterator[Trace]:
        """Read the trace from its beginning; ValueError as `read_trace` raises it."""
        first_pass = 0
        for table in self._tables():
            try:
                part = trace_of(self.name, table, self.header, self.drafted.settled, (), first_pass)
            except ValueError:
                # Rows are named by their place in the file, which who reads a part does not know.
                read_trace(self.path, logits=True, predicted=True)
                raise
            end = first_pass + part.num_passes
            scans = [(f - first_pass, n) for f, n in self.scans if first_pass <= f < end]
            yield dataclasses.replace(part, scans=tuple(scans))
            first_pass = end

    def _tables(self) -> Iterator[Any]:
        """Yield the rows in tables that end with a pass, and with the last one of a scan."""
        rest: list[Any] = []
        starts = np.asarray([first for first, _ in self.scans], dtype=np.int64)
        try:
            with pq.ParquetFile(self.path, page_checksum_verification=True) as file:
                for batch in file.iter_batches(PART_ROWS, columns=self.columns, use_threads=False):
                    table = pa.Table.from_batches([*rest, batch])
                    table.validate(full=True)
                    passes = table["pass"].to_numpy()
                    begin = int(passes[-1])
                    scan = int(np.searchsorted(starts, begin, side="right")) - 1
                    if scan >= 0 and begin < sum(self.scans[scan]):
                        begin = self.scans[scan][0]
                    cut = int(np.searchsorted(passes, begin))
                    if cut:
                        yield table.slice(0, cut)
                    rest = table.slice(cut).combine_chunks().to_batches()
        except (pa.ArrowException, OSError) as error:
            raise _unreadable(self.name, error) from error
        yield pa.Table.from_batches(rest)


def open_trace(
    path: Path, *, logits: bool = False, predicted: bool = False
) -> Trace | StreamedTrace:
    """Read a trace that is small, or one that does not say its requests; open a larger one.

    Raises ValueError as `read_trace`: of a trace that is opened its rows are checked by `parts`.
    """
    name = path.name
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            metadata, schema = file.metadata.metadata or {}, file.schema_arrow
            num_rows = file.metadata.num_rows
            is_small = num_rows <= WHOLE_ROWS or REQUESTS_KEY not in metadata
            if not is_small:
                check_schema(name, schema)
                last = file.read_row_group(file.num_row_groups - 1, columns=["pass"])["pass"]
                num_passes = last[-1].as_py() + 1
    except (pa.ArrowException, OSError, TypeError) as error:
        raise _unreadable(name, error) from error
    if is_small:
        return read_trace(path, logits=logits, predicted=predicted)
    header = read_header(name, metadata)
    check_seal(name, metadata, schema, num_rows)
    settled = read_drafts(name, metadata, num_passes)
    return StreamedTrace(
        path=path,
        name=name,
        header=header,
        requests=read_requests(name, metadata, num_passes) or (),
        num_passes=num_passes,
        scans=read_scans(name, metadata, num_passes),
        drafted=Drafted(draft=header.draft, ranked=header.ranked, settled=settled),
        columns=tuple(columns_of(schema, logits, predicted)),
    )

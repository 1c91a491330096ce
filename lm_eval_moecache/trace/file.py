"""Routing traces as Parquet files, read and checked; a reader repairs nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from lm_eval_moecache.trace.header import (
    check_seal,
    read_drafts,
    read_header,
    read_requests,
    read_scans,
)
from lm_eval_moecache.trace.partial import SUFFIX, read_partial
from lm_eval_moecache.trace.rows import check_schema, columns_of, numbers, trace_of, unreadable
from lm_eval_moecache.trace.trace import Trace


def read_trace(path: Path, *, logits: bool = False, predicted: bool = False) -> Trace:
    """Read and check a trace. The two large columns are read only where asked for.

    Raises ValueError that names the row and the field of whatever does not fit the format; a
    trace that lacks an asked optional column has None in its place.
    """
    name = path.name
    table, metadata, schema = _read_table(path, name, logits, predicted)
    header = read_header(name, metadata)
    num_passes = int(numbers(name, table, "pass").max(initial=-1)) + 1
    settled = read_drafts(name, metadata, num_passes)
    requests = read_requests(name, metadata, num_passes)
    trace = trace_of(name, table, header, settled, requests)
    if path.suffix != SUFFIX:
        assert metadata is not None, "a header has been read"
        check_seal(name, metadata, schema, len(table))
    return dataclasses.replace(trace, scans=read_scans(name, metadata, num_passes))


def _read_table(
    path: Path, name: str, logits: bool, predicted: bool
) -> tuple[Any, Mapping[bytes, bytes] | None, Any]:
    if path.suffix == SUFFIX:
        return _read_stream(path, name)
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            schema = file.schema_arrow
            check_schema(name, schema)
            table = file.read(columns=columns_of(schema, logits, predicted), use_threads=False)
            table.validate(full=True)
            return table.combine_chunks(), file.metadata.metadata, schema
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise unreadable(name, error) from error


def _read_stream(path: Path, name: str) -> tuple[Any, Mapping[bytes, bytes] | None, Any]:
    """Read what a killed run had finished."""
    try:
        table = read_partial(path)
        check_schema(name, table.schema)
        table.validate(full=True)
        return table.combine_chunks(), table.schema.metadata, table.schema
    except ValueError as error:
        raise ValueError(f"trace {name}: {error}") from error
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"trace {name} is not a readable stream: {error}.") from error

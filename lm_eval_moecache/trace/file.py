"""Routing traces on disk: Parquet files, read whole or a part after another, and their streams.

A trace is recorded into an Arrow stream beside the file it will become (`writer`). A stream needs
no ending to be read, so that what a killed run has recorded is there up to its last finished
request: batches are marked, and those up to the last mark belong to finished requests.

A reader repairs nothing: what does not fit is a ValueError that names the row and the field.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq

from lm_eval_moecache.records.arrays import BoolArray, IntArray
from lm_eval_moecache.records.event import DECODE, PHASES
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.trace.header import (
    REQUESTS_KEY,
    Header,
    check_seal,
    read_drafts,
    read_header,
    read_requests,
    read_scans,
    write_settled,
)
from lm_eval_moecache.trace.trace import (
    DRAFT_COLUMNS,
    Columns,
    Drafted,
    Halves,
    Ints,
    Lists,
    Predicted,
    Proposed,
    Trace,
    TracedRequest,
    build_trace,
    misfit,
)

SUFFIX = ".partial"
"""Of a stream; what is before it is the name of the trace that it becomes."""
WHOLE_ROWS = 1 << 18
"""A trace of no more rows is read at once, and kept."""
PART_ROWS = 1 << 17
SCANS_MARK, DRAFTS_MARK = b"kept", b"drafts"
"""Metadata of a batch that ends a finished request: its scans and drafts since the last such."""
COLUMNS = {
    "request": pa.int32(),
    "pass": pa.int32(),
    "phase": pa.string(),
    "token": pa.int32(),
    "layer": pa.int16(),
    "experts": pa.list_(pa.int16()),
    "weights": pa.list_(pa.float32()),
}
OPTIONAL_COLUMNS = {"logits": pa.list_(pa.float16()), "predicted": pa.list_(pa.float16())}
PROPOSED = pa.list_(pa.int32())
_PROPOSED_STEM = "proposed_"


def proposed_column(place: int) -> str:
    """Name the column of a recorded prefetcher: an event's keys, in the event's first row."""
    return f"{_PROPOSED_STEM}{place}"


def _is_of_events(column: str) -> bool:
    """Whether a column's lists stand in the first row of what they belong to."""
    return column.startswith(_PROPOSED_STEM) or column in DRAFT_COLUMNS


def check_schema(name: str, schema: Any) -> None:
    """Raise ValueError for a column that is missing, twice, mistyped, or not of the format."""
    twice = [column for column in schema.names if schema.names.count(column) > 1]
    if twice:
        raise ValueError(f"trace {name}: the column {twice[0]!r} stands twice.")
    known = COLUMNS | OPTIONAL_COLUMNS
    lacking = [column for column in COLUMNS if column not in schema.names]
    if lacking:
        raise ValueError(f"trace {name} lacks the column {lacking[0]!r}.")
    for column in schema.names:
        found = schema.field(column).type
        if column not in known:
            if _is_of_events(column) and found == PROPOSED:
                continue
            raise ValueError(f"trace {name}: column {column!r} is not part of the format.")
        kind = known[column]
        # Of a list the type of its values: writers name the values themselves differently.
        is_same = pa.types.is_list(kind) and pa.types.is_list(found)
        if found != kind and not (is_same and found.value_type == kind.value_type):
            raise ValueError(f"trace {name}: column {column!r} is {found}, must be {kind}.")


def columns_of(schema: Any, logits: bool, predicted: bool) -> list[str]:
    """Return the columns to read; the two large ones are only read where they are asked for."""
    asked = {"logits": logits, "predicted": predicted}
    large = [column for column, wanted in asked.items() if wanted and column in schema.names]
    return [*COLUMNS, *large, *filter(_is_of_events, schema.names)]


def trace_of(
    name: str,
    table: Any,
    header: Header,
    settled: Mapping[int, tuple[int, int]],
    requests: tuple[TracedRequest, ...] | None,
    first_pass: int = 0,
) -> Trace:
    """Build the trace of a table; without `requests` they are told from its rows.

    `first_pass` is the number of the table's first pass in the file.
    """
    geometry, rows = header.geometry, _Rows(name, table)
    # Where any row has no weights, nothing can be built on the others.
    has_weights = not table["weights"].null_count
    columns = Columns(
        request=rows.numbers("request"),
        pass_index=rows.numbers("pass") - np.int32(first_pass),
        phase=rows.phases(),
        token=rows.numbers("token"),
        layer=rows.numbers("layer"),
        experts=rows.values("experts", geometry.top_k).reshape(-1, geometry.top_k).astype(np.int32),
        weights=rows.values("weights", geometry.top_k).reshape(-1, geometry.top_k)
        if has_weights
        else None,
    )
    logits = None
    if "logits" in table.column_names:
        logits = rows.values("logits", geometry.num_experts).reshape(-1, geometry.num_experts)
        rows.refuse(np.isnan(logits).any(axis=-1), "logits", "holds a NaN")
    trace = build_trace(
        name,
        geometry,
        columns,
        seed=header.seed,
        requests=requests,
        logits=logits,
        predicted=_predicted(rows, header, columns),
        drafted=_drafted(rows, header, columns, settled),
    )
    proposed = {}
    num_keys = geometry.num_layers * geometry.num_experts
    for place, identity in enumerate(header.proposals):
        column = proposed_column(place)
        keys, offsets = rows.lists(column, "that its metadata names")
        if ((keys < 0) | (keys >= num_keys)).any():
            raise ValueError(
                f"trace {name}: column {column!r}: keys must lie in 0..{num_keys - 1}."
            )
        proposed[identity] = Proposed(keys=keys, bounds=offsets[trace.row_bounds])
    return dataclasses.replace(trace, proposed=proposed, first_pass=first_pass)


class _Rows:
    """The columns of a table as arrays without nulls, of the lengths they must have."""

    def __init__(self, name: str, table: Any) -> None:
        self.name, self.table = name, table

    def refuse(self, bad: BoolArray, column: str, problem: str) -> None:
        """Raise for the first row that is marked."""
        if bad.any():
            raise misfit(self.name, f"row {int(bad.argmax())}", column, problem)

    def array(self, column: str) -> Any:
        """Return a column as one array, none of whose values is null."""
        kind = self.table[column].type
        array = pa.concat_arrays(self.table[column].chunks or [pa.array([], kind)])
        if array.null_count:
            self.refuse(np.asarray(array.is_null()), column, "is null")
        return array

    def numbers(self, column: str) -> Ints:
        """Return a column of whole numbers."""
        values: Ints = self.array(column).to_numpy(zero_copy_only=False).astype(np.int32)
        return values

    def phases(self) -> Ints:
        encoded = self.array("phase").dictionary_encode()
        words = encoded.dictionary.to_pylist()
        codes: Ints = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int32)
        for code, word in enumerate(words):
            if word not in PHASES:
                problem = f"is {word!r}, must be one of {', '.join(PHASES)}"
                self.refuse(codes == code, "phase", problem)
        return np.asarray([PHASES.index(word) for word in words], dtype=np.int32)[codes]

    def values(self, column: str, lengths: IntArray | int) -> Any:
        """Return the concatenated values of a list column whose rows have these lengths."""
        array = self.array(column)
        expected = np.broadcast_to(np.asarray(lengths), len(array))
        found = np.diff(array.offsets.to_numpy())
        bad = found != expected
        if bad.any():
            row = int(bad.argmax())
            self.refuse(bad, column, f"has {found[row]} values, must have {expected[row]}")
        values = array.flatten()
        if values.null_count:
            place = int(np.asarray(values.is_null()).argmax())
            row = int(np.searchsorted(np.cumsum(expected), place, side="right"))
            raise misfit(self.name, f"row {row}", column, "holds a null")
        return values.to_numpy(zero_copy_only=False)

    def lists(self, column: str, wanted: str) -> tuple[Ints, IntArray]:
        """Return a column's values, and where those of each row begin and end."""
        if column not in self.table.column_names:
            raise ValueError(f"trace {self.name} lacks the column {column!r} {wanted}.")
        array = self.array(column)
        offsets: IntArray = array.offsets.to_numpy().astype(np.int64)
        values = array.flatten()
        if values.null_count:
            raise ValueError(f"trace {self.name}: column {column!r} holds a null.")
        numbers: Ints = values.to_numpy(zero_copy_only=False).astype(np.int32)
        return numbers, offsets - offsets[0]


def _predicted(rows: _Rows, header: Header, columns: Columns) -> Predicted | None:
    if "predicted" not in rows.table.column_names:
        return None
    if not header.predicted_depth:
        raise ValueError(
            f"trace {rows.name}: column 'predicted' needs the metadata field predicted_depth."
        )
    last = header.geometry.num_layers - 1
    ahead = np.clip(last - columns.layer, 0, header.predicted_depth)
    if header.predicted_by:
        wraps = (columns.layer == last) & (columns.phase == PHASES.index(DECODE))
        ahead = np.where(wraps, 1, ahead)
    lengths = ahead.astype(np.int64) * header.geometry.num_experts
    values: Halves = rows.values("predicted", lengths)
    offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])
    bad = np.isnan(values)
    if bad.any():
        row = int(np.searchsorted(offsets, int(bad.argmax()), side="right")) - 1
        raise misfit(rows.name, f"row {row}", "predicted", "holds a NaN")
    depth, by = header.predicted_depth, header.predicted_by
    return Predicted(depth=depth, values=values, offsets=offsets, by=by)


def _drafted(
    rows: _Rows, header: Header, columns: Columns, settled: Mapping[int, tuple[int, int]]
) -> Drafted:
    """Return what was drafted before each pass, and what became of it."""
    if header.draft is None:
        return Drafted(settled=settled)
    first = np.flatnonzero(np.diff(columns.pass_index, prepend=-1))
    found = {}
    for field, column in zip(("tokens", "experts", "ranks"), DRAFT_COLUMNS, strict=True):
        values, offsets = rows.lists(column, "of the draft that its metadata names")
        inner = np.diff(offsets) > 0
        inner[first] = False
        rows.refuse(inner, column, "is not in a pass' first row")
        found[field] = Lists(values, np.append(offsets[first], len(values)))
    drafted = Drafted(draft=header.draft, ranked=header.ranked, settled=settled, **found)
    drafted.check(rows.name, header.geometry.num_experts)
    return drafted


@dataclass(frozen=True, slots=True)
class Kept:
    """What of a stream belongs to finished requests: its first batches."""

    path: Path
    schema: Any
    num_batches: int
    num_rows: int
    metadata: Mapping[bytes, bytes]
    """What the trace's metadata says beside the schema's."""

    def batches(self) -> Iterator[Any]:
        """Yield them, one at a time."""
        with pa.ipc.open_stream(self.path) as reader:
            for batch, _ in islice(_whole_batches(reader), self.num_batches):
                yield batch


def kept_of(path: Path) -> Kept:
    """Find what of a stream belongs to finished requests. The last batch may be torn."""
    num_batches = num_rows = seen = 0
    scans: list[tuple[int, int]] = []
    drafts: list[tuple[int, int, int]] = []
    with pa.ipc.open_stream(path) as reader:
        for number, (batch, about) in enumerate(_whole_batches(reader), start=1):
            seen += len(batch)
            if about is not None:
                num_batches, num_rows = number, seen
                scans += [(first, count) for first, count in json.loads(about[SCANS_MARK])]
                drafts += [(p, d, a) for p, d, a in json.loads(about[DRAFTS_MARK])]
        return Kept(path, reader.schema, num_batches, num_rows, write_settled(scans, drafts))


def _whole_batches(reader: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the whole batches with their marks, up to the end or to what is torn."""
    while True:
        try:
            yield reader.read_next_batch_with_custom_metadata()
        except (StopIteration, pa.ArrowException, OSError):
            return


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
    """Read what a run that was killed, or still goes on, has finished."""
    try:
        kept = kept_of(path)
        table = pa.Table.from_batches(kept.batches(), kept.schema)
        check_schema(path.name, table.schema)
        table.validate(full=True)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"trace {path.name} is not a readable stream: {error}.") from error
    return table.combine_chunks(), {**(kept.schema.metadata or {}), **kept.metadata}, kept.schema


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

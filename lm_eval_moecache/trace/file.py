"""Routing traces on disk: Parquet files, read whole or part by part, and their streams.

A trace is recorded into an Arrow stream next to the file it will become (`recorder`). A stream is
readable without its end, so a killed run keeps every finished request: some batches carry a mark,
and all batches up to the last mark belong to finished requests.

A reader repairs nothing: a misfit is a ValueError that names the row and the field.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq

from lm_eval_moecache.records.arrays import BoolArray, IntArray
from lm_eval_moecache.records.event import DECODE, PHASES
from lm_eval_moecache.records.files import replace
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.trace.header import (
    HEADER_KEY,
    REQUESTS_KEY,
    Header,
    read_header,
    read_listed,
    write_header,
    write_settled,
)
from lm_eval_moecache.trace.trace import (
    DRAFT_COLUMNS,
    EXPERTS,
    RANKED,
    TOKENS,
    Columns,
    Drafted,
    Ints,
    Lists,
    Predicted,
    Refuse,
    Trace,
    TracedRequest,
    build_trace,
)

SUFFIX = ".partial"
"""Suffix of a stream, appended to the name of the trace it becomes."""
WHOLE_ROWS = 1 << 18
"""A trace with at most this many rows is read at once and held in memory."""
PART_ROWS = 1 << 17
"""Rows of one part of a longer trace, before it is extended to the end of its pass."""
SCANS_MARK, DRAFTS_MARK = b"kept", b"drafts"
"""Metadata keys of a marked batch: the scans and drafts since the last mark."""
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


ROW_GROUP = 32768
"""Least number of rows in a Parquet row group, except the last."""
_LEVEL = 9
"""zstd level: above it, the last percent takes more time than all the rest."""


def event_columns(header: Header) -> list[str]:
    """Return the list columns that only an event's first row fills.

    `proposed_n` has the keys that the header's prefetcher n proposes; DRAFT_COLUMNS are there where
    a model drafts.
    """
    proposed = [f"proposed_{place}" for place in range(len(header.proposals))]
    return [*proposed, *(DRAFT_COLUMNS if header.draft is not None else ())]


def schema_of(header: Header) -> Any:
    """Return the Arrow schema of a trace that is written, with the header as metadata."""
    is_kept = {"predicted": header.predicted_depth, "logits": header.has_logits}
    optional = {name: kind for name, kind in OPTIONAL_COLUMNS.items() if is_kept[name]}
    columns = COLUMNS | optional | dict.fromkeys(event_columns(header), PROPOSED)
    return pa.schema(list(columns.items()), {HEADER_KEY: write_header(header)})


def columns_of(name: str, schema: Any, header: Header, **large: bool) -> list[str]:
    """Return the columns to read; the two `large` ones are read only on request.

    Raises ValueError for a column that is missing, duplicated, mistyped, or not in the format.
    """
    duplicates = [column for column in schema.names if schema.names.count(column) > 1]
    if duplicates:
        raise ValueError(f"trace {name}: the column {duplicates[0]!r} appears twice.")
    of_events = event_columns(header)
    types = COLUMNS | OPTIONAL_COLUMNS | dict.fromkeys(of_events, PROPOSED)
    for column in (*COLUMNS, *of_events):
        if column not in schema.names:
            raise ValueError(f"trace {name} lacks the column {column!r}.")
    for column in schema.names:
        if column not in types:
            raise ValueError(f"trace {name}: column {column!r} is not part of the format.")
        kind = schema.field(column).type
        # Compare lists by value type: writers name the list's field differently.
        if types[column] != (pa.list_(kind.value_type) if pa.types.is_list(kind) else kind):
            raise ValueError(f"trace {name}: column {column!r} is {kind}, must be {types[column]}.")
    if "predicted" in schema.names and not header.predicted_depth:
        raise ValueError(
            f"trace {name}: column 'predicted' needs the metadata field predicted_depth."
        )
    optional = [column for column, wanted in large.items() if wanted and column in schema.names]
    return [*COLUMNS, *optional, *of_events]


# --- from a table to a trace ---


def trace_of(
    name: str,
    table: Any,
    header: Header,
    settled: Mapping[int, tuple[int, int]],
    requests: tuple[TracedRequest, ...] | None,
    scans: tuple[tuple[int, int], ...],
    first_pass: int = 0,
) -> Trace:
    """Build the trace of a table; without `requests`, they are inferred from its rows.

    `first_pass` is the number of the table's first pass in the file.
    """
    geometry, rows = header.geometry, _Rows(name, table)
    # Weights are all or nothing: one row without them makes the others useless.
    has_weights = not table["weights"].null_count
    columns = Columns(
        request=rows.numbers("request"),
        pass_index=rows.numbers("pass") - np.int32(first_pass),
        phase=rows.phases(),
        token=rows.numbers("token"),
        layer=rows.numbers("layer"),
        experts=rows.matrix("experts", geometry.top_k).astype(np.int32),
        weights=rows.matrix("weights", geometry.top_k) if has_weights else None,
    )
    trace = build_trace(
        name,
        geometry,
        columns,
        seed=header.seed,
        requests=requests,
        logits=rows.matrix("logits", geometry.num_experts) if "logits" in rows else None,
        predicted=_predicted(rows, header, columns) if "predicted" in rows else None,
        drafted=_drafted(rows, header, columns, settled),
    )
    proposed = {}
    for column, identity in zip(event_columns(header), header.proposals, strict=False):
        last = geometry.num_layers * geometry.num_experts - 1
        keys, offsets = rows.lists(column, least=0, most=last)
        proposed[identity] = Lists(keys, offsets[trace.row_bounds])
    return dataclasses.replace(trace, proposed=proposed, scans=scans, first_pass=first_pass)


class _Rows:
    """The columns of a table as arrays, checked for nulls and list lengths."""

    def __init__(self, name: str, table: Any) -> None:
        self.refuse, self.table = Refuse(name), table

    def __contains__(self, column: str) -> bool:
        return column in self.table.column_names

    def refuse_values(self, bad: BoolArray, offsets: IntArray, column: str, problem: str) -> None:
        """Raise for the row of the first value where `bad` is True; `offsets` are row starts."""

        def row(value: int) -> str:
            return f"row {np.searchsorted(offsets, value, side='right') - 1}"

        Refuse(self.refuse.name, row)(bad, column, problem)

    def array(self, column: str) -> Any:
        """Return a column as one array; raise where a value is null."""
        kind = self.table[column].type
        array = pa.concat_arrays(self.table[column].chunks or [pa.array([], kind)])
        self.refuse(np.asarray(array.is_null()), column, "is null")
        return array

    def numbers(self, column: str) -> Ints:
        """Return an integer column [rows]."""
        values: Ints = self.array(column).to_numpy(zero_copy_only=False).astype(np.int32)
        return values

    def phases(self) -> Ints:
        """Return the phase column as indices into PHASES [rows]."""
        names = self.array("phase")
        codes = pa.compute.index_in(names, pa.array(PHASES))
        rule = f"must be one of {', '.join(PHASES)}"
        unknown = np.asarray(codes.is_null())
        self.refuse(unknown, "phase", lambda row: f"is {names[row].as_py()!r}, {rule}")
        phases: Ints = codes.to_numpy(zero_copy_only=False).astype(np.int32)
        return phases

    def lists(
        self, column: str, lengths: IntArray | None = None, *, least: int = 0, most: int = 0
    ) -> tuple[Any, IntArray]:
        """Return the values of a list column, and the offsets [rows + 1] of its rows.

        The rows must have these lengths, and the values lie in `least`..`most`, where given.
        """
        array = self.array(column)
        offsets: IntArray = array.offsets.to_numpy().astype(np.int64)
        offsets -= offsets[0]
        flat = array.flatten()
        if flat.null_count:
            self.refuse_values(np.asarray(flat.is_null()), offsets, column, "holds a null")
        values = flat.to_numpy(zero_copy_only=False)
        if values.dtype == np.float16:
            self.refuse_values(np.isnan(values), offsets, column, "holds a NaN")
        if lengths is not None:
            said = "has {} values, must have {}".format
            sizes, wanted = np.diff(offsets), lengths
            self.refuse(sizes != wanted, column, lambda row: said(sizes[row], wanted[row]))
        outside = (values < least) | (values > most)
        if most and outside.any():
            rule = f"holds {values[outside.argmax()]}, must lie in {least}..{most}"
            self.refuse_values(outside, offsets, column, rule)
        return values, offsets

    def matrix(self, column: str, width: int) -> Any:
        """Return a column of equally long lists as [rows, width]."""
        lengths = np.full(len(self.table), width, dtype=np.int64)
        return self.lists(column, lengths)[0].reshape(-1, width)


def _predicted(rows: _Rows, header: Header, columns: Columns) -> Predicted:
    last, depth = header.geometry.num_layers - 1, header.predicted_depth
    ahead = np.clip(last - columns.layer, 0, depth)
    if header.predicted_by:
        wraps = (columns.layer == last) & (columns.phase == PHASES.index(DECODE))
        ahead = np.where(wraps, 1, ahead)
    lengths = ahead.astype(np.int64) * header.geometry.num_experts
    values, offsets = rows.lists("predicted", lengths)
    return Predicted(depth=depth, values=values, offsets=offsets, by=header.predicted_by)


def _drafted(
    rows: _Rows, header: Header, columns: Columns, settled: Mapping[int, tuple[int, int]]
) -> Drafted:
    """Return the drafting before each pass, and how many drafts were accepted."""
    if header.draft is None:
        return Drafted(settled=settled)
    begins = np.diff(columns.pass_index, prepend=-1) != 0
    forwards = np.diff(rows.lists(TOKENS)[1])
    rows.refuse((forwards > 0) & ~begins, TOKENS, "is not in a pass' first row")
    drafted = Drafted(draft=header.draft, ranked=header.ranked, settled=settled)
    geometry, num_ranks = header.draft.geometry, len(drafted.predicted_layers) * header.ranked
    # Column -> values per forward, and their bounds.
    bounds = {
        TOKENS: (1, 1, np.iinfo(np.int32).max),
        EXPERTS: (geometry.num_layers, 1, geometry.num_experts),
        RANKED: (num_ranks, 0, header.geometry.num_experts - 1),
    }
    lists = []
    for column, (width, least, most) in bounds.items():
        values, offsets = rows.lists(column, forwards * width, least=least, most=most)
        lists.append(Lists(values, np.append(offsets[:-1][begins], len(values))))
    if num_ranks:
        ordered = np.sort(values.reshape(-1, header.ranked), axis=-1)
        duplicate = (ordered[:, 1:] == ordered[:, :-1]).any(axis=-1)
        rows.refuse_values(
            np.repeat(duplicate, header.ranked), offsets, RANKED, "names an expert twice"
        )
    tokens, experts, ranks = lists
    return dataclasses.replace(drafted, tokens=tokens, experts=experts, ranks=ranks)


# --- files and streams ---


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a trace as a ParquetFile, or a stream as its FinishedPart.

    ValueError for a file of another kind, or a damaged one.
    """
    is_stream = path.suffix == SUFFIX
    try:
        if is_stream:
            yield finished_part_of(path)
        else:
            with pq.ParquetFile(path, page_checksum_verification=True) as file:
                yield file
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = str(error).split("\n")[0].rstrip(".")
        kind = "stream" if is_stream else "Parquet file"
        raise ValueError(f"trace {path.name} is not a readable {kind}: {reason}.") from error


@dataclass(frozen=True, slots=True)
class FinishedPart:
    """The part of a stream that belongs to finished requests: its first batches."""

    path: Path
    schema_arrow: Any
    """Arrow schema with the metadata of the trace, except its requests."""
    num_batches: int
    num_rows: int

    def batches(self) -> Iterator[Any]:
        """Yield these batches, one at a time."""
        with pa.ipc.open_stream(self.path) as reader:
            for batch, _ in islice(_whole_batches(reader), self.num_batches):
                yield batch

    def read(self, columns: list[str], **_: Any) -> Any:
        """Return these columns as a table."""
        return pa.Table.from_batches(self.batches(), self.schema_arrow).select(columns)


def finished_part_of(path: Path) -> FinishedPart:
    """Return the part of a stream that belongs to finished requests. The last batch may be torn."""
    num_batches = num_rows = rows_read = 0
    scans: list[list[int]] = []
    drafts: list[list[int]] = []
    with pa.ipc.open_stream(path) as reader:
        for number, (batch, marks) in enumerate(_whole_batches(reader), start=1):
            rows_read += len(batch)
            if marks is not None:
                num_batches, num_rows = number, rows_read
                scans += json.loads(marks[SCANS_MARK])
                drafts += json.loads(marks[DRAFTS_MARK])
        metadata = {**(reader.schema.metadata or {}), **write_settled(scans, drafts)}
        return FinishedPart(path, reader.schema.with_metadata(metadata), num_batches, num_rows)


def _whole_batches(reader: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the complete batches with their marks, up to the end or to a torn batch."""
    while True:
        try:
            yield reader.read_next_batch_with_custom_metadata()
        except (StopIteration, pa.ArrowException, OSError):
            return


def read_trace(path: Path, *, logits: bool = False, predicted: bool = False) -> Trace:
    """Read and check a trace. The two large columns are read only on request.

    The stream of a killed or running run yields its finished requests. Raises ValueError that names
    the row and the field of a misfit; an optional column that the file lacks is None.
    """
    name = path.name
    with _opened(path) as file:
        schema = file.schema_arrow
        header = read_header(name, schema.metadata)
        columns = columns_of(name, schema, header, logits=logits, predicted=predicted)
        table = file.read(columns, use_threads=False)
        table.validate(full=True)
    num_passes = (pa.compute.max(table["pass"]).as_py() or 0) + 1
    requests, scans, settled = read_listed(name, schema.metadata, num_passes)
    return trace_of(name, table.combine_chunks(), header, settled, requests, scans)


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamedTrace:
    """A trace on disk whose rows are read and checked part by part (`parts`) during a replay.

    Memory holds one part of about PART_ROWS rows, and more only where a single pass or scanned
    text is longer. Offline algorithms (`Future`) need the whole trace.
    """

    path: Path
    header: Header
    columns: list[str]
    requests: tuple[TracedRequest, ...]
    num_passes: int
    scans: tuple[tuple[int, int], ...]
    drafted: Drafted
    name: str
    geometry: Geometry
    seed: int
    has_sizes: ClassVar[bool] = True

    def parts(self) -> Iterator[Trace]:
        """Read the trace from its beginning; raises the ValueError of `read_trace`."""
        first_pass = 0
        for table in self._tables():
            last = int(table["pass"][-1].as_py())
            scans = tuple((f - first_pass, n) for f, n in self.scans if first_pass <= f <= last)
            context = self.header, self.drafted.settled, (), scans, first_pass
            try:
                yield trace_of(self.name, table, *context)
            except ValueError:
                # Errors name a row by its place in the file, which a part does not have.
                read_trace(self.path, logits=True, predicted=True)
                raise
            first_pass = last + 1

    def _tables(self) -> Iterator[Any]:
        """Yield the rows in tables that end with a pass and split no scan."""
        rest: list[Any] = []
        starts = np.asarray([first for first, _ in self.scans], dtype=np.int64)
        with _opened(self.path) as file:
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
            yield pa.Table.from_batches(rest)


def open_trace(
    path: Path, *, logits: bool = False, predicted: bool = False
) -> Trace | StreamedTrace:
    """Read a trace that is small or lists no requests; open a larger one for streaming.

    Raises the ValueError of `read_trace`; the rows of an opened trace are checked by `parts`.
    """
    name, large = path.name, {"logits": logits, "predicted": predicted}
    with _opened(path) as file:
        schema, num_rows = file.schema_arrow, file.metadata.num_rows
        if num_rows <= WHOLE_ROWS or REQUESTS_KEY not in (schema.metadata or {}):
            return read_trace(path, **large)
        header = read_header(name, schema.metadata)
        columns = columns_of(name, schema, header, **large)
        last = file.read_row_group(file.num_row_groups - 1, columns=["pass"])["pass"]
    num_passes = (last[-1].as_py() or 0) + 1
    requests, scans, settled = read_listed(name, schema.metadata, num_passes)
    return StreamedTrace(
        path=path,
        header=header,
        columns=columns,
        requests=requests or (),
        num_passes=num_passes,
        scans=scans,
        drafted=Drafted(draft=header.draft, ranked=header.ranked, settled=settled),
        name=name,
        geometry=header.geometry,
        seed=header.seed,
    )


# --- writing ---


def batch_of(schema: Any, events: Sequence[Mapping[str, Any]]) -> Any:
    """Return the rows of these events as a record batch.

    A field of an event is an array [tokens], or for list columns [tokens, values], None where it
    has none, or for `event_columns` the list of its first row. `phase` indexes PHASES.
    """
    sizes = np.asarray([len(event["layer"]) for event in events], np.int64)
    arrays = [_array(field, [event[field.name] for event in events], sizes) for field in schema]
    return pa.record_batch(arrays, schema=schema)


def _array(field: Any, parts: Sequence[Any], sizes: IntArray) -> Any:
    kind = field.type
    if not parts:  # a batch that only carries a mark
        return pa.array([], kind)
    if not pa.types.is_list(kind):
        values = np.concatenate(parts)
        return pa.array(
            np.asarray(PHASES, object)[values] if field.name == "phase" else values, kind
        )
    if any(part is None for part in parts):
        return pa.nulls(int(sizes.sum()), kind)
    if field.name in COLUMNS or field.name in OPTIONAL_COLUMNS:
        widths = np.repeat([part.shape[1] for part in parts], sizes)
    else:
        widths = np.zeros(sizes.sum(), dtype=np.int64)
        widths[np.cumsum(sizes) - sizes] = [len(part) for part in parts]
    offsets = np.append(0, np.cumsum(widths)).astype(np.int32)
    dtype = kind.value_type.to_pandas_dtype()
    values = np.concatenate([np.asarray(part, dtype).ravel() for part in parts])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values, kind.value_type))


def write_parquet(
    target: Path, schema: Any, batches: Iterable[Any], num_rows: int, extra: Mapping[bytes, bytes]
) -> None:
    """Write batches as a trace that appears under its name once complete.

    `extra` is added to the metadata of their `schema`.
    """
    metadata = {**schema.metadata, **extra}
    schema = schema.with_metadata(metadata)
    encodings = dict.fromkeys(("request", "pass", "token", "layer"), "DELTA_BINARY_PACKED")
    for field in schema:
        if pa.types.is_list(field.type):
            # One stream per byte position: the high bytes of small numbers compress to nothing.
            encodings[f"{field.name}.list.element"] = "BYTE_STREAM_SPLIT"
    writing = target.with_name(f".{target.name}.writing")
    try:
        with pq.ParquetWriter(
            writing,
            schema,
            compression="zstd",
            compression_level=_LEVEL,
            write_page_checksum=True,
            use_dictionary=["phase"],
            column_encoding=encodings,
        ) as file:
            for group in _groups(batches):
                table = pa.Table.from_batches(group).combine_chunks()
                file.write_table(table.replace_schema_metadata(metadata))
        replace(writing, target)
    except BaseException:
        writing.unlink(missing_ok=True)
        raise


def _groups(batches: Iterable[Any]) -> Iterator[list[Any]]:
    """Yield lists of batches, each large enough for a row group."""
    group: list[Any] = []
    for batch in batches:
        group.append(batch)
        if sum(map(len, group)) >= ROW_GROUP:
            yield group
            group = []
    if group:
        yield group

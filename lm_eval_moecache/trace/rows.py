"""The rows of a trace's table as checked arrays, whether it is a whole file or a part of one.

Whatever does not fit is a ValueError that names the row and the field.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from lm_eval_moecache.records.arrays import FloatArray, IntArray
from lm_eval_moecache.records.event import DECODE, PHASES
from lm_eval_moecache.trace.columns import Columns, Halves, Ints, misfit
from lm_eval_moecache.trace.detail import Proposed
from lm_eval_moecache.trace.drafting import DRAFT_COLUMNS, Drafted, Lists
from lm_eval_moecache.trace.header import Header
from lm_eval_moecache.trace.trace import Predicted, Trace, TracedRequest, build_trace

COLUMNS = {
    "request": pa.int32(),
    "pass": pa.int32(),
    "phase": pa.string(),
    "token": pa.int32(),
    "layer": pa.int16(),
    "experts": pa.list_(pa.int16()),
    "weights": pa.list_(pa.float32()),
}
_PROPOSED_STEM = "proposed_"
OPTIONAL_COLUMNS = {
    "logits": pa.list_(pa.float16()),
    "predicted": pa.list_(pa.float16()),
}


PROPOSED = pa.list_(pa.int32())


def proposed_column(place: int) -> str:
    """Name the column of a recorded prefetcher: an event's keys, in the event's first row."""
    return f"proposed_{place}"


def check_schema(name: str, schema: Any) -> None:
    twice = [column for column in schema.names if schema.names.count(column) > 1]
    if twice:
        raise ValueError(f"trace {name}: the column {twice[0]!r} stands twice.")
    for column, kind in (COLUMNS | OPTIONAL_COLUMNS).items():
        if column not in schema.names:
            if column in OPTIONAL_COLUMNS:
                continue
            raise ValueError(f"trace {name} lacks the column {column!r}.")
        found = schema.field(column).type
        same = (
            pa.types.is_list(found) and found.value_type == kind.value_type
            if pa.types.is_list(kind)
            else found == kind
        )
        if not same:
            raise ValueError(f"trace {name}: column {column!r} is {found}, must be {kind}.")
    for column in schema.names:
        if is_of_events(column) and schema.field(column).type == PROPOSED:
            continue
        if column not in COLUMNS and column not in OPTIONAL_COLUMNS:
            raise ValueError(f"trace {name}: column {column!r} is not part of the format.")


def is_of_events(column: str) -> bool:
    """Whether a column's lists stand in the first row of what they belong to."""
    return column.startswith(_PROPOSED_STEM) or column in DRAFT_COLUMNS


def columns_of(schema: Any, logits: bool, predicted: bool) -> list[str]:
    """Return the columns to read; the two large ones are only read where they are asked for."""
    asked = {"logits": logits, "predicted": predicted}
    large = [column for column, wanted in asked.items() if wanted and column in schema.names]
    return [*COLUMNS, *large, *(column for column in schema.names if is_of_events(column))]


def unreadable(name: str, error: Exception) -> ValueError:
    """Build the error for a file that is no Parquet file, or a damaged one."""
    reason = str(error).split("\n")[0].rstrip(".")
    return ValueError(f"trace {name} is not a readable Parquet file: {reason}.")


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
    geometry = header.geometry
    columns = Columns(
        request=numbers(name, table, "request"),
        pass_index=numbers(name, table, "pass") - np.int32(first_pass),
        phase=_phases(name, table),
        token=numbers(name, table, "token"),
        layer=numbers(name, table, "layer"),
        experts=_rectangle(name, table, "experts", geometry.top_k).astype(np.int32),
        weights=_optional(name, table, "weights", geometry.top_k),
    )
    logits = None
    if "logits" in table.column_names:
        logits = _rectangle(name, table, "logits", geometry.num_experts)
        _check_numbers(name, "logits", logits)
    trace = build_trace(
        name,
        geometry,
        columns,
        seed=header.seed,
        requests=requests,
        logits=logits,
        predicted=_predicted(name, table, header, columns),
        drafted=_drafted(name, table, header, columns, settled),
    )
    proposed = _proposed(name, table, header, trace)
    return dataclasses.replace(trace, proposed=proposed, first_pass=first_pass)


def _column(name: str, table: Any, column: str) -> Any:
    """Return a column as one array, none of whose values is null."""
    array = pa.concat_arrays(table[column].chunks or [pa.array([], table[column].type)])
    if array.null_count:
        row = int(np.asarray(array.is_null()).argmax())
        raise misfit(name, f"row {row}", column, "is null")
    return array


def numbers(name: str, table: Any, column: str) -> Ints:
    """Return a column of whole numbers, none of them null."""
    values: Ints = _column(name, table, column).to_numpy(zero_copy_only=False).astype(np.int32)
    return values


def _phases(name: str, table: Any) -> Ints:
    encoded = _column(name, table, "phase").dictionary_encode()
    words = encoded.dictionary.to_pylist()
    codes: Ints = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int32)
    for code, word in enumerate(words):
        if word not in PHASES:
            row = int((codes == code).argmax())
            raise misfit(
                name, f"row {row}", "phase", f"is {word!r}, must be one of {', '.join(PHASES)}"
            )
    return np.asarray([PHASES.index(word) for word in words], dtype=np.int32)[codes]


def _values(name: str, table: Any, column: str, lengths: IntArray | int) -> Any:
    """Return the concatenated values of a list column whose rows have these lengths."""
    array = _column(name, table, column)
    expected = np.broadcast_to(np.asarray(lengths), len(array))
    found = np.diff(array.offsets.to_numpy())
    if (found != expected).any():
        row = int((found != expected).argmax())
        raise misfit(
            name, f"row {row}", column, f"has {found[row]} values, must have {expected[row]}"
        )
    values = array.flatten()
    if values.null_count:
        place = int(np.asarray(values.is_null()).argmax())
        row = int(np.searchsorted(np.cumsum(expected), place, side="right"))
        raise misfit(name, f"row {row}", column, "holds a null")
    return values.to_numpy(zero_copy_only=False)


def _rectangle(name: str, table: Any, column: str, width: int) -> Any:
    return _values(name, table, column, width).reshape(-1, width)


def _optional(name: str, table: Any, column: str, width: int) -> FloatArray | None:
    """Return a nullable column; where any row has none, nothing can be built on the others."""
    if table[column].null_count:
        return None
    values: FloatArray = _rectangle(name, table, column, width)
    return values


def _predicted(name: str, table: Any, header: Header, columns: Columns) -> Predicted | None:
    if "predicted" not in table.column_names:
        return None
    if not header.predicted_depth:
        raise ValueError(
            f"trace {name}: column 'predicted' needs the metadata field predicted_depth."
        )
    geometry = header.geometry
    ahead = np.clip(geometry.num_layers - 1 - columns.layer, 0, header.predicted_depth)
    if header.predicted_by:
        wraps = (columns.layer == geometry.num_layers - 1) & (columns.phase == PHASES.index(DECODE))
        ahead = np.where(wraps, 1, ahead)
    lengths = ahead.astype(np.int64) * geometry.num_experts
    values: Halves = _values(name, table, "predicted", lengths)
    offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])
    if np.isnan(values).any():
        row = int(np.searchsorted(offsets, int(np.isnan(values).argmax()), side="right")) - 1
        raise misfit(name, f"row {row}", "predicted", "holds a NaN")
    return Predicted(
        depth=header.predicted_depth, values=values, offsets=offsets, by=header.predicted_by
    )


def _proposed(name: str, table: Any, header: Header, trace: Trace) -> dict[str, Proposed]:
    """Return what was proposed at each event, by prefetcher."""
    found = {}
    num_keys = trace.geometry.num_layers * trace.geometry.num_experts
    for place, identity in enumerate(header.proposals):
        column = proposed_column(place)
        if column not in table.column_names:
            raise ValueError(f"trace {name} lacks the column {column!r} that its metadata names.")
        keys, offsets = _lists(name, table, column)
        if ((keys < 0) | (keys >= num_keys)).any():
            raise ValueError(
                f"trace {name}: column {column!r}: keys must lie in 0..{num_keys - 1}."
            )
        found[identity] = Proposed(keys=keys, bounds=offsets[trace.row_bounds])
    return found


def _lists(name: str, table: Any, column: str) -> tuple[Ints, IntArray]:
    """Return a column's values, and where those of each row begin and end."""
    array = _column(name, table, column)
    offsets: IntArray = array.offsets.to_numpy().astype(np.int64)
    values = array.flatten()
    if values.null_count:
        raise ValueError(f"trace {name}: column {column!r} holds a null.")
    numbers: Ints = values.to_numpy(zero_copy_only=False).astype(np.int32)
    return numbers, offsets - offsets[0]


def _drafted(
    name: str,
    table: Any,
    header: Header,
    columns: Columns,
    settled: Mapping[int, tuple[int, int]],
) -> Drafted:
    """Return what was drafted before each pass, and what became of it."""
    if header.draft is None:
        return Drafted(settled=settled)
    first = np.flatnonzero(np.diff(columns.pass_index, prepend=-1))
    found = {}
    for field, column in zip(("tokens", "experts", "ranks"), DRAFT_COLUMNS, strict=True):
        if column not in table.column_names:
            raise ValueError(f"trace {name} lacks the column {column!r}, and names a draft.")
        values, offsets = _lists(name, table, column)
        inner = np.diff(offsets) > 0
        inner[first] = False
        if inner.any():
            raise misfit(name, f"row {int(inner.argmax())}", column, "is not in a pass' first row")
        found[field] = Lists(values, np.append(offsets[first], len(values)))
    drafted = Drafted(draft=header.draft, ranked=header.ranked, settled=settled, **found)
    drafted.check(name, header.geometry.num_experts)
    return drafted


def _check_numbers(name: str, column: str, values: Halves) -> None:
    bad = np.isnan(values).any(axis=-1)
    if bad.any():
        raise misfit(name, f"row {int(bad.argmax())}", column, "holds a NaN")

"""Records the routing of a run: finished requests are on disk as soon as they are finished."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lm_eval_moecache.records.arrays import FloatArray, IntArray
from lm_eval_moecache.records.files import check_writable
from lm_eval_moecache.records.ledger import GENERATE, RequestRecord
from lm_eval_moecache.trace.drafting import DRAFT_COLUMNS, NO_DRAFTING, Drafting
from lm_eval_moecache.trace.file import (
    COLUMNS,
    DRAFTS_MARK,
    OPTIONAL_COLUMNS,
    PROPOSED,
    SCANS_MARK,
    SUFFIX,
    Kept,
    kept_of,
    proposed_column,
)
from lm_eval_moecache.trace.header import (
    HEADER_KEY,
    REQUESTS_KEY,
    Header,
    sealed,
    write_header,
    write_requests,
)

logger = logging.getLogger(__name__)
ROW_GROUP = 32768
MOST_STEM = 100
"""File systems hold names of 255 bytes."""
_LEVEL = 9
"""Of zstd: beyond it the last percent costs more than all before."""


def prepare_folder(folder: str) -> Path:
    """Make the folder of `trace=DIR`, or say why traces cannot be written there."""
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
        check_writable(path)
    except (OSError, ValueError) as error:  # ValueError: a null byte
        raise ValueError(f"trace={folder!r}: no folder that can be written to: {error}.") from error
    return path


class TraceWriter:
    """Writes to a stream beside the target, which appears under its name when all is there.

    Call `begin_pass`, then `add` for each layer, `keep` whenever what has been added is of finished
    requests, and `close` at the end. A killed recording leaves its stream, which can be read as a
    trace of what was kept.
    """

    def __init__(self, folder: Path, stem: str, header: Header) -> None:
        self._layers = header.geometry.num_layers
        kept = {"predicted": header.predicted_depth, "logits": header.has_logits}
        optional = {name: kind for name, kind in OPTIONAL_COLUMNS.items() if kept[name]}
        self._proposed = [proposed_column(place) for place in range(len(header.proposals))]
        self._drafting = DRAFT_COLUMNS if header.draft is not None else ()
        # Columns of lists that stand in an event's first row.
        self._of_events = dict.fromkeys((*self._proposed, *self._drafting), PROPOSED)
        schema = pa.schema(list((COLUMNS | optional | self._of_events).items()))
        self._schema = schema.with_metadata({HEADER_KEY: write_header(header)})
        self._target, self._partial = reserve(folder, stem)
        self._file: Any = pa.OSFile(str(self._partial), "wb")
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        self._stream: Any = pa.ipc.new_stream(self._file, self._schema, options=options)
        self._rows: list[Mapping[str, Any]] = []
        self._num_rows = 0
        # New since the last mark.
        self._scans: list[tuple[int, int]] = []
        self._drafts: list[tuple[int, int, int]] = []
        self._is_marked = True
        # Of finished requests.
        self._kept_passes = 0
        self._requests: Sequence[RequestRecord] = ()
        self._pass: dict[str, Any] = {}
        self._scan: list[Mapping[str, Any]] | None = None
        """The layers so far of a text whose tokens are passes of their own."""

    def begin_pass(
        self,
        index: int,
        phase: str,
        requests: IntArray,
        tokens: IntArray,
        drafting: Drafting = NO_DRAFTING,
    ) -> None:
        """Note the pass that follows: for each of its tokens, whose it is and its position.

        `drafting` is what a draft model has done for it.
        """
        if self._stream is None:
            raise ValueError(
                "trace: the recording of this model has been closed. Make a new model for a new "
                "run: a replay begins with an empty cache."
            )
        self._pass = {
            "request": requests.astype(np.int32),
            "pass": np.full(len(tokens), index, dtype=np.int32),
            "phase": phase,
            "token": tokens.astype(np.int32),
        }
        self._drafted = drafting
        self._scan = None

    def begin_scan(self) -> None:
        """Make each token of the pass begun a pass of its own; its layers still come in order."""
        passes = self._pass["pass"] + np.arange(len(self._pass["pass"]), dtype=np.int32)
        self._pass["pass"] = passes
        self._scans.append((int(passes[0]), len(passes)))
        self._scan = []

    def settle(self, drafted: int, accepted: int) -> None:
        """Note how many drafted tokens the pass begun last verified, and how many it accepted."""
        if drafted:
            self._drafts.append((int(self._pass["pass"][0]), drafted, accepted))
            self._is_marked = False

    def add(
        self,
        layer: int,
        experts: IntArray,
        weights: FloatArray | None,
        logits: FloatArray | None,
        predicted: Sequence[FloatArray],
        proposed: Sequence[Sequence[int]] = (),
    ) -> None:
        """Record one event: [tokens, top_k] as the router chose, before any policy changed it.

        `proposed` are the keys that each prefetcher of the header proposes at it.
        """
        num_tokens = len(experts)
        rows = {
            **self._pass,
            "layer": np.full(num_tokens, layer, dtype=np.int16),
            "experts": experts.astype(np.int16),
            "weights": None if weights is None else weights.astype(np.float32),
            "logits": None if logits is None else logits.astype(np.float16),
            "predicted": np.concatenate(
                [np.empty((num_tokens, 0), dtype=np.float16), *predicted], axis=1, dtype=np.float16
            ),
            **dict(zip(self._proposed, proposed, strict=True)),
            **dict(zip(self._drafting, self._drafted, strict=False)),
        }
        self._drafted = NO_DRAFTING
        self._is_marked = False
        self._num_rows += num_tokens
        (self._rows if self._scan is None else self._scan).append(rows)
        if layer != self._layers - 1:
            return
        if self._scan is not None:
            for token in range(num_tokens):
                one = slice(token, token + 1)
                self._rows += [
                    {n: v if n == "phase" or v is None else v[one] for n, v in of_layer.items()}
                    for of_layer in self._scan
                ]
        # A batch ends with a pass, so that what is on disk is whole passes.
        if self._num_rows >= ROW_GROUP:
            self._flush()

    def keep(self, requests: Sequence[RequestRecord] = ()) -> None:
        """Note that all passes so far are of finished requests: a kill loses none of them."""
        if self._stream is None or self._is_marked:
            return
        marks = {SCANS_MARK: self._scans, DRAFTS_MARK: self._drafts}
        self._flush({key: json.dumps(new).encode() for key, new in marks.items()})
        self._kept_passes = int(self._pass["pass"].max(initial=-1)) + 1
        self._requests = requests
        self._scans, self._drafts, self._is_marked = [], [], True

    def close(self, requests: Sequence[RequestRecord] | None = None) -> Path | None:
        """End the file and give it its name; None where nothing was recorded. Safe to repeat.

        Without the ledger's `requests`, a reader tells them from the rows.
        """
        if self._stream is None:
            return None
        self.keep()
        target = self._finish(requests)
        if target is None:
            logger.warning("trace: no pass was run, so no trace was written.")
        return target

    def close_interrupted(self) -> Path | None:
        """As `close`, with the passes of finished requests only."""
        if self._stream is None or not self._partial.exists():
            return None
        finished = [
            each
            for each in self._requests
            if each.passes
            and each.passes[-1].index < self._kept_passes
            and (each.output_tokens is not None or each.kind != GENERATE)
        ]
        try:
            target = self._finish(finished or None)
        except (OSError, pa.ArrowException) as error:
            logger.warning("trace: %s keeps what was finished: %s.", self._partial, error)
            return None
        if target is not None:
            logger.warning("trace: %s holds the requests that were finished.", target)
        return target

    def _finish(self, requests: Sequence[RequestRecord] | None) -> Path | None:
        """Make a trace of what is kept. An interrupt on the way leaves all for the next call."""
        if not self._file.closed:
            self._stream.close()
            self._file.close()
        kept = kept_of(self._partial)
        # Where it is there, an interrupt met the line behind this one.
        if kept.num_rows and not self._target.exists():
            extra = {} if requests is None else {REQUESTS_KEY: write_requests(requests)}
            write_parquet(kept, self._target, extra)
        self._partial.unlink()
        self._stream = None
        return self._target if kept.num_rows else None

    def _flush(self, marks: Mapping[bytes, bytes] | None = None) -> None:
        arrays = [self._array(field.name, field.type) for field in self._schema]
        batch = pa.record_batch(arrays, schema=self._schema)
        try:
            self._stream.write_batch(batch, custom_metadata=marks)
        except OSError as error:
            raise ValueError(
                f"trace: {self._partial} cannot be written: {error.strerror or error}. What was "
                "finished before is kept in it."
            ) from error
        self._rows, self._num_rows = [], 0

    def _array(self, column: str, kind: Any) -> Any:
        parts = [row[column] for row in self._rows]
        if not parts:  # a batch that only carries a mark
            return pa.array([], kind)
        sizes = np.asarray([len(row["layer"]) for row in self._rows])
        if column == "phase":
            return pa.array(np.repeat(np.asarray(parts, dtype=object), sizes), kind)
        if not pa.types.is_list(kind):
            return pa.array(np.concatenate(parts), kind)
        if any(part is None for part in parts):
            return pa.nulls(self._num_rows, kind)
        if column in self._of_events:
            widths = np.zeros(self._num_rows, dtype=np.int64)
            widths[np.cumsum(sizes) - sizes] = [len(part) for part in parts]
        else:
            widths = np.concatenate([np.full(len(part), part.shape[1]) for part in parts])
        offsets = np.concatenate([[0], np.cumsum(widths)]).astype(np.int32)
        dtype = kind.value_type.to_pandas_dtype()
        values = np.concatenate([np.asarray(part, dtype).ravel() for part in parts])
        return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values, kind.value_type))


def reserve(folder: Path, stem: str) -> tuple[Path, Path]:
    """Return the name of the next trace, and its new stream: no two runs get the same."""
    for number in count():
        target = folder / f"{stem[:MOST_STEM]}-{number:03d}.parquet"
        stream = target.with_name(f"{target.name}{SUFFIX}")
        with contextlib.suppress(FileExistsError):
            if not target.exists():
                stream.touch(exist_ok=False)
                if not target.exists():
                    break
                # Another run has finished this one since: it removes its stream last.
                stream.unlink()
    return target, stream


def write_parquet(kept: Kept, target: Path, extra: Mapping[bytes, bytes]) -> None:
    """Write what is kept of a stream as a trace that appears whole, under its name."""
    about = {**kept.schema.metadata, **kept.metadata, **extra}
    schema = kept.schema.with_metadata(sealed(about, kept.schema, kept.num_rows))
    encodings = dict.fromkeys(("request", "pass", "token", "layer"), "DELTA_BINARY_PACKED")
    for field in schema:
        if pa.types.is_list(field.type):
            # Streams of first, second, ... bytes: those of small numbers vanish.
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
            for batches in _groups(kept.batches()):
                table = pa.Table.from_batches(batches).combine_chunks()
                file.write_table(table.replace_schema_metadata(schema.metadata))
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

"""Records the routing of a run into a Parquet file, row group by row group."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from lm_eval_moecache.records.arrays import FloatArray, IntArray
from lm_eval_moecache.records.ledger import RequestRecord
from lm_eval_moecache.trace.file import COLUMNS, OPTIONAL_COLUMNS, PROPOSED, proposed_column
from lm_eval_moecache.trace.header import (
    HEADER_KEY,
    REQUESTS_KEY,
    SCANS_KEY,
    Header,
    write_header,
    write_requests,
    write_scans,
)

logger = logging.getLogger(__name__)
_ROW_GROUP = 32768
_LEVEL = 9
"""Of zstd: beyond it the last percent costs more than all before."""


def prepare_folder(folder: str) -> Path:
    """Make the folder of `trace=DIR`, or say why traces cannot be written there."""
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise ValueError(f"trace={folder!r}: no folder that can be written to: {error}.") from error
    return path


class TraceWriter:
    """Writes to a temporary file beside the target, which gets its name when all is there.

    An interrupted recording therefore leaves `*.partial` and no trace. Call `begin_pass`, then
    `add` for each layer, and `close` at the end.
    """

    def __init__(self, folder: Path, stem: str, header: Header) -> None:
        self._folder = folder
        self._stem = stem
        self._layers = header.geometry.num_layers
        kinds = COLUMNS | OPTIONAL_COLUMNS
        if not header.predicted_depth:
            del kinds["predicted"]
        if not header.has_logits:
            del kinds["logits"]
        self._proposed = [proposed_column(place) for place in range(len(header.proposals))]
        kinds |= dict.fromkeys(self._proposed, PROPOSED)
        self._schema = pa.schema(list(kinds.items()), metadata={HEADER_KEY: write_header(header)})
        handle, partial = tempfile.mkstemp(prefix=f"{stem}-", suffix=".partial", dir=folder)
        os.close(handle)
        self._partial = Path(partial)
        self._file: Any = pq.ParquetWriter(
            partial,
            self._schema,
            compression="zstd",
            compression_level=_LEVEL,
            write_page_checksum=True,
            use_dictionary=["phase"],
            column_encoding=_encodings(self._schema),
        )
        self._scans: list[tuple[int, int]] = []
        self._rows: list[Mapping[str, Any]] = []
        self._num_rows = 0
        self._total_rows = 0
        self._pass: dict[str, Any] = {}
        self._scan: list[Mapping[str, Any]] | None = None
        """The layers so far of a text whose tokens are passes of their own."""

    def begin_pass(self, index: int, phase: str, requests: IntArray, tokens: IntArray) -> None:
        """Note the pass that follows: for each of its tokens, whose it is and its position."""
        if self._file is None:
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
        self._scan = None

    def begin_scan(self) -> None:
        """Make each token of the pass begun a pass of its own; its layers still come in order."""
        passes = self._pass["pass"] + np.arange(len(self._pass["pass"]), dtype=np.int32)
        self._pass["pass"] = passes
        self._scans.append((int(passes[0]), len(passes)))
        self._scan = []

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
        }
        self._num_rows += num_tokens
        (self._rows if self._scan is None else self._scan).append(rows)
        if layer != self._layers - 1:
            return
        if self._scan is not None:
            self._rows += [_row(rows, token) for token in range(num_tokens) for rows in self._scan]
        # A row group ends with a pass, so that what is on disk is whole passes.
        if self._num_rows >= _ROW_GROUP:
            self._flush()

    def close(self, requests: Sequence[RequestRecord] | None = None) -> Path | None:
        """End the file and give it its name; None where nothing was recorded. Safe to repeat.

        Without the ledger's `requests`, a reader tells them from the rows.
        """
        if self._file is None:
            return None
        self._flush()
        if self._scans:
            self._file.add_key_value_metadata({SCANS_KEY: write_scans(self._scans)})
        if requests is not None:
            self._file.add_key_value_metadata({REQUESTS_KEY: write_requests(requests)})
        self._file.close()
        self._file = None
        if not self._total_rows:
            self._partial.unlink()
            logger.warning("trace: no pass was run, so no trace was written.")
            return None
        number = 0
        while (target := self._folder / f"{self._stem}-{number:03d}.parquet").exists():
            number += 1
        os.replace(self._partial, target)
        return target

    def _flush(self) -> None:
        if not self._rows:
            return
        arrays = [self._array(field.name, field.type) for field in self._schema]
        self._file.write_table(pa.table(arrays, schema=self._schema))
        self._total_rows += self._num_rows
        self._rows, self._num_rows = [], 0

    def _array(self, column: str, kind: Any) -> Any:
        parts = [row[column] for row in self._rows]
        if column == "phase":
            sizes = [len(row["layer"]) for row in self._rows]
            return pa.array(np.repeat(np.asarray(parts, dtype=object), sizes), kind)
        if not pa.types.is_list(kind):
            return pa.array(np.concatenate(parts), kind)
        if column in self._proposed:
            return self._event_lists(parts, kind)
        if any(part is None for part in parts):
            return pa.nulls(self._num_rows, kind)
        widths = np.concatenate([np.full(len(part), part.shape[1]) for part in parts])
        offsets: npt.NDArray[np.int32] = np.zeros(len(widths) + 1, dtype=np.int32)
        np.cumsum(widths, out=offsets[1:])
        values = np.concatenate([part.ravel() for part in parts])
        return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values, kind.value_type))

    def _event_lists(self, parts: Sequence[Sequence[int]], kind: Any) -> Any:
        """Return a column whose event's values stand in the event's first row."""
        lengths = np.zeros(self._num_rows, dtype=np.int64)
        sizes = np.asarray([len(row["layer"]) for row in self._rows])
        lengths[np.cumsum(sizes) - sizes] = [len(part) for part in parts]
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        values = np.asarray([key for part in parts for key in part], dtype=np.int32)
        return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values, kind.value_type))


def _encodings(schema: Any) -> dict[str, str]:
    """Split numbers into streams of first, second, ... bytes: those of small numbers vanish."""
    chosen = dict.fromkeys(("request", "pass", "token", "layer"), "DELTA_BINARY_PACKED")
    for field in schema:
        if pa.types.is_list(field.type):
            chosen[f"{field.name}.list.element"] = "BYTE_STREAM_SPLIT"
    return chosen


def _row(rows: Mapping[str, Any], token: int) -> Mapping[str, Any]:
    """Return one token of a block of rows."""
    one = slice(token, token + 1)
    whole = ("phase",)
    return {n: v if n in whole or v is None else v[one] for n, v in rows.items()}

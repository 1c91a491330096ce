"""Records the routing of a run: finished requests are on disk as soon as they are finished."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lm_eval_moecache.records.arrays import FloatArray, IntArray
from lm_eval_moecache.records.files import check_writable
from lm_eval_moecache.records.ledger import GENERATE, RequestRecord
from lm_eval_moecache.trace.drafting import DRAFT_COLUMNS, NO_DRAFTING, Drafting
from lm_eval_moecache.trace.header import (
    DRAFTS_KEY,
    HEADER_KEY,
    REQUESTS_KEY,
    SCANS_KEY,
    Header,
    Settled,
    sealed,
    write_header,
    write_requests,
    write_rows,
)
from lm_eval_moecache.trace.partial import ROW_GROUP, mark, recover, reserve, write_parquet
from lm_eval_moecache.trace.rows import COLUMNS, OPTIONAL_COLUMNS, PROPOSED, proposed_column

logger = logging.getLogger(__name__)


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
    requests, and `close` at the end. A killed recording leaves its stream, from which the next one
    in the folder makes a trace of what was kept (`recover`).
    """

    def __init__(self, folder: Path, stem: str, header: Header) -> None:
        recover(folder)
        self._layers = header.geometry.num_layers
        kinds = COLUMNS | OPTIONAL_COLUMNS
        if not header.predicted_depth:
            del kinds["predicted"]
        if not header.has_logits:
            del kinds["logits"]
        self._proposed = [proposed_column(place) for place in range(len(header.proposals))]
        kinds |= dict.fromkeys(self._proposed, PROPOSED)
        # Columns of lists that stand in an event's first row.
        self._drafting = DRAFT_COLUMNS if header.draft is not None else ()
        kinds |= dict.fromkeys(self._drafting, PROPOSED)
        schema = pa.schema(list(kinds.items()))
        self._schema = schema.with_metadata(
            sealed({HEADER_KEY: write_header(header)}, schema, num_rows=0)
        )
        self._target, self._raw = reserve(folder, stem)
        self._partial = Path(self._raw.name)
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        self._file: Any = pa.ipc.new_stream(self._raw, self._schema, options=options)
        self._scans: list[tuple[int, int]] = []
        self._drafts: list[tuple[int, int, int]] = []
        self._kept_scans = self._kept_drafts = 0
        self._rows: list[Mapping[str, Any]] = []
        self._num_rows = 0
        self._num_batches = self._kept = 0
        self._num_passes = self._kept_passes = 0
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
        self._num_rows += num_tokens
        (self._rows if self._scan is None else self._scan).append(rows)
        if layer != self._layers - 1:
            return
        if self._scan is not None:
            self._rows += [_row(rows, token) for token in range(num_tokens) for rows in self._scan]
        # A batch ends with a pass, so that what is on disk is whole passes.
        if self._num_rows >= ROW_GROUP:
            self._flush()

    def keep(self, requests: Sequence[RequestRecord] = ()) -> None:
        """Note that all passes so far are of finished requests: a kill loses none of them."""
        if self._file is None:
            return
        self._requests = requests
        self._flush(mark(self._scans[self._kept_scans :], self._drafts[self._kept_drafts :]))
        self._kept, self._kept_passes = self._num_batches, self._num_passes
        self._kept_scans, self._kept_drafts = len(self._scans), len(self._drafts)

    def close(self, requests: Sequence[RequestRecord] | None = None) -> Path | None:
        """End the file and give it its name; None where nothing was recorded. Safe to repeat.

        Without the ledger's `requests`, a reader tells them from the rows.
        """
        if self._file is None:
            return None
        self._flush(mark([]))
        extra = self._told(requests, self._scans, self._drafts)
        return self._finish(self._num_batches, extra)

    def close_interrupted(self) -> Path | None:
        """As `close`, with the passes of finished requests only."""
        if self._file is None:
            return None
        finished = [
            each
            for each in self._requests
            if each.passes
            and each.passes[-1].index < self._kept_passes
            and (each.output_tokens is not None or each.kind != GENERATE)
        ]
        try:
            scans, drafts = self._scans[: self._kept_scans], self._drafts[: self._kept_drafts]
            target = self._finish(self._kept, self._told(finished or None, scans, drafts))
        except (OSError, pa.ArrowException) as error:
            logger.warning("trace: %s keeps what was finished: %s.", self._partial, error)
            return None
        if target is not None:
            logger.warning("trace: %s holds the requests that were finished.", target)
        return target

    def _told(
        self,
        requests: Sequence[RequestRecord] | None,
        scans: Sequence[tuple[int, int]],
        drafts: Settled,
    ) -> dict[bytes, bytes]:
        """Return the metadata that is known in the end."""
        told = {} if requests is None else {REQUESTS_KEY: write_requests(requests)}
        if scans:
            told[SCANS_KEY] = write_rows(scans)
        if drafts:
            told[DRAFTS_KEY] = write_rows(drafts)
        return told

    def _finish(self, num_batches: int, told: Mapping[bytes, bytes]) -> Path | None:
        # An interrupt on the way leaves all as it is for the next call, at the process' end.
        self._file.close()
        if num_batches:
            write_parquet(self._partial, self._target, num_batches, told)
        self._file = None
        self._drop()
        if num_batches:
            return self._target
        logger.warning("trace: no pass was run, so no trace was written.")
        return None

    def _drop(self) -> None:
        # Unlinked first: as long as it is open its lock keeps others from taking it for dead.
        self._partial.unlink()
        self._raw.close()

    def _flush(self, told: Mapping[bytes, bytes] | None = None) -> None:
        if not self._rows and (told is None or self._num_batches == self._kept):
            return
        arrays = [self._array(field.name, field.type) for field in self._schema]
        batch = pa.record_batch(arrays, schema=self._schema)
        try:
            self._file.write_batch(batch, custom_metadata=told)
        except OSError as error:
            raise ValueError(
                f"trace: {self._partial} cannot be written: {error.strerror or error}. What was "
                "finished before is kept in it."
            ) from error
        self._num_batches += 1
        if self._pass:
            self._num_passes = int(self._pass["pass"].max(initial=-1)) + 1
        self._rows, self._num_rows = [], 0

    def _array(self, column: str, kind: Any) -> Any:
        parts = [row[column] for row in self._rows]
        if not parts:  # a batch that only carries a mark
            return pa.array([], kind)
        if column == "phase":
            sizes = [len(row["layer"]) for row in self._rows]
            return pa.array(np.repeat(np.asarray(parts, dtype=object), sizes), kind)
        if not pa.types.is_list(kind):
            return pa.array(np.concatenate(parts), kind)
        if column in self._proposed or column in self._drafting:
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


def _row(rows: Mapping[str, Any], token: int) -> Mapping[str, Any]:
    """Return one token of a block of rows."""
    one = slice(token, token + 1)
    whole = ("phase",)
    return {n: v if n in whole or v is None else v[one] for n, v in rows.items()}

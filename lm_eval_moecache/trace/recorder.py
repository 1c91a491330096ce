"""Records the routing of a run: the hooks of a wrapped model hand over each event as it happens.

Each request is on disk as soon as it finishes. Shapes: T valid tokens of a pass, E experts, K
experts per token.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from lm_eval_moecache.records.arrays import FloatArray, IntArray
from lm_eval_moecache.records.event import DECODE, PHASES, Event
from lm_eval_moecache.records.files import check_writable
from lm_eval_moecache.records.geometry import Draft, Geometry
from lm_eval_moecache.records.ledger import GENERATE, RequestRecord
from lm_eval_moecache.trace.file import (
    DRAFTS_MARK,
    ROW_GROUP,
    SCANS_MARK,
    SUFFIX,
    batch_of,
    finished_part_of,
    schema_of,
    write_parquet,
)
from lm_eval_moecache.trace.header import REQUESTS_KEY, Header, write_requests
from lm_eval_moecache.trace.trace import DRAFT_COLUMNS, NO_REQUEST

if TYPE_CHECKING:
    from torch import Tensor

    from lm_eval_moecache.algorithms.policy import Choice

logger = logging.getLogger(__name__)
MOST_STEM = 100
"""Characters of a trace's name: file systems limit names to 255 bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Detail:
    """What a recording keeps besides the experts. The default serves every possible replay.

    Everything kept is exact: a replay that needs no more reproduces the live run's metrics.

    A prefetcher sees only the events, never the cache: where a few prefetchers are all that will be
    replayed, their proposals replace the predictions behind them, at a tenth of the size.
    """

    weights: bool = True
    logits: bool = True
    predictions: bool = True
    """Whether to keep predictions of the gates (or the policy's predictor), for every expert."""
    shadows: tuple[tuple[Choice, int, str], ...] = ()
    """Prefetchers whose proposals are kept, each with its seed and its `cache_reset`."""
    criticals: tuple[int | None, ...] | None = None
    """Experts per layer that the draft-stage prefetchers read; an entry of None stands for the
    default's most, the top-k. None instead of a tuple keeps every expert's rank."""

    def ranked(self, geometry: Geometry) -> int:
        """Return how many experts to keep of a draft's prediction for one layer."""
        if self.criticals is None:
            return geometry.num_experts
        return max((geometry.top_k if n is None else n for n in self.criticals), default=0)


FULL = Detail()


def needs_shadow(choice: Choice) -> bool:
    """Whether a prefetcher's proposals must be recorded because it sees more than the experts."""
    algorithm = choice.algorithm
    if not algorithm.is_active or algorithm.is_offline:
        return False
    # An instance may look further ahead than its class declares; an outside class may do anything.
    depth = algorithm.depth or choice.parameters.get("depth", 0)
    sees_more = (
        depth or algorithm.uses_predictor or algorithm.predicts_pass or algorithm.uses_logits
    )
    return bool(sees_more or choice.is_outside)


def identity(choice: Choice, seed: int, predictor: str, cache_reset: str) -> str:
    """Return a prefetcher's JSON identity: all that determines its proposals in a given run.

    One that remembers keeps a state from request to request, unless `cache_reset=request` gives it
    a new one.
    """
    fields: dict[str, Any] = {**choice.as_dict(), "predictor": predictor}
    if cache_reset != "never" and choice.algorithm.remembers:
        fields["cache_reset"] = cache_reset
    if choice.algorithm.draws:
        fields["seed"] = seed
    return json.dumps(fields, sort_keys=True)


Rows = Callable[[Any], Any]
Predict = Callable[[int], FloatArray]


class NotedPass(NamedTuple):
    """What a recording keeps of a pass that was computed together with others' passes."""

    phase: str
    positions: IntArray
    events: list[tuple[Event, FloatArray | None, Mapping[int, FloatArray]]]
    """By layer: the event, its logits [tokens, experts], and later layers' by their own gates."""


class Propose(Protocol):
    """A shadow prefetcher (`model/shadow.py`): its proposals are recorded, never fetched.

    It looks `depth` layers ahead, where `reads_hidden` at texts or hidden states itself. It
    receives the tokens of a pass [rows, length], then each event with its logits, for which it
    returns the keys it proposes: `rows` picks the valid tokens of hidden states, `predict` returns
    a later layer's gate logits. `restart` begins another request, under `cache_reset=request`.
    """

    @property
    def depth(self) -> int: ...

    @property
    def reads_hidden(self) -> bool: ...

    def restart(self) -> None: ...

    def begin_pass(self, input_ids: Tensor, past_length: int, valid: Any) -> None: ...

    def __call__(
        self, event: Event, hidden: Any, rows: Rows | None, predict: Predict
    ) -> Sequence[int]: ...


def positions_of(input_ids: Tensor, mask: Tensor | None, past_length: int) -> IntArray:
    """Return each token's position in its sequence [rows, length], not counting padding."""
    rows, length = input_ids.shape
    positions = np.arange(past_length, past_length + length)[None, :].repeat(rows, axis=0)
    if mask is not None and mask.dim() == 2:
        # Left padding shifts a row's tokens to the right of their position.
        padding = (mask.cumsum(-1) == 0).sum(-1, keepdim=True)
        positions = np.maximum(positions - padding.cpu().numpy(), 0)
    return positions


class Recorder:
    """Records one run. `row_requests` holds the request of each row in the next pass' batch.

    The gates' predictions are recorded at least one layer ahead, even if the running policy does
    not use them, so that the common prefetchers can be replayed. A policy's trained predictor
    (digest `predicted_by`) replaces them with its own.
    """

    def __init__(
        self,
        folder: str,
        stem: str,
        geometry: Geometry,
        *,
        seed: int,
        depth: int,
        predicted_by: str,
        detail: Detail,
        shadows: Mapping[str, Propose],
        draft: Draft | None,
    ) -> None:
        self.depth = min(max(depth, 1), geometry.num_layers - 1) if detail.predictions else 0
        self.row_requests: list[int] = []
        self._geometry = geometry
        self._by_gates = not predicted_by
        self._detail = detail
        self._shadows = tuple(shadows.values())
        ranked = 0 if draft is None or not draft.targets else detail.ranked(geometry)
        self.draft_notes = DraftNotes(ranked)
        """Collects the draft model's work until the next pass."""
        header = Header(
            geometry=geometry,
            seed=seed,
            predicted_depth=self.depth,
            predicted_by=predicted_by if self.depth else "",
            proposals=tuple(shadows),
            has_logits=detail.logits,
            draft=draft,
            ranked=ranked,
        )
        name = re.sub(r"[^\w.-]+", "-", stem.replace("%", "pct"))
        self.writer = TraceWriter(check_folder(folder), name, header)
        """Also receives verified drafts (`settle`) and finished requests (`keep`)."""
        # However the run ends, short of a kill, its finished requests become a trace.
        weakref.finalize(self, self.writer.close_interrupted)

    def begin_pass(
        self,
        index: int,
        phase: str,
        input_ids: Tensor,
        mask: Tensor | None,
        past_length: int,
        valid: Any,
        is_scan: bool,
    ) -> None:
        """Note the request and position of each token of this pass; `valid` drops padding.

        In a scanned text (`scoring=scan`) each token is a decode pass of its own.
        """
        for shadow in self._shadows:
            shadow.begin_pass(input_ids, past_length, valid)
        rows, length = input_ids.shape
        positions = positions_of(input_ids, mask, past_length)
        owners = np.full(rows, NO_REQUEST)
        if self.row_requests:
            # Beam search has several rows per request.
            owners = np.repeat(self.row_requests, rows // len(self.row_requests))
        requests, tokens = owners.repeat(length), positions.ravel()
        if valid is not None:
            requests, tokens = requests[valid], tokens[valid]
        notes = self.draft_notes.take()
        self.writer.begin_pass(index, phase, requests, tokens, notes, is_scan=is_scan)

    @property
    def reach(self) -> int:
        """How many layers ahead the gates are asked for the recording alone."""
        by_gates = self.depth if self._by_gates else 0
        return max([by_gates, *(shadow.depth for shadow in self._shadows)])

    @property
    def wants_logits(self) -> bool:
        """Whether the routers' logits are kept, or read by a shadow prefetcher."""
        return self._detail.logits or bool(self._shadows)

    @property
    def reads_hidden(self) -> bool:
        """Whether a shadow prefetcher reads more of a pass than gates make of it."""
        return any(shadow.reads_hidden for shadow in self._shadows)

    def restart(self) -> None:
        """Begin another request: a new state for the shadows under `cache_reset=request`."""
        for shadow in self._shadows:
            shadow.restart()

    def add_request(self, request: int, first: int, passes: Sequence[NotedPass]) -> None:
        """Record the passes of a request that was computed together with others.

        `first` is the ledger's number of its first pass; the others follow it.
        """
        for index, noted in enumerate(passes, first):
            requests = np.full(len(noted.positions), request)
            drafting = self.draft_notes.take()
            self.writer.begin_pass(index, noted.phase, requests, noted.positions, drafting)
            for event, logits, by_layer in noted.events:
                ahead = {layer: values.astype(np.float32) for layer, values in by_layer.items()}
                self.add(event._replace(passes=[index]), logits, ahead.__getitem__)

    def add(
        self,
        event: Event,
        logits: Any,
        predict: Predict,
        hidden: Tensor | None = None,
        rows: Rows | None = None,
    ) -> None:
        """Record one event before the policy sees it.

        `logits` are float16 [tokens, experts]; `predict` returns a later layer's. Shadows that read
        `hidden` states pick the valid tokens by `rows`.
        """
        ahead = range(event.layer + 1, event.layer + 1 + self.depth)
        predicted = list(event.predicted.values()) if self.depth else []
        if self._by_gates:
            predicted = [
                event.predicted[layer] if layer in event.predicted else predict(layer)
                for layer in ahead
                if layer < self._geometry.num_layers
            ]
        proposed = []
        if self._shadows:
            with_logits = event._replace(logits=logits.astype(np.float32))
            proposed = [propose(with_logits, hidden, rows, predict) for propose in self._shadows]
        self.writer.add(
            event.layer,
            event.experts,
            event.weights if self._detail.weights else None,
            logits if self._detail.logits else None,
            predicted,
            proposed,
        )


# --- from rows to disk ---


Drafting = tuple[Sequence[int], Sequence[int], Sequence[int]]
"""The forwards of a draft before one pass, flattened: the values of DRAFT_COLUMNS."""
_NO_DRAFTING: Drafting = ((), (), ())


class DraftNotes:
    """Collects the calls of a draft stage until the pass they belong to begins.

    A prediction is kept as its `ranked` likeliest experts in order: all that a prefetcher with
    `DraftStagePrefetch.by_order` reads.
    """

    def __init__(self, ranked: int) -> None:
        self.ranked = ranked
        self.begin()

    def begin(self) -> None:
        """Start over, for the drafting of another pass."""
        self._tokens: list[int] = []
        self._experts: list[int] = []
        self._order: list[int] = []

    def dense(self, layer: int, num_tokens: int) -> None:
        """Note a forward of `num_tokens` tokens, once, at its first layer."""
        if layer == 0:
            self._tokens.append(num_tokens)

    def predict(self, logits: FloatArray) -> None:
        """Note the likeliest experts by a gate's logits [1, E]; call in the draft's layer order."""
        self._order += np.argsort(-logits[0], kind="stable")[: self.ranked].tolist()

    def experts(self, num_experts: int) -> None:
        """Note how many unique experts a layer of the draft needed."""
        self._experts.append(num_experts)

    def take(self) -> Drafting:
        """Return the drafting since `begin`, and start over."""
        drafting = self._tokens, self._experts, self._order
        self.begin()
        return drafting


def check_folder(folder: str) -> Path:
    """Check the folder of `trace=DIR` and make none.

    ValueError where it cannot be made, or traces cannot be written to it.
    """
    path = Path(folder)
    try:
        check_writable(path)
        if path.exists() and not path.is_dir():
            raise NotADirectoryError("it is a file")
    except (OSError, ValueError) as error:  # ValueError: a null byte
        raise ValueError(f"trace={folder!r}: this folder cannot be written to: {error}.") from error
    return path


class TraceWriter:
    """Writes to a stream next to the target; the target appears under its name once complete.

    Call `begin_pass`, then `add` for each layer, `keep` whenever all requests so far are finished,
    and `close` at the end. A killed recording leaves its stream, which can be read as a trace of
    the passes kept.
    """

    def __init__(self, folder: Path, stem: str, header: Header) -> None:
        self._last = header.geometry.num_layers - 1
        self._proposed = [f"proposed_{place}" for place in range(len(header.proposals))]
        self._schema = schema_of(header)
        folder.mkdir(parents=True, exist_ok=True)
        self._target, self._partial = reserve(folder, stem)
        self._file: Any = pa.OSFile(str(self._partial), "wb")
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        self._stream: Any = pa.ipc.new_stream(self._file, self._schema, options=options)
        self._events: list[Mapping[str, Any]] = []
        self._num_rows = 0
        # Since the last mark.
        self._scans: list[tuple[int, int]] = []
        self._drafts: list[tuple[int, int, int]] = []
        self._is_marked = True
        # Finished requests and their passes.
        self._kept_passes = 0
        self._requests: Sequence[RequestRecord] = ()
        self._pass: dict[str, Any] = {}

    def begin_pass(
        self,
        index: int,
        phase: str,
        requests: IntArray,
        tokens: IntArray,
        drafting: Drafting = _NO_DRAFTING,
        *,
        is_scan: bool = False,
    ) -> None:
        """Note the pass that follows: the request and position of each of its tokens.

        `drafting` is the draft model's work for it. In a scan each token is a decode pass of its
        own; the layers still come in order.
        """
        if self._stream is None:
            raise ValueError(
                "trace: the recording of this model has been closed. Make a new model for a new "
                "run: a replay begins with an empty cache."
            )
        passes = np.full(len(tokens), index, dtype=np.int32)
        if is_scan:
            passes += np.arange(len(tokens), dtype=np.int32)
            self._scans.append((index, len(tokens)))
        self._pass = {
            "request": requests.astype(np.int32),
            "pass": passes,
            "phase": np.full(len(tokens), PHASES.index(DECODE if is_scan else phase)),
            "token": tokens.astype(np.int32),
        }
        self._drafted = drafting

    def settle(self, drafted: int, accepted: int) -> None:
        """Note how many drafted tokens the current pass verified, and how many it accepted."""
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
        """Record one event: the router's experts [tokens, top_k], before any policy changed them.

        `proposed` holds the keys that each prefetcher of the header proposes at this event.
        """
        num_tokens = len(experts)
        no_predictions = np.empty((num_tokens, 0), dtype=np.float16)
        self._events.append(
            {
                **self._pass,
                "layer": np.full(num_tokens, layer, dtype=np.int16),
                # Copies: the arrays may be views of what the next event overwrites.
                "experts": experts.astype(np.int16),
                "weights": None if weights is None else weights.astype(np.float32),
                "logits": None if logits is None else logits.astype(np.float16),
                "predicted": np.concatenate([no_predictions, *predicted], axis=1, dtype=np.float16),
                **dict(zip(self._proposed, proposed, strict=True)),
                **dict(zip(DRAFT_COLUMNS, self._drafted, strict=True)),
            }
        )
        self._drafted = _NO_DRAFTING
        self._is_marked = False
        self._num_rows += num_tokens
        # A batch ends with a pass, so that the disk holds whole passes.
        if layer == self._last and self._num_rows >= ROW_GROUP:
            self._flush()

    def keep(self, requests: Sequence[RequestRecord] = ()) -> None:
        """Mark all passes so far as those of finished requests: a kill loses none of them."""
        if self._stream is None or self._is_marked:
            return
        marks = {SCANS_MARK: self._scans, DRAFTS_MARK: self._drafts}
        self._flush({key: json.dumps(new).encode() for key, new in marks.items()})
        self._kept_passes = int(self._pass["pass"].max(initial=-1)) + 1
        self._requests = requests
        self._scans, self._drafts, self._is_marked = [], [], True

    def close(self, requests: Sequence[RequestRecord] | None = None) -> Path | None:
        """Finish the file and return its path, or None where nothing was recorded. Safe to repeat.

        Without the ledger's `requests`, a reader infers them from the rows.
        """
        if self._stream is None:
            return None
        self.keep()
        target = self._finish(requests)
        if target is None:
            logger.warning("trace: no pass was run, so no trace was written.")
        return target

    def close_interrupted(self) -> Path | None:
        """As `close`, but with the passes of finished requests only."""
        if self._stream is None or not self._partial.exists():
            return None
        finished = [
            request
            for request in self._requests
            if request.passes
            and request.passes[-1].index < self._kept_passes
            and (request.output_tokens is not None or request.kind != GENERATE)
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
        """Make a trace of the finished batches. An interrupted call can be repeated."""
        if not self._file.closed:
            self._stream.close()
            self._file.close()
        done = finished_part_of(self._partial)
        # An existing target means that an interrupt hit between writing it and the unlink.
        if done.num_rows and not self._target.exists():
            extra = {} if requests is None else {REQUESTS_KEY: write_requests(requests)}
            write_parquet(self._target, done.schema_arrow, done.batches(), done.num_rows, extra)
        self._partial.unlink()
        self._stream = None
        return self._target if done.num_rows else None

    def _flush(self, marks: Mapping[bytes, bytes] | None = None) -> None:
        batch = batch_of(self._schema, self._events)
        if self._scans:
            # A scanned text came layer by layer, and each of its tokens is a pass.
            order = np.lexsort((batch["layer"].to_numpy(), batch["pass"].to_numpy()))
            batch = batch.take(pa.array(order))
        try:
            self._stream.write_batch(batch, custom_metadata=marks)
        except OSError as error:
            raise ValueError(
                f"trace: {self._partial} cannot be written: {error.strerror or error}. What was "
                "finished before is kept in it."
            ) from error
        self._events, self._num_rows = [], 0


def reserve(folder: Path, stem: str) -> tuple[Path, Path]:
    """Return paths of the next trace and of its newly created stream, unique to this run."""
    for number in count():
        target = folder / f"{stem[:MOST_STEM]}-{number:03d}.parquet"
        stream = target.with_name(f"{target.name}{SUFFIX}")
        with contextlib.suppress(FileExistsError):
            if not target.exists():
                stream.touch(exist_ok=False)
                if not target.exists():
                    break
                # Another run has just finished this trace: a run removes its stream last.
                stream.unlink()
    return target, stream

"""Turns what the hooks of a wrapped model see into the rows of a routing trace, in some detail.

Shapes: T valid tokens of a pass, E experts, K experts per token.
"""

from __future__ import annotations

import json
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from lm_eval_moecache.records.arrays import FloatArray, IntArray
from lm_eval_moecache.records.draft import Draft
from lm_eval_moecache.records.event import DECODE, Event
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.ledger import RequestRecord
from lm_eval_moecache.trace.columns import NO_REQUEST
from lm_eval_moecache.trace.drafting import DraftNotes
from lm_eval_moecache.trace.header import Header
from lm_eval_moecache.trace.writer import TraceWriter, prepare_folder

if TYPE_CHECKING:
    from torch import Tensor


class Onlooker(Protocol):
    """A prefetch algorithm's choice, which can be built for a model."""

    @property
    def name(self) -> str: ...
    @property
    def algorithm(self) -> Any: ...
    @property
    def parameters(self) -> Mapping[str, Any]: ...
    def build(self, geometry: Geometry, seed: int) -> Any: ...
    def as_dict(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Detail:
    """What a recording keeps beside the experts. The default serves any replay that a trace can.

    Whatever is kept is exact: a replay that asks for no more gives a live run's figures.

    A prefetcher sees the events alone, never the cache: where only what some prefetchers propose is
    wanted, their proposals replace the predictions they were made from, at a tenth of the size.
    """

    weights: bool = True
    logits: bool = True
    predictions: bool = True
    """Whether to keep predictions of the gates (or the policy's predictor), for every expert."""
    onlookers: tuple[tuple[Onlooker, int], ...] = ()
    """Prefetchers whose proposals are kept, each with its seed."""
    criticals: tuple[int | None, ...] | None = None
    """How many experts a layer prefetchers look at that work while a draft drafts; an entry of None
    is the most that the default takes, the top-k. None in place of all: every expert's rank."""

    def ranked(self, geometry: Geometry) -> int:
        """Return how many experts to keep of what a draft foretells of a layer."""
        if self.criticals is None:
            return geometry.num_experts
        return max((geometry.top_k if n is None else n for n in self.criticals), default=0)


FULL = Detail()


def looks_on(choice: Onlooker) -> bool:
    """Whether a prefetcher's proposals have to be recorded: it sees more than the experts."""
    algorithm = choice.algorithm
    if not algorithm.is_active or algorithm.is_offline:
        return False
    # An instance may look further ahead than its class says. Of an outside class nothing is known.
    depth = algorithm.depth or choice.parameters.get("depth", 0)
    sees_more = depth or algorithm.uses_predictor or algorithm.foresees or algorithm.uses_logits
    return bool(sees_more or "." in choice.name)


def identity(choice: Onlooker, seed: int, predictor: str) -> str:
    """Name a prefetcher by all that its proposals follow from beside the run itself."""
    named: dict[str, Any] = {**choice.as_dict(), "predictor": predictor}
    if choice.algorithm.draws:
        named["seed"] = seed
    return json.dumps(named, sort_keys=True)


Rows = Callable[[Any], Any]
Predict = Callable[[int], FloatArray]


class Propose(Protocol):
    """A prefetcher that looks on."""

    def begin_pass(self, input_ids: Tensor, past_length: int, valid: Any) -> None:
        """See the tokens of a pass [rows, length], before its first event."""

    def __call__(self, event: Event, hidden: Any, rows: Rows, predict: Predict) -> Sequence[int]:
        """Return the keys it proposes at an event that has logits.

        `rows` picks the valid tokens of hidden states, `predict` asks a later layer's gate.
        """


_NONE: Mapping[str, Propose] = MappingProxyType({})


def positions_of(input_ids: Tensor, mask: Tensor | None, past_length: int) -> IntArray:
    """Return where the tokens of a pass stand in their sequences [rows, length], padding aside."""
    rows, length = input_ids.shape
    positions = np.arange(past_length, past_length + length)[None, :].repeat(rows, axis=0)
    if mask is not None and mask.dim() == 2:
        # Padding on the left moves a row's tokens to the right of their position.
        padding = (mask.cumsum(-1) == 0).sum(-1, keepdim=True)
        positions = np.maximum(positions - padding.cpu().numpy(), 0)
    return positions


class Recorder:
    """Records one run. `row_requests` says whose each row of the next pass' batch is.

    The gates' predictions are recorded at least one layer ahead, whether the running policy asks
    for them or not, so that a trace can be replayed with the common prefetchers. Where the policy
    has a predictor (whose digest is `predicted_by`), its predictions stand in their place.
    """

    def __init__(
        self,
        folder: str,
        stem: str,
        geometry: Geometry,
        *,
        seed: int,
        depth: int,
        predicted_by: str = "",
        detail: Detail = FULL,
        onlookers: Mapping[str, Propose] = _NONE,
        draft: Draft | None = None,
    ) -> None:
        self.depth = min(max(depth, 1), geometry.num_layers - 1) if detail.predictions else 0
        self.row_requests: list[int] = []
        self._geometry = geometry
        self._by_gates = not predicted_by
        self._detail = detail
        self._onlookers = tuple(onlookers.values())
        ranked = 0 if draft is None or not draft.targets else detail.ranked(geometry)
        self.draft_notes = DraftNotes(ranked)
        """To be told what the draft does."""
        header = Header(
            geometry=geometry,
            seed=seed,
            predicted_depth=self.depth,
            predicted_by=predicted_by if self.depth else "",
            proposals=tuple(onlookers),
            has_logits=detail.logits,
            draft=draft,
            ranked=ranked,
        )
        name = re.sub(r"[^\w.-]+", "-", stem.replace("%", "pct"))
        self._writer = TraceWriter(prepare_folder(folder), name, header)
        # However the run ends, short of a kill: what is finished becomes a trace.
        self._at_end = weakref.finalize(self, self._writer.close_interrupted)

    def begin_pass(
        self,
        index: int,
        phase: str,
        input_ids: Tensor,
        mask: Tensor | None,
        past_length: int,
        valid: Any,
    ) -> None:
        """Note whose the tokens of this pass are and where they stand; `valid` drops padding."""
        for onlooker in self._onlookers:
            onlooker.begin_pass(input_ids, past_length, valid)
        rows, length = input_ids.shape
        positions = positions_of(input_ids, mask, past_length)
        owners = np.full(rows, NO_REQUEST)
        if self.row_requests:
            # A search with several beams has as many rows for each request.
            owners = np.repeat(self.row_requests, rows // len(self.row_requests))
        requests, tokens = owners.repeat(length), positions.ravel()
        if valid is not None:
            requests, tokens = requests[valid], tokens[valid]
        self._writer.begin_pass(index, phase, requests, tokens, self.draft_notes.take())

    def begin_scan(self, first_index: int, input_ids: Tensor, valid: Any) -> None:
        """Note a text of which each token is a decode pass of its own (`scoring=scan`)."""
        self.begin_pass(first_index, DECODE, input_ids, None, 0, valid)
        self._writer.begin_scan()

    def add(
        self, event: Event, hidden: Tensor, logits: Tensor, rows: Rows, predict: Predict
    ) -> None:
        """Record one event before the policy sees it; `rows` picks the valid tokens."""
        ahead = range(event.layer + 1, event.layer + 1 + self.depth)
        predicted: Sequence[FloatArray] = [
            event.predicted[layer] if layer in event.predicted else predict(layer)
            for layer in ahead
            if layer < self._geometry.num_layers
        ]
        if self.depth and not self._by_gates:
            predicted = list(event.predicted.values())
        seen: Any = rows(logits.half()) if self._detail.logits or self._onlookers else None
        proposed = []
        if self._onlookers:
            looked = event._replace(logits=seen.astype(np.float32))
            proposed = [propose(looked, hidden, rows, predict) for propose in self._onlookers]
        self._writer.add(
            event.layer,
            event.experts,
            event.weights if self._detail.weights else None,
            seen if self._detail.logits else None,
            predicted,
            proposed,
        )

    def settle(self, drafted: int, accepted: int) -> None:
        """Note how many tokens the last pass was given to verify, and how many were right."""
        self._writer.settle(drafted, accepted)

    def keep(self, requests: Sequence[RequestRecord]) -> None:
        """Note that the requests served so far are finished; `requests` is the ledger's list."""
        self._writer.keep(requests)

    def close(self, requests: Sequence[RequestRecord]) -> Path | None:
        """Finish the file; return its path, or None where nothing was recorded."""
        return self._writer.close(requests)

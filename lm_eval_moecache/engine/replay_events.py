"""What a replay shows of a trace: its events, and what a prefetcher proposes at them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise, repeat

import numpy as np

from lm_eval_moecache.algorithms.prefetch.base import PrefetchAlgorithm
from lm_eval_moecache.records.arrays import FloatArray, IntArray, softmax_weights
from lm_eval_moecache.records.event import (
    NO_PREDICTIONS,
    PHASES,
    UNSEEN_EXPERTS,
    UNSEEN_SCORES,
    Event,
)
from lm_eval_moecache.records.predictor import target_of
from lm_eval_moecache.trace.trace import Halves, Proposed, Trace


@dataclass(frozen=True, slots=True)
class EventFields:
    """What the algorithms of a policy want to see beside the keys of an event."""

    weights: bool
    logits: bool
    depth: int
    predicted_by: str
    """Digest of the predictor that predictions have to be of; empty for the gates."""
    recorded: Proposed | None = None
    """What the prefetcher proposed in the recorded run, so that it need not see a thing."""
    asked_ahead: PrefetchAlgorithm | None = None
    """The prefetcher, where nobody else looks at predictions."""


def proposed_arrays(
    trace: Trace, needs: EventFields, first: int, last: int
) -> tuple[IntArray, IntArray] | None:
    """Return what is proposed at each event of passes `first` to `last`, the latter left out.

    That is all keys, and where those of each event begin. None where each event has to be shown to
    the prefetcher when its turn comes: it looks at more than predictions, or a pass has several
    tokens.
    """
    num_layers = trace.geometry.num_layers
    if needs.recorded is not None:
        bounds = needs.recorded.bounds[first * num_layers : last * num_layers + 1]
        keys: IntArray = needs.recorded.keys[bounds[0] : bounds[-1]].astype(np.int64)
        return keys, bounds - bounds[0]
    prefetch, predicted = needs.asked_ahead, trace.predicted
    if prefetch is None or predicted is None or not needs.depth:
        return None
    rows = trace.row_bounds[first * num_layers : last * num_layers + 1]
    if rows[-1] - rows[0] != len(rows) - 1:
        return None
    offsets = predicted.offsets[rows]
    sizes = np.diff(offsets).reshape(-1, num_layers)
    if (sizes != sizes[0]).any():
        return None
    by_pass = predicted.values[offsets[0] : offsets[-1]].reshape(last - first, -1)
    return _asked_ahead(prefetch, by_pass, sizes[0].tolist(), min(needs.depth, predicted.depth))


def _asked_ahead(
    prefetch: PrefetchAlgorithm, by_pass: Halves, sizes: Sequence[int], depth: int
) -> tuple[IntArray, IntArray] | None:
    """Ask for one layer at a time, over all passes [passes, values]; `sizes` are its layers'."""
    num_passes, num_layers = len(by_pass), len(sizes)
    num_experts = prefetch.geometry.num_experts
    counts = np.zeros((num_passes, num_layers, depth), np.int64)
    found: list[tuple[int, int, IntArray]] = []
    start = 0
    for layer, size in enumerate(sizes):
        for ahead in range(min(depth, size // num_experts)):
            column = start + ahead * num_experts
            logits = by_pass[:, column : column + num_experts].astype(np.float32)
            target = (layer + 1 + ahead) % num_layers
            proposed = prefetch.propose_arrays([target] * num_passes, logits)
            if proposed is None:
                return None
            keys, counts[:, layer, ahead] = proposed
            found.append((layer, ahead, keys))
        start += size
    ends = counts.cumsum().reshape(counts.shape)
    merged = np.zeros(counts.sum(), np.int64)
    for layer, ahead, keys in found:
        own = counts[:, layer, ahead]
        begin = ends[:, layer, ahead] - own.cumsum()
        merged[np.arange(len(keys)) + np.repeat(begin, own)] = keys
    return merged, np.append(0, ends[:, :, -1]) if depth else np.zeros(1, np.int64)


def events_of(
    trace: Trace, needs: EventFields, first: int, last: int, is_told: bool
) -> Iterator[Event]:
    """Build the events of passes `first` to `last`, the latter left out, as a live hook does.

    `is_told` says that proposals are known, so that predictions need not be shown.
    """
    columns, num_layers = trace.columns, trace.geometry.num_layers
    start, stop = first * num_layers, last * num_layers
    rows: list[int] = trace.row_bounds[start : stop + 1].tolist()
    bounds: list[int] = trace.key_bounds[start : stop + 1].tolist()
    keys: list[int] = trace.keys[bounds[0] : bounds[-1]].tolist()
    base = bounds[0]
    own_passes = np.arange(first, last) + trace.first_pass
    passes: list[int] = np.repeat(own_passes, num_layers).tolist()
    layers = [*range(num_layers)] * (last - first)
    phases = [PHASES[phase] for phase in columns.phase[np.asarray(rows[:-1])].tolist()]
    tokens = [stop - row for row, stop in pairwise(rows)]
    own = (keys[start - base : stop - base] for start, stop in pairwise(bounds))

    @cache
    def unseen_at(layer: int, phase: str) -> Mapping[int, FloatArray]:
        """Say which layers a live run predicted, which costs time; what it saw is not needed."""
        if needs.predicted_by:
            target = target_of(layer, num_layers, phase)
            return {} if target is None else {target: UNSEEN_SCORES}
        end = min(layer + needs.depth + 1, num_layers)
        return dict.fromkeys(range(layer + 1, end), UNSEEN_SCORES)

    unseen: Iterable[Mapping[int, FloatArray]] = repeat(NO_PREDICTIONS)
    if is_told and needs.depth:
        unseen = map(unseen_at, layers, phases)
    nothing = repeat(UNSEEN_EXPERTS), repeat(UNSEEN_SCORES), repeat(UNSEEN_SCORES)
    rest = *nothing, unseen, repeat(softmax_weights)
    # As `map(Event, ...)`, less a function of Python for each.
    make = partial(tuple.__new__, Event)
    events: Iterator[Event] = map(
        make, zip(passes, layers, phases, tokens, own, *rest, strict=False)
    )
    if needs.weights or needs.logits or (needs.depth and not is_told) or max(tokens) > 1:
        return _seen(events, trace, needs, rows, is_told)
    # One token a pass, of which the keys say it all.
    return events


def _seen(
    events: Iterable[Event], trace: Trace, needs: EventFields, rows: Sequence[int], is_told: bool
) -> Iterator[Event]:
    """Add what the algorithms want to see, from the `rows` between which each event's lie."""
    columns, num_layers = trace.columns, trace.geometry.num_layers
    num_experts = trace.geometry.num_experts
    offsets: list[int] = []
    if needs.depth and trace.predicted is not None and not is_told:
        offsets = trace.predicted.offsets[np.asarray(rows)].tolist()
    for place, event in enumerate(events):
        row, stop = rows[place], rows[place + 1]
        index, layer, phase, num_tokens, keys, experts, weights, logits, predicted, _ = event
        if needs.weights or num_tokens > 1:
            experts = columns.experts[row:stop].astype(np.int64)
            if columns.weights is not None:
                weights = columns.weights[row:stop]
        if needs.logits and trace.logits is not None:
            logits = trace.logits[row:stop].astype(np.float32)
        if offsets and trace.predicted is not None:
            values = trace.predicted.values[offsets[place] : offsets[place + 1]]
            by_token = values.reshape(num_tokens, -1)
            predicted = _predictions(by_token, layer, needs.depth, num_experts, num_layers)
        yield Event(index, layer, phase, num_tokens, keys, experts, weights, logits, predicted)


def _predictions(
    by_token: Halves, layer: int, depth: int, num_experts: int, num_layers: int
) -> dict[int, FloatArray]:
    """Return [tokens, experts] logits for each of the next `depth` layers, by layer.

    Only a predictor's rows reach past the last layer, to the first one of the next pass.
    """
    reach = min(depth * num_experts, by_token.shape[1])
    return {
        (layer + 1 + ahead) % num_layers: by_token[:, start : start + num_experts].astype(
            np.float32
        )
        for ahead, start in enumerate(range(0, reach, num_experts))
    }

"""Runs a routing trace through the engine: the same cache, link and clock as a live run's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from lm_eval_moecache.engine.engine import Engine
from lm_eval_moecache.engine.redraft import Redraft
from lm_eval_moecache.engine.setting import Setting
from lm_eval_moecache.records.arrays import FloatArray
from lm_eval_moecache.records.event import (
    NO_PREDICTIONS,
    PHASES,
    PREFILL,
    UNSEEN_EXPERTS,
    UNSEEN_SCORES,
    Event,
)
from lm_eval_moecache.records.ledger import RequestRecord
from lm_eval_moecache.records.predictor import target_of
from lm_eval_moecache.trace.columns import Halves
from lm_eval_moecache.trace.detail import identity
from lm_eval_moecache.trace.future import Future
from lm_eval_moecache.trace.trace import Trace

_CHUNK_PASSES = 256
_NOTHING_SEEN = UNSEEN_EXPERTS, UNSEEN_SCORES, UNSEEN_SCORES, NO_PREDICTIONS


@dataclass(frozen=True, slots=True)
class Sights:
    """What the algorithms of a policy want to see beside the keys of an event."""

    weights: bool
    logits: bool
    depth: int
    predicted_by: str
    """Digest of the predictor that predictions have to be of; empty for the gates."""
    recorded: bool = False
    """Whether the prefetcher's own proposals were recorded, so that it need not see a thing."""


def replay(
    trace: Trace,
    setting: Setting,
    *,
    future: Future | None = None,
    cache_reset: str = "never",
    on_progress: Callable[[int], object] | None = None,
) -> Engine:
    """Serve every pass of a trace; return the engine, whose ledger holds the counts.

    The draft is the trace's own, whatever the setting says. `on_progress` is called with the number
    of passes just done. Raises ValueError where the trace lacks what an algorithm of the policy has
    to see.
    """
    setting = setting.with_draft(trace.drafted.draft or setting.draft)
    engine = Engine(trace.geometry, setting, future)
    needs, redraft = _needs_of(trace, engine, setting), Redraft(trace, engine)
    _check_needs(trace, needs)
    waiting = _enter_requests(trace, engine)
    num_layers = trace.geometry.num_layers
    cold = _cold_passes(trace, waiting) if cache_reset == "request" else frozenset()
    for first, last, is_scan in _segments(trace):
        events = (
            iter(()) if is_scan else _events(trace, needs, first * num_layers, last * num_layers)
        )
        for pass_index in range(first, first + 1 if is_scan else last):
            if pass_index in cold:
                engine.reset_cache()
            engine.ledger.serve(waiting[pass_index])
            if is_scan:
                _run_scan(engine, trace, needs, first, last - first)
            else:
                redraft.before(pass_index)
                _run_pass(engine, events, num_layers)
                redraft.after(pass_index)
        if on_progress is not None:
            on_progress(last - first)
    engine.ledger.serve([])
    return engine


def _needs_of(trace: Trace, engine: Engine, setting: Setting) -> Sights:
    """Return what the policy wants to see, and let recorded proposals stand for its prefetcher."""
    digest = engine.predictor_digest
    choice: Any = setting.policy.prefetch
    recorded = None
    if trace.proposed:
        recorded = trace.proposed.get(identity(choice, setting.seed, digest))
    if recorded is None:
        return Sights(engine.wants_weights, engine.wants_logits, engine.depth, digest)
    keys, bounds = recorded.keys, recorded.bounds
    num_layers = trace.geometry.num_layers

    def proposed_at(event: Event) -> Sequence[int]:
        index = event.pass_index * num_layers + event.layer
        found: list[int] = keys[bounds[index] : bounds[index + 1]].tolist()
        return found

    engine.propose_by(proposed_at)
    routing, miss = engine.algorithms.routing, engine.algorithms.miss
    logits = routing.uses_logits or miss.uses_logits
    weights = logits or engine.pools[0].eviction.uses_weights
    return Sights(weights, logits, engine.depth, digest, recorded=True)


def _segments(trace: Trace) -> Iterator[tuple[int, int, bool]]:
    """Divide the passes into chunks, and texts that were routed layer by layer."""
    at = 0
    for first, count in (*trace.scans, (trace.num_passes, 0)):
        for start in range(at, first, _CHUNK_PASSES):
            yield start, min(start + _CHUNK_PASSES, first), False
        if count:
            yield first, first + count, True
        at = first + count


def _run_scan(engine: Engine, trace: Trace, needs: Sights, first: int, count: int) -> None:
    """Serve the passes of a scanned text layer by layer, as the live run did."""
    num_layers, columns = trace.geometry.num_layers, trace.columns
    engine.begin_scan(count)
    for layer in range(num_layers):
        rows = trace.row_bounds[(first + np.arange(count)) * num_layers + layer]
        weights = logits = UNSEEN_SCORES
        if columns.weights is not None:
            weights = columns.weights[rows]
        if needs.logits and trace.logits is not None:
            logits = trace.logits[rows].astype(np.float32)
        experts = columns.experts[rows].astype(np.int64)
        engine.scan(Event(-1, layer, PREFILL, count, [], experts, weights, logits))
    engine.end_scan()


def _run_pass(engine: Engine, events: Iterator[Event], num_layers: int) -> None:
    for layer in range(num_layers):
        event = next(events)
        if layer == 0:
            engine.begin_pass(event.phase, event.num_tokens)
        engine.enter(layer, event.num_tokens)
        engine.run(event)
    engine.end_pass()


def _check_needs(trace: Trace, needs: Sights) -> None:
    def lacks(what: str) -> ValueError:
        return ValueError(
            f"trace {trace.name}: {what}, which an algorithm of this policy has to see. Record the "
            "run again with trace=DIR and this policy, or with trace_keep=all, or choose one that "
            "does without."
        )

    if needs.weights and trace.columns.weights is None:
        raise lacks("a row has no weights")
    if needs.logits and trace.logits is None:
        raise lacks("there is no column 'logits'")
    # With a single layer there is no next one to predict.
    if needs.depth and not needs.recorded and trace.geometry.num_layers > 1:
        if trace.predicted is None:
            raise lacks("there is no column 'predicted'")
        by, wanted = trace.predicted.by, needs.predicted_by
        if by != wanted:
            raise lacks(f"its predictions are {_whose(by)} and not {_whose(wanted)}")
        depth, reachable = trace.predicted.depth, trace.geometry.num_layers - 1
        if depth < min(needs.depth, reachable):
            raise lacks(f"its predictions reach {depth} layers ahead and not {needs.depth}")


def _whose(digest: str) -> str:
    return f"of the predictor {digest[:12]}" if digest else "of the model's own gates"


def _enter_requests(trace: Trace, engine: Engine) -> list[list[RequestRecord]]:
    """Enter the requests into the ledger; return for each pass those it serves."""
    waiting: list[list[RequestRecord]] = [[] for _ in range(trace.num_passes)]
    for traced in trace.requests:
        record = engine.ledger.new_request(
            traced.task, traced.kind, traced.prompt_tokens, traced.document, traced.place
        )
        record.output_tokens = traced.output_tokens
        for pass_index in traced.passes:
            waiting[pass_index].append(record)
    return waiting


def _cold_passes(trace: Trace, waiting: Sequence[Sequence[RequestRecord]]) -> Set[int]:
    """Return the passes before which `cache_reset=request` empties the cache.

    As in a live run, the windows of one text are one request: a sequence starts cold only where
    it serves other requests than the sequence before. Whom a later pass of a generation serves
    does not count, as it leaves out the rows that have ended.
    """
    cold: set[int] = set()
    before: frozenset[int] = frozenset()
    for pass_index, records in enumerate(waiting):
        if trace.starts_sequence(pass_index):
            served = frozenset(record.index for record in records)
            if served != before:
                cold.add(pass_index)
            before = served
    return cold


def _events(trace: Trace, needs: Sights, first: int, last: int) -> Iterator[Event]:
    """Build the events of a range as a live router hook does."""
    columns, num_layers = trace.columns, trace.geometry.num_layers
    rows: list[int] = trace.row_bounds[first : last + 1].tolist()
    bounds: list[int] = trace.key_bounds[first : last + 1].tolist()
    keys: list[int] = trace.keys[bounds[0] : bounds[-1]].tolist()
    base = bounds[0]
    passes, layers = zip(*(divmod(index, num_layers) for index in range(first, last)), strict=True)
    phases = [PHASES[phase] for phase in columns.phase[np.asarray(rows[:-1])].tolist()]
    tokens = [stop - row for row, stop in pairwise(rows)]
    own = (keys[start - base : stop - base] for start, stop in pairwise(bounds))
    events = map(Event, passes, layers, phases, tokens, own)
    if needs.weights or needs.logits or needs.depth or max(tokens) > 1:
        return _seen(events, trace, needs, rows)
    # One token a pass, of which the keys say it all.
    return events


def _seen(
    events: Iterable[Event], trace: Trace, needs: Sights, rows: Sequence[int]
) -> Iterator[Event]:
    """Add what the algorithms want to see, from the `rows` between which each event's lie."""
    columns, num_layers = trace.columns, trace.geometry.num_layers
    num_experts = trace.geometry.num_experts
    offsets: list[int] = []
    if needs.depth and trace.predicted is not None and not needs.recorded:
        offsets = trace.predicted.offsets[np.asarray(rows)].tolist()
    for place, (index, layer, phase, num_tokens, keys, *_) in enumerate(events):
        row, stop = rows[place], rows[place + 1]
        experts, weights, logits, predicted = _NOTHING_SEEN
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
        elif needs.recorded:
            predicted = _unseen(layer, phase, needs, num_layers)
        yield Event(index, layer, phase, num_tokens, keys, experts, weights, logits, predicted)


def _unseen(layer: int, phase: str, needs: Sights, num_layers: int) -> dict[int, FloatArray]:
    """Say which layers a live run predicted, which costs time; what it saw is not needed."""
    if needs.predicted_by:
        target = target_of(layer, num_layers, phase)
        return {} if target is None else {target: UNSEEN_SCORES}
    last = min(layer + needs.depth, num_layers - 1)
    return dict.fromkeys(range(layer + 1, last + 1), UNSEEN_SCORES)


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

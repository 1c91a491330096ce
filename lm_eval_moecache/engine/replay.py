"""Replays a routing trace through the engine: the cache, link and clock of a live run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice, pairwise
from typing import Any

import numpy as np

from lm_eval_moecache.algorithms.learned.predictor import target_of
from lm_eval_moecache.algorithms.prefetch.base import PrefetchAlgorithm
from lm_eval_moecache.engine.engine import Engine, proposals_by_event
from lm_eval_moecache.engine.setting import CONTEXT, Setting
from lm_eval_moecache.engine.virtual.batches import replay_passes
from lm_eval_moecache.engine.virtual.engine import VirtualEngine
from lm_eval_moecache.engine.virtual.loop import NOTHING_PROPOSED, joined
from lm_eval_moecache.engine.virtual.together import serving
from lm_eval_moecache.records.arrays import FloatArray, IntArray
from lm_eval_moecache.records.event import (
    DECODE,
    NO_PREDICTIONS,
    PHASES,
    PREFILL,
    UNSEEN_EXPERTS,
    UNSEEN_SCORES,
    Event,
)
from lm_eval_moecache.records.geometry import NO_TARGET
from lm_eval_moecache.records.ledger import PassRecord, RequestRecord
from lm_eval_moecache.trace.file import StreamedTrace
from lm_eval_moecache.trace.future import Future
from lm_eval_moecache.trace.recorder import identity
from lm_eval_moecache.trace.trace import Halves, Lists, Trace

_CHUNK_PASSES = 256
_BATCH_PASSES = 4096
Served = tuple[RequestRecord, ...]
"""The requests that a pass serves."""
_UNSEEN: Any = UNSEEN_EXPERTS, UNSEEN_SCORES, UNSEEN_SCORES, NO_PREDICTIONS


def replay(
    trace: Trace | StreamedTrace,
    setting: Setting,
    *,
    future: Future | None = None,
    cache_reset: str = "request",
    on_progress: Callable[[int], object] | None = None,
    on_engine: Callable[[VirtualEngine], object] | None = None,
) -> VirtualEngine:
    """Serve every pass of a trace; return the engine, whose ledger holds the counts.

    A drafted trace brings its own draft, which overrides the setting's. `on_progress` is called
    with the number of passes just served, `on_engine` with the engine before the first one.
    Raises ValueError where the trace lacks data that an algorithm of the policy needs.
    """
    setting = replace(setting, draft=trace.drafted.draft or setting.draft)
    if trace.scans:
        _check_scans(trace, setting)
    engine = VirtualEngine(trace.geometry, setting, future)
    if on_engine is not None:
        on_engine(engine)
    waiting = enter_requests(trace, engine)
    engine.expect(trace.num_passes)
    serve = _serve_events if trace.scans or engine.is_stepwise else _serve_passes
    for server, part, served in _turns(engine, trace, waiting, cache_reset, on_engine):
        needs = _needs_of(part, server, setting, cache_reset)
        for num_passes in serve(server, part, needs, served):
            if on_progress is not None:
                on_progress(num_passes)
    engine.ledger.serve(())
    return engine


def _turns(
    engine: VirtualEngine,
    trace: Trace | StreamedTrace,
    waiting: Sequence[Served],
    cache_reset: str,
    on_engine: Callable[[VirtualEngine], object] | None,
) -> Iterator[tuple[VirtualEngine, Trace, Sequence[Served]]]:
    """Yield the parts of a trace in turn, each with the engine that serves it.

    With it come the requests that its passes serve, by the number of the pass in that engine. With
    `cache_reset=request` each request has an engine of its own, as in a live run, whose passes the
    given engine adopts.
    """
    if cache_reset != "request":
        yield from ((engine, part, waiting) for part in trace.parts())
        return
    server: VirtualEngine | None = None
    last_requests: Set[int] = frozenset()
    begun = 0
    for part in trace.parts():
        cold, last_requests = cold_passes(part, waiting, last_requests)
        for first, last in pairwise([*sorted({0, *cold}), part.num_passes]):
            if server is None or first in cold:
                if server is not None:
                    engine.merge(server)
                begun = part.first_pass + first
                future = None
                if engine.future is not None:
                    future = Future(part.between(first, last, 0))
                server = engine.fresh(future)
                if on_engine is not None:
                    on_engine(server)
            own = part.between(first, last, part.first_pass + first - begun)
            yield server, own, waiting[begun:]
    if server is not None:
        engine.merge(server)


def _check_scans(trace: Trace | StreamedTrace, setting: Setting) -> None:
    """Raise ValueError for a setting under which no text can be served layer by layer."""
    capacity, routing = setting.capacity, setting.policy.routing
    shared = len(capacity.bytes_by_partition) < trace.geometry.num_layers
    looks_ahead = bool(getattr(routing.algorithm, "depth", 0))
    for key, value, is_refused, allowed in (
        ("attention", setting.attention, setting.attention == CONTEXT, "attention='none'"),
        ("capacity", capacity.text, shared, "a cache per layer, as '30/layer'"),
        ("routing", routing.name, looks_ahead, "a routing of one layer"),
    ):
        if is_refused:
            raise ValueError(
                f"{key}={value!r} cannot be combined with trace {trace.name}, which was recorded "
                f"with scoring=scan. Allowed with it: {allowed}."
            )


def _serve_passes(
    engine: VirtualEngine,
    part: Trace,
    needs: EventFields,
    waiting: Sequence[Served],
) -> Iterator[int]:
    """Serve a part some thousand passes at a time; yield how many."""
    begin, proposals = 0, list[tuple[IntArray, IntArray]]()
    for first, last, _ in _segments(part):
        proposals.append(_proposed(engine, part, needs, first, last))
        if last - begin < _BATCH_PASSES and last < part.num_passes:
            continue
        counts = np.concatenate([np.diff(bounds) for _, bounds in proposals])
        proposed = np.concatenate([keys for keys, _ in proposals]), np.append(0, counts.cumsum())
        events = _events(part, needs, begin, last, True) if engine.needs_events else None
        replay_passes(engine, part, begin, last, proposed, events)
        for record in engine.ledger.passes[part.first_pass + begin :]:
            _note_drafts(part, record)
            for request in waiting[record.index]:
                request.passes.append(record)
        yield last - begin
        begin, proposals = last, []


def _proposed(
    engine: Engine, part: Trace, needs: EventFields, first: int, last: int
) -> tuple[IntArray, IntArray]:
    """Return the proposals at the events of some passes: keys, and their bounds by event."""
    prefetch = engine.rules.prefetch
    if not prefetch.is_active:
        return NOTHING_PROPOSED
    known_proposals = _known_proposals(part, needs, first, last)
    if known_proposals is not None:
        return known_proposals
    proposals: list[Sequence[int]] = []
    for event in _events(part, needs, first, last, False):
        if event.layer == 0:
            prefetch.on_pass(event.pass_index)
        proposals.append(prefetch.propose(event))
    return joined(proposals)


def _serve_events(
    engine: VirtualEngine,
    part: Trace,
    needs: EventFields,
    waiting: Sequence[Served],
) -> Iterator[int]:
    """Serve a part event by event, and scanned texts layer by layer; yield how many passes."""
    _check_drafts(part, engine)
    num_layers, together = part.geometry.num_layers, None
    for first, last, is_scan in _segments(part):
        if not is_scan:
            events = _show(engine, part, needs, first, last)
        for pass_index in range(first, first + 1 if is_scan else last):
            engine.ledger.serve(waiting[part.first_pass + pass_index])
            if is_scan:
                _run_scan(engine, part, needs, first, last - first)
                break
            _draft(part, engine, pass_index)
            positions = None
            if engine.wants_positions:
                row, stop = part.row_bounds[pass_index * num_layers :][:2]
                positions = part.columns.token[row:stop].astype(np.int64)
            own = [*islice(events, num_layers)]
            event = own[0]
            engine.begin_pass(event.phase, event.num_tokens, positions=positions)
            is_token = event.phase == DECODE and event.num_tokens == 1 == len(event.weights)
            together = serving([engine], together) if is_token and engine.loop.is_compiled else None
            for event in own:
                if together is not None:
                    given = event.experts, event.weights, event.logits, event.predicted
                    together.run(event.layer, *given)
                    continue
                engine.enter(event.layer, event.num_tokens)
                engine.run(event)
            if together is not None:
                together.end()
            engine.end_pass()
            _note_drafts(part, engine.record)
        yield last - first


@dataclass(frozen=True, slots=True)
class EventFields:
    """The fields of an event, besides its keys, that the algorithms of a policy need."""

    weights: bool
    logits: bool
    depth: int
    predicted_by: str
    """Digest of the predictor behind the predictions; empty for the model's gates."""
    recorded: Lists | None = None
    """The prefetcher's proposals in the recorded run, which spare asking it."""
    asked_ahead: PrefetchAlgorithm | None = None
    """The prefetcher, where no other algorithm uses predictions."""


def _needs_of(trace: Trace, engine: Engine, setting: Setting, cache_reset: str) -> EventFields:
    """Return the fields that the policy needs; recorded proposals stand in for its prefetcher.

    Raises ValueError where the trace lacks one of them.
    """
    choice: Any = setting.policy.prefetch
    routing, prefetch = engine.rules.routing, engine.rules.prefetch
    recorded = asked_ahead = None
    # Some routing algorithms execute the predicted experts, some miss algorithms choose prefetch
    # levels by the predictions: these need the predictions themselves.
    if not (routing.depth or engine.rules.miss.uses_ladder):
        name = identity(choice, setting.seed, engine.prefetch_digest, cache_reset)
        recorded = trace.proposed.get(name)
        asked_ahead = prefetch
        other = "request" if cache_reset == "never" else "never"
        if recorded is None and identity(choice, setting.seed, engine.prefetch_digest, other) in (
            trace.proposed
        ):
            raise ValueError(
                f"trace {trace.name} holds what prefetch={choice.name!r} proposed under "
                f"cache_reset={other!r}, not under {cache_reset!r}. Allowed: cache_reset={other}, "
                f"or another trace, recorded with cache_reset={cache_reset}."
            )
    if recorded is None and prefetch.predicts_pass:
        raise ValueError(
            f"trace {trace.name} was not recorded with prefetch={choice.name!r} and this profile, "
            "which reads the text itself. Record the run again with trace=DIR and this policy, or "
            "choose one that does not need it."
        )
    # A lossy policy's loss is measured by weight wherever there are weights.
    weighs = engine.rules.is_lossy and trace.columns.weights is not None
    if recorded is None:
        weights, logits = engine.wants_weights or weighs, engine.wants_logits
    else:
        logits = engine.weighs_changes
        algorithms = routing, engine.rules.miss, engine.eviction
        weights = logits or weighs or any(algorithm.uses_weights for algorithm in algorithms)
    needs = EventFields(
        weights, logits, engine.depth, engine.predictor_digest, recorded, asked_ahead
    )
    lacks = ""
    if weights and trace.columns.weights is None:
        lacks = "a row has no weights"
    elif logits and trace.logits is None:
        lacks = "there is no column 'logits'"
    # With a single layer there is no next one to predict.
    elif needs.depth and recorded is None and trace.geometry.num_layers > 1:
        lacks = _lacks_of_predictions(trace, needs)
    if lacks:
        stand_in = ""
        if needs.depth and setting.policy.is_lossless:
            stand_in = ", or this one with prefetch=oracle,prefetch.recall=0.85 as its predictor"
            stand_in += " (`moecache choose` ranks both kinds)"
        raise ValueError(
            f"trace {trace.name}: {lacks}, which an algorithm of this policy reads. Record the run "
            "again with trace=DIR and this policy, or with trace_keep=all (from Python, load_trace "
            "reads the columns only with logits=True, predicted=True), or choose one that does not "
            f"need it: policy=on_demand,eviction=hazard{stand_in}."
        )
    return needs


def _lacks_of_predictions(trace: Trace, needs: EventFields) -> str:
    """Return what is wrong with a trace's predictions; empty where they suffice."""
    if trace.predicted is None:
        return "there is no column 'predicted'"
    recorded, required = (
        f"of the predictor {digest[:12]}" if digest else "of the model's own gates"
        for digest in (trace.predicted.by, needs.predicted_by)
    )
    if trace.predicted.by != needs.predicted_by:
        return f"its predictions are {recorded} and not {required}"
    depth, reachable = trace.predicted.depth, trace.geometry.num_layers - 1
    if depth < min(needs.depth, reachable):
        return f"its predictions reach {depth} layers ahead and not {needs.depth}"
    return ""


def _show(
    engine: Engine, trace: Trace, needs: EventFields, first: int, last: int
) -> Iterator[Event]:
    """Return the events of passes `first` to `last`; hand the engine their known proposals."""
    proposals = _known_proposals(trace, needs, first, last)
    answers: Iterator[Sequence[int]] | None = None
    if proposals is not None:
        answers = proposals_by_event(*proposals)
        if engine.rules.prefetch.predicts_pass:
            # A pass's proposal precedes its first layer, but is recorded with it.
            answers = _at_pass_starts(answers, trace.geometry.num_layers)
    engine.answers = answers
    return _events(trace, needs, first, last, proposals is not None)


def _at_pass_starts(answers: Iterator[Sequence[int]], num_layers: int) -> Iterator[Sequence[int]]:
    """Yield each pass's first answer at its start, and empty ones at its events."""
    for index, keys in enumerate(answers):
        if index % num_layers == 0:
            yield keys
        yield ()


def _segments(trace: Trace) -> Iterator[tuple[int, int, bool]]:
    """Divide the passes into chunks and scanned texts; yield (first, last, is scanned).

    The passes of a chunk have one phase, and are all of one token or all of several, so that a
    prefetcher can be asked about all decode steps of a chunk at once.
    """
    starts = trace.row_bounds[:: trace.geometry.num_layers]
    rows_of_first = trace.row_bounds[1 :: trace.geometry.num_layers] - starts[:-1]
    kinds = trace.columns.phase[starts[:-1]] * 2 + (rows_of_first > 1)
    changes: list[int] = (np.flatnonzero(np.diff(kinds)) + 1).tolist()
    at = 0
    for first, count in (*trace.scans, (trace.num_passes, 0)):
        cuts = [at, *(change for change in changes if at < change < first), first]
        for start, stop in pairwise(cuts):
            for begin in range(start, stop, _CHUNK_PASSES):
                yield begin, min(begin + _CHUNK_PASSES, stop), False
        if count:
            yield first, first + count, True
        at = first + count


def _run_scan(engine: Engine, trace: Trace, needs: EventFields, first: int, count: int) -> None:
    """Serve the passes of a scanned text layer by layer, like the live run."""
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


def enter_requests(trace: Trace | StreamedTrace, engine: Engine) -> list[Served]:
    """Enter the trace's requests into the ledger; return, for each pass, those it serves."""
    waiting: list[Served] = [()] * trace.num_passes
    for traced in trace.requests:
        record = engine.ledger.new_request(
            traced.task, traced.kind, traced.prompt_tokens, traced.document, traced.place
        )
        record.output_tokens = traced.output_tokens
        for pass_index in traced.passes:
            waiting[pass_index] += (record,)
    return waiting


def cold_passes(
    part: Trace, waiting: Sequence[Served], before: Set[int]
) -> tuple[Set[int], Set[int]]:
    """Return the passes that `cache_reset=request` starts cold, and the last sequence's requests.

    As in a live run, the windows of one text are one request: a sequence starts cold only where
    it serves other requests than the sequence `before`. Later passes of a generation do not count,
    as they leave out the requests whose rows have ended.
    """
    cold: set[int] = set()
    for pass_index in range(part.num_passes):
        if part.starts_sequence(pass_index):
            records = waiting[part.first_pass + pass_index]
            requests = frozenset(record.index for record in records)
            if requests != before:
                cold.add(pass_index)
            before = requests
    return cold, before


def _check_drafts(trace: Trace, engine: Engine) -> None:
    """Raise ValueError where the trace lacks data that a draft-stage prefetcher needs."""
    drafted, prefetch = trace.drafted, engine.rules.prefetch.draft_stage
    if prefetch is None:
        return
    lacks = f"trace {trace.name} cannot serve {prefetch.label()}: "
    again = " Record the run again with trace=DIR and this policy."
    if not prefetch.by_order:
        raise ValueError(
            f"{lacks}it reads more of a prediction than its order (by_order is False), but traces "
            "keep the order only. Run it with --model moecache-spec."
        )
    if set(drafted.predicted_layers) != set(range(trace.geometry.num_layers)):
        raise ValueError(f"{lacks}the drafts' predictions were not recorded.{again}")
    if prefetch.num_critical > drafted.ranked:
        raise ValueError(
            f"{lacks}each prediction has {drafted.ranked} experts and not the "
            f"critical={prefetch.num_critical} that it asks for.{again}"
        )


def _draft(trace: Trace, engine: Engine, pass_index: int) -> None:
    """Repeat the drafting recorded before this pass, if any, on the draft stage."""
    drafted = trace.drafted
    if drafted.tokens is None or drafted.experts is None or drafted.ranks is None:
        return
    tokens: list[int] = drafted.tokens.at(pass_index).tolist()
    if not tokens:
        return
    assert drafted.draft is not None, "drafting without a draft"
    stage = engine.begin_draft()
    experts = drafted.experts.at(pass_index).reshape(len(tokens), -1).tolist()
    ranks = drafted.ranks.at(pass_index).reshape(len(tokens), -1, max(drafted.ranked, 1))
    for num_tokens, expert_counts, ranked in zip(tokens, experts, map(iter, ranks), strict=True):
        targets = drafted.draft.targets or (NO_TARGET,) * len(expert_counts)
        for layer, (target, num_experts) in enumerate(zip(targets, expert_counts, strict=True)):
            stage.dense(layer, num_tokens)
            if target != NO_TARGET and drafted.ranked:
                order = next(ranked)
                if stage.wants(target):
                    # Scores that reproduce the recorded order.
                    scores = np.full((1, trace.geometry.num_experts), -np.inf, dtype=np.float32)
                    scores[0, order] = np.arange(len(order), 0, -1)
                    stage.predict(target, scores)
            stage.experts(layer, num_experts, num_tokens)


def _note_drafts(trace: Trace, record: PassRecord) -> None:
    """Record how many drafted tokens a pass verified and accepted."""
    if record.index in trace.drafted.settled:
        record.drafted, record.accepted = trace.drafted.settled[record.index]


def _known_proposals(
    trace: Trace, needs: EventFields, first: int, last: int
) -> tuple[IntArray, IntArray] | None:
    """Return the proposals at each event of passes `first` to `last` (excluded), if known ahead.

    They are all keys, and their bounds by event. None where the prefetcher must be asked at each
    event in turn: it uses more than predictions, or a pass has several tokens.
    """
    num_layers = trace.geometry.num_layers
    if needs.recorded is not None:
        bounds = needs.recorded.bounds[first * num_layers : last * num_layers + 1]
        keys: IntArray = needs.recorded.values[bounds[0] : bounds[-1]].astype(np.int64)
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
    """Ask the prefetcher layer by layer, for all passes at once.

    `by_pass` are predicted logits [passes, values], of which each layer has `sizes[layer]`.
    """
    num_passes, num_layers = len(by_pass), len(sizes)
    num_experts = prefetch.geometry.num_experts
    counts = np.zeros((num_passes, num_layers, depth), np.int64)
    proposals: list[tuple[int, int, IntArray]] = []
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
            proposals.append((layer, ahead, keys))
        start += size
    ends = counts.cumsum().reshape(counts.shape)
    merged = np.zeros(counts.sum(), np.int64)
    for layer, ahead, keys in proposals:
        counts_ahead = counts[:, layer, ahead]
        begin = ends[:, layer, ahead] - counts_ahead.cumsum()
        merged[np.arange(len(keys)) + np.repeat(begin, counts_ahead)] = keys
    return merged, np.append(0, ends[:, :, -1]) if depth else np.zeros(1, np.int64)


def _events(
    trace: Trace, needs: EventFields, first: int, last: int, is_proposed: bool
) -> Iterator[Event]:
    """Build the events of passes `first` to `last` (excluded), as a live hook does.

    `is_proposed`: proposals are known already, so events need no predictions.
    """
    columns, geometry = trace.columns, trace.geometry
    num_layers, num_experts = geometry.num_layers, geometry.num_experts
    places = slice(first * num_layers, last * num_layers + 1)
    rows: list[int] = trace.row_bounds[places].tolist()
    bounds: list[int] = (trace.key_bounds[places] - trace.key_bounds[places.start]).tolist()
    start = trace.key_bounds[places.start]
    keys: list[int] = trace.keys[start : start + bounds[-1]].tolist()
    logits_of = trace.logits if needs.logits else None
    ahead = trace.predicted if needs.depth and not is_proposed else None
    offsets = [] if ahead is None else ahead.offsets[rows].tolist()

    @cache
    def unseen_at(layer: int, phase: str) -> Mapping[int, FloatArray]:
        """Return the layers that a live run predicts here, at a cost in time, without scores."""
        if needs.predicted_by:
            target = target_of(layer, num_layers, phase)
            return {} if target is None else {target: UNSEEN_SCORES}
        end = min(layer + needs.depth + 1, num_layers)
        return dict.fromkeys(range(layer + 1, end), UNSEEN_SCORES)

    for place, (row, stop) in enumerate(pairwise(rows)):
        part_pass, layer = divmod(place, num_layers)
        phase, num_tokens = PHASES[columns.phase[row]], stop - row
        experts, weights, logits, predicted = _UNSEEN
        if needs.weights or num_tokens > 1:
            # In a pass of one token the keys are the experts.
            experts = columns.experts[row:stop].astype(np.int64)
            if columns.weights is not None:
                weights = columns.weights[row:stop]
        if logits_of is not None:
            logits = logits_of[row:stop].astype(np.float32)
        if ahead is not None:
            values = ahead.values[offsets[place] : offsets[place + 1]].reshape(num_tokens, -1)
            # Only a predictor's rows reach past the last layer, to the first one of the next pass.
            reach = min(needs.depth * num_experts, values.shape[1])
            predicted = {
                (layer + 1 + nth) % num_layers: values[:, at : at + num_experts].astype(np.float32)
                for nth, at in enumerate(range(0, reach, num_experts))
            }
        elif is_proposed and needs.depth:
            predicted = unseen_at(layer, phase)
        index = trace.first_pass + first + part_pass
        needed = keys[bounds[place] : bounds[place + 1]]
        yield Event(index, layer, phase, num_tokens, needed, experts, weights, logits, predicted)

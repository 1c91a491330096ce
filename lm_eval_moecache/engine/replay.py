"""Runs a routing trace through the engine: the same cache, link and clock as a live run's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise, repeat
from typing import Any

import numpy as np

from lm_eval_moecache.algorithms.prefetch.base import PrefetchAlgorithm
from lm_eval_moecache.engine.compiled import NOTHING_PROPOSED, PassLoop, joined, reason_against
from lm_eval_moecache.engine.draft_stage import DraftStage
from lm_eval_moecache.engine.engine import Engine
from lm_eval_moecache.engine.setting import CONTEXT, Setting
from lm_eval_moecache.records.arrays import FloatArray, IntArray, softmax_weights
from lm_eval_moecache.records.event import (
    NO_PREDICTIONS,
    PHASES,
    PREFILL,
    UNSEEN_EXPERTS,
    UNSEEN_SCORES,
    Event,
)
from lm_eval_moecache.records.geometry import NO_TARGET
from lm_eval_moecache.records.ledger import RequestRecord
from lm_eval_moecache.records.predictor import target_of
from lm_eval_moecache.trace.file import StreamedTrace
from lm_eval_moecache.trace.future import Future
from lm_eval_moecache.trace.recorder import identity
from lm_eval_moecache.trace.trace import Halves, Lists, Trace

_CHUNK_PASSES = 256
_COMPILED_PASSES = 4096


def replay(
    trace: Trace | StreamedTrace,
    setting: Setting,
    *,
    future: Future | None = None,
    cache_reset: str = "never",
    on_progress: Callable[[int], object] | None = None,
    on_engine: Callable[[Engine], object] | None = None,
    compiled: bool = True,
) -> Engine:
    """Serve every pass of a trace; return the engine, whose ledger holds the counts.

    The draft is the trace's own, whatever the setting says. `on_progress` is called with the number
    of passes just done, `on_engine` with the engine before the first one. Where it can, a compiled
    loop serves them, unless `compiled` is False; the engine's `uncompiled` says why it did not.
    Raises ValueError where the trace lacks what an algorithm of the policy has to see.
    """
    setting = replace(setting, draft=trace.drafted.draft or setting.draft)
    if setting.attention == CONTEXT and trace.scans:
        raise ValueError(
            f"attention={setting.attention!r} does not go with trace {trace.name}, whose texts were"
            " scanned layer by layer. Allowed with it: attention='flat'."
        )
    engine = Engine(trace.geometry, setting, future)
    if on_engine is not None:
        on_engine(engine)
    waiting = enter_requests(trace, engine)
    engine.uncompiled = reason_against(engine, bool(trace.scans)) if compiled else "asked not to be"
    if on_engine is not None:
        engine.uncompiled = "its events are looked at one by one"
    loop = None if engine.uncompiled else PassLoop(engine, future)
    before: Set[int] = frozenset()
    for part in trace.parts():
        cold: Set[int] = frozenset()
        if cache_reset == "request":
            cold, before = cold_passes(part, waiting, before)
        needs = _needs_of(part, engine, setting)
        _check_needs(part, needs)
        if loop is None:
            served = _serve_events(engine, part, needs, waiting, cold)
        else:
            served = _serve_compiled(loop, engine, part, needs, waiting, cold)
        for num_passes in served:
            if on_progress is not None:
                on_progress(num_passes)
    if loop is not None:
        loop.finish()
    engine.ledger.serve([])
    return engine


def _serve_compiled(
    loop: PassLoop,
    engine: Engine,
    part: Trace,
    needs: EventFields,
    waiting: Sequence[list[RequestRecord]],
    cold: Set[int],
) -> Iterator[int]:
    """Serve a part, a few thousand passes at a time; yield how many."""
    is_cold = np.isin(np.arange(part.num_passes), [*cold])
    begin, told = 0, list[tuple[IntArray, IntArray]]()
    for first, last, _ in _segments(part):
        told.append(_proposed(engine, part, needs, first, last))
        if last - begin < _COMPILED_PASSES and last < part.num_passes:
            continue
        counts = np.concatenate([np.diff(bounds) for _, bounds in told])
        proposed = np.concatenate([keys for keys, _ in told]), np.append(0, counts.cumsum())
        loop.replay(part, begin, last, proposed, is_cold[begin:last])
        for record in engine.ledger.passes[part.first_pass + begin :]:
            # Of a draft without a model of its own, all that a trace has.
            if record.index in part.drafted.settled:
                record.drafted, record.accepted = part.drafted.settled[record.index]
            for request in waiting[record.index]:
                request.passes.append(record)
        yield last - begin
        begin, told = last, []


def _proposed(
    engine: Engine, part: Trace, needs: EventFields, first: int, last: int
) -> tuple[IntArray, IntArray]:
    """Return what is proposed at the events of some passes: keys, and where each event's begin."""
    prefetch = engine.rules.prefetch
    if not prefetch.is_active:
        return NOTHING_PROPOSED
    known = proposed_arrays(part, needs, first, last)
    if known is not None:
        return known
    told: list[Sequence[int]] = []
    for event in events_of(part, needs, first, last, False):
        if event.layer == 0:
            prefetch.on_pass(event.pass_index)
        told.append(prefetch.propose(event))
    return joined(told)


def _serve_events(
    engine: Engine,
    part: Trace,
    needs: EventFields,
    waiting: Sequence[list[RequestRecord]],
    cold: Set[int],
) -> Iterator[int]:
    """Serve a part event by event, and scanned texts layer by layer; yield how many passes."""
    redraft, num_layers = Redraft(part, engine), part.geometry.num_layers
    for first, last, is_scan in _segments(part):
        events = iter(()) if is_scan else _show(engine, part, needs, first, last)
        for pass_index in range(first, first + 1 if is_scan else last):
            if pass_index in cold:
                engine.reset_cache()
            engine.ledger.serve(waiting[part.first_pass + pass_index])
            if is_scan:
                _run_scan(engine, part, needs, first, last - first)
                break
            redraft.before(pass_index)
            positions = None
            if engine.wants_positions:
                row, stop = part.row_bounds[pass_index * num_layers :][:2]
                positions = part.columns.token[row:stop].astype(np.int64)
            for layer in range(num_layers):
                event = next(events)
                if layer == 0:
                    engine.begin_pass(event.phase, event.num_tokens, positions=positions)
                engine.enter(layer, event.num_tokens)
                engine.run(event)
            engine.end_pass()
            redraft.after(part.first_pass + pass_index)
        yield last - first


def _needs_of(trace: Trace, engine: Engine, setting: Setting) -> EventFields:
    """Return what the policy wants to see; recorded proposals stand for its prefetcher."""
    digest = engine.predictor_digest
    choice: Any = setting.policy.prefetch
    routing, prefetch = engine.rules.routing, engine.rules.prefetch
    recorded = None
    # Some routings execute what was predicted, and some miss algorithms tell from it at which level
    # to prefetch: for them the predictions themselves are shown.
    looks_too = routing.depth or engine.rules.miss.uses_ladder
    if trace.proposed and not looks_too:
        recorded = trace.proposed.get(identity(choice, setting.seed, engine.prefetch_digest))
    if recorded is None and prefetch.foresees:
        raise ValueError(
            f"trace {trace.name} was not recorded with prefetch={choice.name!r} and this profile, "
            "which reads the text itself. Record the run again with trace=DIR and this policy, or "
            "choose one that does without."
        )
    if recorded is None:
        wants = engine.wants_weights, engine.wants_logits
        asked_ahead = None if looks_too else prefetch
        # What a lossy policy loses is told by weight wherever there are weights.
        weighs = engine.rules.may_change and trace.columns.weights is not None
        wants = wants[0] or weighs, wants[1]
        return EventFields(*wants, engine.depth, digest, asked_ahead=asked_ahead)
    logits = engine.weighs_changes
    weights = logits or routing.uses_weights or engine.rules.miss.uses_weights
    weights |= engine.pools[0].eviction.uses_weights
    return EventFields(weights, logits, engine.depth, digest, recorded)


def _show(
    engine: Engine, trace: Trace, needs: EventFields, first: int, last: int
) -> Iterator[Event]:
    """Return the events of passes `first` to `last`; the engine is told their known proposals."""
    told = proposed_arrays(trace, needs, first, last)
    answers: Iterator[Sequence[int]] | None = None
    if told is not None:
        keys, bounds = (own.tolist() for own in told)
        answers = (keys[start:stop] for start, stop in pairwise(bounds))
        if engine.rules.prefetch.foresees:
            # Proposed before the first layer, with which it is kept.
            answers = _foretold(answers, trace.geometry.num_layers)
    engine.executor.prefetches.answers = answers
    return events_of(trace, needs, first, last, told is not None)


def _foretold(answers: Iterator[Sequence[int]], num_layers: int) -> Iterator[Sequence[int]]:
    """Yield each pass's first answer before the pass, and nothing at its events."""
    for index, keys in enumerate(answers):
        if index % num_layers == 0:
            yield keys
        yield ()


def _segments(trace: Trace) -> Iterator[tuple[int, int, bool]]:
    """Divide the passes into chunks, and texts that were routed layer by layer.

    A chunk has passes of one phase, and either of one token each or of several, so that a
    prefetcher can be asked about all of a chunk's decode steps at once.
    """
    starts = trace.row_bounds[:: trace.geometry.num_layers]
    rows_of_first = trace.row_bounds[1 :: trace.geometry.num_layers] - starts[:-1]
    kinds = trace.columns.phase[starts[:-1]] * 2 + (rows_of_first > 1)
    turns: list[int] = (np.flatnonzero(np.diff(kinds)) + 1).tolist()
    at = 0
    for first, count in (*trace.scans, (trace.num_passes, 0)):
        own = [at, *(turn for turn in turns if at < turn < first), first]
        for start, stop in pairwise(own):
            for begin in range(start, stop, _CHUNK_PASSES):
                yield begin, min(begin + _CHUNK_PASSES, stop), False
        if count:
            yield first, first + count, True
        at = first + count


def _run_scan(engine: Engine, trace: Trace, needs: EventFields, first: int, count: int) -> None:
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


def _check_needs(trace: Trace, needs: EventFields) -> None:
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
    if needs.depth and needs.recorded is None and trace.geometry.num_layers > 1:
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


def enter_requests(trace: Trace | StreamedTrace, engine: Engine) -> list[list[RequestRecord]]:
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


def cold_passes(
    part: Trace, waiting: Sequence[Sequence[RequestRecord]], before: Set[int]
) -> tuple[Set[int], Set[int]]:
    """Return the passes before which `cache_reset=request` empties the cache, and who came last.

    As in a live run, the windows of one text are one request: a sequence starts cold only where
    it serves other requests than the sequence `before`. Whom a later pass of a generation serves
    does not count, as it leaves out the rows that have ended.
    """
    cold: set[int] = set()
    for pass_index in range(part.num_passes):
        if part.starts_sequence(pass_index):
            records = waiting[part.first_pass + pass_index]
            served = frozenset(record.index for record in records)
            if served != before:
                cold.add(pass_index)
            before = served
    return cold, before


class Redraft:
    """Tells the engine's draft stage, before each pass, what it was told in the recorded run.

    Raises ValueError where the trace lacks what the policy's prefetcher has to see.
    """

    def __init__(self, trace: Trace, engine: Engine) -> None:
        self._drafted = trace.drafted
        self._engine = engine
        self._num_experts = trace.geometry.num_experts
        prefetch = engine.rules.prefetch.draft_stage
        if prefetch is None:
            return
        name = type(prefetch).__module__.rpartition(".")[2]
        lacks = f"trace {trace.name} cannot serve prefetch={name!r}: "
        again = " Record the run again with trace=DIR and this policy."
        if not prefetch.by_order:
            raise ValueError(
                f"{lacks}it looks at more of a prediction than its order (by_order is False), "
                "which is what traces keep. Run it with --model moecache-spec."
            )
        if set(self._drafted.foretold) != set(range(trace.geometry.num_layers)):
            raise ValueError(f"{lacks}the drafts' predictions were not recorded.{again}")
        if prefetch.critical > self._drafted.ranked:
            raise ValueError(
                f"{lacks}each prediction has {self._drafted.ranked} experts and not the "
                f"critical={prefetch.critical} that it asks for.{again}"
            )

    def before(self, pass_index: int) -> None:
        """Draft for the pass that follows, if the recorded run did."""
        drafted = self._drafted
        if drafted.tokens is None or drafted.experts is None or drafted.ranks is None:
            return
        tokens: list[int] = drafted.tokens.at(pass_index).tolist()
        if not tokens:
            return
        stage = self._engine.begin_draft()
        experts = drafted.experts.at(pass_index).reshape(len(tokens), -1).tolist()
        ranks = drafted.ranks.at(pass_index).reshape(len(tokens), -1, max(drafted.ranked, 1))
        for num_tokens, own, ranked in zip(tokens, experts, ranks, strict=True):
            self._forward(stage, num_tokens, own, iter(ranked))

    def _forward(self, stage: DraftStage, num_tokens: int, experts: list[int], ranked: Any) -> None:
        draft = self._drafted.draft
        assert draft is not None, "a forward without a draft"
        targets = draft.targets or (NO_TARGET,) * len(experts)
        for layer, (target, num_experts) in enumerate(zip(targets, experts, strict=True)):
            stage.dense(layer, num_tokens)
            if target != NO_TARGET and self._drafted.ranked:
                order = next(ranked)
                if stage.wants(target):
                    stage.predict(target, self._scores(order))
            stage.experts(layer, num_experts, num_tokens)

    def _scores(self, order: Any) -> FloatArray:
        """Return [1, experts] scores whose largest come in this order."""
        scores = np.full((1, self._num_experts), -np.inf, dtype=np.float32)
        scores[0, order] = np.arange(len(order), 0, -1)
        return scores

    def after(self, pass_index: int) -> None:
        """Note what became of the drafts that the pass verified."""
        if pass_index in self._drafted.settled:
            self._engine.settle_drafts(*self._drafted.settled[pass_index])


@dataclass(frozen=True, slots=True)
class EventFields:
    """What the algorithms of a policy want to see beside the keys of an event."""

    weights: bool
    logits: bool
    depth: int
    predicted_by: str
    """Digest of the predictor that predictions have to be of; empty for the gates."""
    recorded: Lists | None = None
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

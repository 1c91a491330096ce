"""Replays a routing trace through the engine: the cache, link and clock of a live run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from lm_eval_moecache.algorithms.learned.predictor import target_of
from lm_eval_moecache.engine.engine import Engine
from lm_eval_moecache.engine.rows import Proposed
from lm_eval_moecache.engine.setting import CONTEXT, Setting
from lm_eval_moecache.records.arrays import FloatArray
from lm_eval_moecache.records.batch import Batch
from lm_eval_moecache.records.event import DECODE, PHASES, UNSEEN_SCORES
from lm_eval_moecache.records.geometry import NO_TARGET
from lm_eval_moecache.records.ledger import RequestRecord
from lm_eval_moecache.trace.file import StreamedTrace
from lm_eval_moecache.trace.future import Future
from lm_eval_moecache.trace.recorder import identity
from lm_eval_moecache.trace.trace import Lists, Trace

_BATCH_PASSES = 4096
Served = tuple[RequestRecord, ...]
"""The requests that a pass serves."""


def replay(
    trace: Trace | StreamedTrace,
    setting: Setting,
    *,
    future: Future | None = None,
    cache_reset: str = "request",
    on_progress: Callable[[int], object] | None = None,
    on_engine: Callable[[Engine], object] | None = None,
) -> Engine:
    """Serve every pass of a trace; return the engine, whose ledger holds the counts.

    A drafted trace brings its own draft, which overrides the setting's. `on_progress` is called
    with the number of passes just served, `on_engine` with the engine before the first one.
    Raises ValueError where the trace lacks data that an algorithm of the policy needs.
    """
    setting = replace(setting, draft=trace.drafted.draft or setting.draft)
    if trace.scans:
        _check_scans(trace, setting)
    engine = Engine(trace.geometry, setting, future)
    if on_engine is not None:
        on_engine(engine)
    waiting = enter_requests(trace, engine)
    for server, part, served in _turns(engine, trace, waiting, cache_reset, on_engine):
        needs = _needs_of(part, server, setting, cache_reset)
        _check_drafts(part, server)
        for first, last, is_scan in _segments(part, _is_apart(server)):
            _serve(server, part, needs, first, last, is_scan)
            for record in server.ledger.passes[part.first_pass + first :]:
                if record.index in part.drafted.settled:
                    record.drafted, record.accepted = part.drafted.settled[record.index]
                for request in served[record.index]:
                    request.passes.append(record)
            if on_progress is not None:
                on_progress(last - first)
    return engine


def _turns(
    engine: Engine,
    trace: Trace | StreamedTrace,
    waiting: Sequence[Served],
    cache_reset: str,
    on_engine: Callable[[Engine], object] | None,
) -> Iterator[tuple[Engine, Trace, Sequence[Served]]]:
    """Yield the parts of a trace in turn, each with the engine that serves it.

    With it come the requests that its passes serve, by the number of the pass in that engine. With
    `cache_reset=request` each request has an engine of its own, as in a live run, whose passes the
    given engine adopts.
    """
    if cache_reset != "request":
        yield from ((engine, part, waiting) for part in trace.parts())
        return
    server: Engine | None = None
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
    capacity, policy = setting.capacity, setting.policy
    routing, prefetch = policy.routing, policy.prefetch
    shared = len(capacity.bytes_by_partition) < trace.geometry.num_layers
    looks_ahead = bool(getattr(routing.algorithm, "depth", 0))
    for key, value, is_refused, allowed in (
        ("attention", setting.attention, setting.attention == CONTEXT, "attention='none'"),
        ("capacity", capacity.text, shared, "a cache per layer, as '30/layer'"),
        ("routing", routing.name, looks_ahead, "a routing of one layer"),
        ("prefetch", prefetch.name, prefetch.algorithm.is_active, "prefetch='none'"),
    ):
        if is_refused:
            raise ValueError(
                f"{key}={value!r} cannot be combined with trace {trace.name}, which was recorded "
                f"with scoring=scan. Allowed with it: {allowed}."
            )


def _serve(engine: Engine, part: Trace, needs: Needs, first: int, last: int, is_scan: bool) -> None:
    """Serve passes `first` to `last` (excluded) of a part, or a scanned text of so many tokens."""
    num_layers = part.geometry.num_layers
    batch = _batch_of(part, needs, first, last, engine.wants_positions)
    if is_scan:
        _scan(engine, batch)
        return
    proposed, next_use = _recorded(part, needs, first, last), None
    if engine.eviction.is_offline and engine.future is not None:
        events = slice(first * num_layers, last * num_layers + 1)
        bounds = part.key_bounds[events]
        next_use = engine.future.next_use[bounds[0] : bounds[-1]]
    ahead = None
    if _is_apart(engine):
        _draft(part, engine, first)
        if engine.rules.prefetch.predicts_pass and proposed is not None:
            # A pass's proposal precedes its first layer, but is recorded with it.
            keys, bounds = proposed
            ahead, proposed = keys[: bounds[1]], (keys[:0], np.zeros_like(bounds))
    engine.serve(batch, proposed, next_use, ahead=ahead)


def _is_apart(engine: Engine) -> bool:
    """Whether something is to be done before each pass."""
    return engine.rules.prefetch.predicts_pass or engine.draft_stage is not None


def _batch_of(part: Trace, needs: Needs, first: int, last: int, has_positions: bool) -> Batch:
    """Return passes `first` to `last` (excluded) of a part as a live run has them."""
    num_layers, columns = part.geometry.num_layers, part.columns
    rows = part.row_bounds[first * num_layers : last * num_layers + 1]
    own, tokens = slice(rows[0], rows[-1]), np.diff(rows)
    weights = logits = UNSEEN_SCORES
    if needs.weights and columns.weights is not None:
        weights = columns.weights[own]
    if needs.logits and part.logits is not None:
        logits = part.logits[own].astype(np.float32)
    phase = PHASES[columns.phase[rows[0]]]
    targets, predicted = _predictions(part, needs, rows, phase)
    positions = None
    if has_positions:
        starts = pairwise(rows[::num_layers].tolist())
        stops = rows[1::num_layers].tolist()
        positions = [
            columns.token[start:stop].astype(np.int64)
            for (start, _), stop in zip(starts, stops, strict=True)
        ]
    return Batch(
        phase=phase,
        num_layers=num_layers,
        experts=columns.experts[own].astype(np.int64),
        bounds=None if (tokens == 1).all() else rows - rows[0],
        weights=weights,
        logits=logits,
        targets=targets,
        predicted=predicted,
        positions=positions,
    )


def _predictions(
    part: Trace, needs: Needs, rows: Any, phase: str
) -> tuple[Sequence[Sequence[int]], FloatArray]:
    """Return by layer which layers are predicted there, and the predictions of these rows.

    There are none where proposals are known already.
    """
    num_layers, num_experts = part.geometry.num_layers, part.geometry.num_experts
    if not needs.depth:
        return (), UNSEEN_SCORES
    targets = [
        [*range(layer + 1, min(layer + needs.depth + 1, num_layers))] for layer in range(num_layers)
    ]
    if needs.predicted_by:
        found = [target_of(layer, num_layers, phase) for layer in range(num_layers)]
        targets = [[] if target is None else [target] for target in found]
    if needs.recorded is not None or part.predicted is None:
        return targets, UNSEEN_SCORES
    offsets = part.predicted.offsets[rows[0] : rows[-1] + 1]
    tokens, num_passes = np.diff(rows), (len(rows) - 1) // num_layers
    wanted = np.repeat(np.tile([*map(len, targets)], num_passes), tokens)
    values = part.predicted.values[offsets[0] : offsets[-1]].reshape(-1, num_experts)
    kept = np.diff(offsets) // num_experts
    if (kept != wanted).any():
        # The trace predicts further ahead.
        places = np.arange(kept.sum()) - np.repeat(np.cumsum(kept) - kept, kept)
        values = values[places < np.repeat(wanted, kept)]
    return targets, values.astype(np.float32)


def _scan(engine: Engine, batch: Batch) -> None:
    """Serve the passes of a scanned text, of a token each, layer by layer like the live run."""
    engine.begin_scan(batch.num_passes)
    for layer in range(batch.num_layers):
        own = slice(layer, None, batch.num_layers)
        scores: dict[str, Any] = {"weights": batch.weights[own], "logits": batch.logits[own]}
        engine.scan(Batch(DECODE, 1, batch.experts[own], first_layer=layer, **scores))
    engine.end_scan()


@dataclass(frozen=True, slots=True)
class Needs:
    """The fields of an event, besides its keys, that the algorithms of a policy need."""

    weights: bool
    logits: bool
    depth: int
    predicted_by: str
    """Digest of the predictor behind the predictions; empty for the model's gates."""
    recorded: Lists | None = None
    """The prefetcher's proposals in the recorded run, which spare asking it."""


def _needs_of(trace: Trace, engine: Engine, setting: Setting, cache_reset: str) -> Needs:
    """Return the fields that the policy needs; recorded proposals stand in for its prefetcher.

    Raises ValueError where the trace lacks one of them.
    """
    choice: Any = setting.policy.prefetch
    routing, prefetch = engine.rules.routing, engine.rules.prefetch
    recorded = None
    # Some routing algorithms execute the predicted experts, some miss algorithms choose prefetch
    # levels by the predictions: these need the predictions themselves.
    if not (routing.depth or engine.rules.miss.uses_ladder):
        name = identity(choice, setting.seed, engine.prefetch_digest, cache_reset)
        recorded = trace.proposed.get(name)
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
    needs = Needs(weights, logits, engine.depth, engine.predictor_digest, recorded)
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


def _lacks_of_predictions(trace: Trace, needs: Needs) -> str:
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


def _segments(trace: Trace, one_by_one: bool) -> Iterator[tuple[int, int, bool]]:
    """Divide the passes into batches and scanned texts; yield (first, last, is scanned).

    The passes of a batch have one phase, and are all of one token or all of several; `one_by_one`
    has each for itself.
    """
    starts = trace.row_bounds[:: trace.geometry.num_layers]
    rows_of_first = trace.row_bounds[1 :: trace.geometry.num_layers] - starts[:-1]
    kinds = trace.columns.phase[starts[:-1]] * 2 + (rows_of_first > 1)
    changes: list[int] = (np.flatnonzero(np.diff(kinds)) + 1).tolist()
    at, most = 0, 1 if one_by_one else _BATCH_PASSES
    for first, count in (*trace.scans, (trace.num_passes, 0)):
        cuts = [at, *(change for change in changes if at < change < first), first]
        for start, stop in pairwise(cuts):
            for begin in range(start, stop, most):
                yield begin, min(begin + most, stop), False
        if count:
            yield first, first + count, True
        at = first + count


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


def _recorded(trace: Trace, needs: Needs, first: int, last: int) -> Proposed | None:
    """Return what was proposed at each event of passes `first` to `last`, if it was recorded."""
    if needs.recorded is None:
        return None
    num_layers = trace.geometry.num_layers
    bounds = needs.recorded.bounds[first * num_layers : last * num_layers + 1]
    keys = needs.recorded.values[bounds[0] : bounds[-1]].astype(np.int64)
    return keys, bounds - bounds[0]

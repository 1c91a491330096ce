"""Runs of one setting, a row each, whose rules decide a layer of a decode step at once."""

# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from typing import NamedTuple

from lm_eval_moecache.algorithms.costs import Choice, Routed, take_for_row
from lm_eval_moecache.algorithms.features import Rank
from lm_eval_moecache.engine.core.cache import find, pin
from lm_eval_moecache.engine.core.event import close_event, enter, look_up
from lm_eval_moecache.engine.core.state import BatchEvent, Keys, PassBatch, State
from lm_eval_moecache.records.jit import Array, Table, table_at
from lm_eval_moecache.records.ledger import Counters

CLOSE_ROW, ENTER_ROW = 1, 2
"""What `serve_row` does: close a layer, enter the next one."""


class Rows(NamedTuple):
    """The rows, each at the same layer of a pass of one token.

    A batch has three events of each row r of n: what its router chose is event r, what is looked up
    event n + r, and what is executed event 2n + r. They are told by their experts; their keys are
    found here.
    """

    places: Array
    """Addresses of each row's tables and counts, and of what its routing rule keeps of each layer,
    if a cost chooses experts: [rows, tables + 2]."""
    numbers: Array
    """Number of the first event of each row's pass in its run."""
    demands: Array
    """Scratch, as long as the batch's keys."""
    resident: Array
    absent: Array
    """Where it is written where the next layer's experts are: [rows, experts]."""
    awaits: int
    """Whether experts whose prefetch is under way are not absent."""
    levels: Array
    """Level that each entry of each row requires, and at which it was then executed."""
    upgrades: int
    """Whether residents below that level are loaded again."""


def tables_at(like: State, counts: Table, places: Array) -> tuple[State, Table]:
    """Return the tables and counts at these addresses, of types and sizes like those given."""
    state = State(
        table_at(like.experts, places[0]),
        table_at(like.layers, places[1]),
        table_at(like.now, places[2]),
        table_at(like.forecasts, places[3]),
        table_at(like.slots, places[4]),
        table_at(like.levels, places[5]),
        table_at(like.layer_states, places[6]),
        table_at(like.queues, places[7]),
        table_at(like.caches, places[8]),
        table_at(like.run, places[9]),
        like.messages,
        like.outside,
    )
    return state, table_at(counts, places[10])


def route_token(
    given: Routed, choice: Choice, kept: Array, row: int, token: int, batch: PassBatch
) -> bool:
    """Have a cost choose the experts that are looked up and executed for a token of a row; return
    whether they are not the router's. A batch has three events of each token."""
    size, top_k = given.chosen.shape
    is_changed = take_for_row(given, choice, kept, row, token, token + 1)
    for place in range(top_k):
        for later in (size + token, 2 * size + token):
            batch.experts[later * top_k + place] = given.chosen[token, place]
    return is_changed


def serve_row(
    state: State,
    rank: Rank,
    batch: PassBatch,
    counts: Table,
    what: int,
    layer: int,
    rows: Rows,
    row: int,
) -> None:
    """Close a row's event of a layer as rules have decided it, or enter the next layer, or both."""
    number = rows.numbers[row] + layer
    if what & CLOSE_ROW:
        close_row(state, rank, batch, counts[0], layer, rows, row, number)
    if what & ENTER_ROW:
        enter(state, rank, BatchEvent(batch, row, number + 1, layer + 1, 0, 0, 1))
        find(state, layer + 1, rows.resident[row], rows.absent[row], rows.awaits)


def close_row(
    state: State,
    rank: Rank,
    batch: PassBatch,
    count: Counters,
    layer: int,
    rows: Rows,
    row: int,
    number: int,
) -> None:
    """Serve a row's event, whose number in its run is given, as rules have decided it."""
    size, seen = len(rows.numbers), count.misses + count.late
    looked_up = spelled_out(state, batch, size + row, number, layer)
    executed = spelled_out(state, batch, 2 * size + row, number, layer)
    look_up(state, looked_up, count)
    if state.run[0].lossy:
        count_changes(state, batch, row, size, count.misses + count.late - seen, count)
    demands = demanded(state, looked_up, executed, rows, row, count)
    close_event(state, rank, executed, demands, demands.stop - demands.start, count)
    if state.run[0].num_levels > 1:
        note_levels(state, executed, rows.levels, row)


def spelled_out(state: State, batch: PassBatch, place: int, number: int, layer: int) -> BatchEvent:
    """Return a token's event, whose keys it finds from the experts: each once, none if dropped."""
    top_k, base = state.run[0].top_k, layer * state.now[0].num_experts
    start = stop = place * top_k
    for entry in range(start, start + top_k):
        if batch.experts[entry] >= 0:
            key = base + batch.experts[entry]
            if not is_among(batch.keys, start, stop, key):
                batch.keys[stop] = key
                stop += 1
    return BatchEvent(batch, place, number, layer, start, stop, 1)


def is_among(values: Array, start: int, stop: int, value: int) -> bool:
    """Whether a value is one of those from `start` to `stop`."""
    for place in range(start, stop):  # noqa: SIM110 (numba has no generators)
        if values[place] == value:
            return True
    return False


def count_changes(
    state: State, batch: PassBatch, row: int, size: int, absent: int, count: Counters
) -> None:
    """Count how what is executed differs from what the router chose."""
    top_k, experts = state.run[0].top_k, batch.experts
    start, is_changed = row * top_k, False
    for place in range(top_k):
        looked_up = experts[(size + row) * top_k + place]
        executed = experts[(2 * size + row) * top_k + place]
        is_changed |= executed != experts[start + place]
        if executed < 0:
            count.dropped += 1
        else:
            count.substituted += looked_up >= 0 and looked_up != executed
            count.unfaithful += not is_among(experts, start, start + top_k, executed)
    count.weighed_tokens += absent > 0 or is_changed


def demanded(
    state: State,
    looked_up: BatchEvent,
    executed: BatchEvent,
    rows: Rows,
    row: int,
    count: Counters,
) -> Keys:
    """Pin what is executed; demand what of it is absent, in order of need, and count the rest."""
    keys, start, demands = looked_up.batch.keys, looked_up.start, rows.demands
    stop, run = start, state.run[0]
    pin(state, keys, executed.start, executed.stop, executed.layer)
    for place in range(start, looked_up.stop):
        key = keys[place]
        slot, is_absent = state.slots[key], state.experts[key].resident == 0
        if not (is_absent or rows.upgrades):
            continue
        if not is_among(keys, executed.start, executed.stop, key):
            count.avoided += is_absent
            continue
        level = required(state, executed, rows.levels, row, key)
        if is_absent or level < slot.level:
            slot.demanded = run.mark
            slot.demanded_level = level
            demands[stop] = key
            stop += 1
    return Keys(demands, start, stop)


def required(state: State, executed: BatchEvent, levels: Array, row: int, key: int) -> int:
    """Return the best level that an entry of a row requires of an expert."""
    top_k, best = state.run[0].top_k, state.run[0].num_levels - 1
    expert = key - executed.layer * state.now[0].num_experts
    for place in range(top_k):
        if executed.batch.experts[executed.place * top_k + place] == expert:
            best = min(best, int(levels[row * top_k + place]))
    return best


def note_levels(state: State, executed: BatchEvent, levels: Array, row: int) -> None:
    """Write at which level each entry of a row was executed."""
    top_k, base = state.run[0].top_k, executed.layer * state.now[0].num_experts
    for place in range(top_k):
        expert = executed.batch.experts[executed.place * top_k + place]
        if expert >= 0:
            levels[row * top_k + place] = state.slots[base + expert].executed_level

"""What a run consists of: steps of an event, or batches of whole passes."""

# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from lm_eval_moecache.algorithms.costs import Choice, Routed
from lm_eval_moecache.algorithms.features import Rank, note_pass
from lm_eval_moecache.engine.core.cache import EVENT, PASS, notify, reset
from lm_eval_moecache.engine.core.event import close_event, demand, enter, look_up
from lm_eval_moecache.engine.core.link import flush
from lm_eval_moecache.engine.core.rows import Rows, route_token, serve_row, tables_at
from lm_eval_moecache.engine.core.state import (
    IN_PYTHON,
    BatchEvent,
    Keys,
    PassBatch,
    State,
    Task,
    event_of,
)
from lm_eval_moecache.engine.core.text import scan
from lm_eval_moecache.records.jit import Array, Table, by_reference, table_at
from lm_eval_moecache.records.ledger import Counters

SETTLE, RESET, BEGIN, ENTER, LOOK_UP, DEMAND, CLOSE = 1, 2, 4, 8, 16, 32, 64
"""What `step` does with an event, in this order."""

ROUTE, SCAN = 128, 256
"""What it does with rows, and with the tokens of a text."""
PASSES = 0
"""What `step` does with a batch of whole passes: everything."""


def step(
    state: State,
    rank: Rank,
    batch: PassBatch,
    counts: Table,
    task: Task,
    rows: Rows,
    routed: Routed,
    choice: Choice,
) -> int:
    """Do a task on a batch or its first event, or on the events of each row if there are any.

    Compiled code is entered by it. Where there are rows, their tables are like those of `state`.
    Returns what `act` does, or whether costs have chosen others than the router.
    """
    events, what, layer, is_changed = by_reference(batch), task.what, task.layer, False
    given, choices = by_reference(rows), by_reference(routed)
    if what & SCAN:
        tables = by_reference(state)
        return int(scan(tables, rank, events, counts, given, task, choices, choice))
    if len(rows.numbers) == 0:
        event = event_of(events, 0, task.number, layer)
        return act(by_reference(state), rank, event, counts, what, task.demands, task.levels)
    for row in range(len(rows.numbers)):
        own, count = tables_at(state, counts, rows.places[row])
        if what & ROUTE:
            kept = table_at(routed.state, rows.places[row, 11])
            is_changed |= route_token(choices, choice, kept[layer], row, row, events)
        serve_row(by_reference(own), rank, events, count, what, layer, given, row)
    return int(is_changed)


def act(
    state: State,
    rank: Rank,
    event: BatchEvent,
    counts: Table,
    what: int,
    demands: Keys,
    levels: Array,
) -> int:
    """Serve the passes of a batch, or do `what` is asked with one event of it.

    Returns how many keys a `LOOK_UP` demands.
    """
    run, batch = state.run[0], event.batch
    if what == PASSES:
        serve_passes(state, rank, batch, counts)
        return 0
    if what & SETTLE:
        flush(state)
    if what & RESET:
        reset(state, batch.warm)
    if what & BEGIN:
        begin_pass(state, event.number, batch.rows[1])
    if what & ENTER:
        enter(state, rank, event)
    if what & LOOK_UP:
        run.absent = look_up(state, event, counts[0])
    keys, wanted = Keys(batch.keys, event.start, event.stop), run.absent
    if what & DEMAND:
        demand(state, keys, event.layer, demands, levels)
        keys, wanted = demands, demands.stop - demands.start
    if what & CLOSE:
        close_event(state, rank, event, keys, wanted, counts[0])
    return run.absent


def serve_passes(state: State, rank: Rank, batch: PassBatch, counts: Table) -> None:
    """Serve the passes of a batch; write each one's counts to `counts`."""
    num_layers, run = len(state.layers), state.run[0]
    for index in range(batch.num_passes):
        number, event, count = batch.first_pass + index, index * num_layers, counts[index]
        moved, busy_s, evictions, lifetime = run.moved, run.busy_s, run.evictions, run.lifetime
        count.start_s = run.now
        if number != state.now[0].pass_index:
            begin_pass(state, number, batch.rows[event + 1] - batch.rows[event])
        for layer in range(num_layers):
            place = event_of(batch, event + layer, number * num_layers + layer, layer)
            serve(state, rank, place, count)
        count.end_s = run.now
        count.bytes_moved = run.moved - moved
        count.evictions = run.evictions - evictions
        count.lifetime_tokens = run.lifetime - lifetime
        count.link_busy_s = run.busy_s - busy_s


def begin_pass(state: State, number: int, tokens: int) -> None:
    """Begin a pass of a number of tokens."""
    state.run[0].tokens += tokens
    note_pass(state, number)
    if state.run[0].own:
        notify(state, PASS, number)


def serve(state: State, rank: Rank, event: BatchEvent, count: Counters) -> None:
    """Serve one event with all that its router chose."""
    if IN_PYTHON or state.run[0].own:
        notify(state, EVENT, event.layer)
    enter(state, rank, event)
    num_demands = look_up(state, event, count)
    keys = Keys(event.batch.keys, event.start, event.stop)
    close_event(state, rank, event, keys, num_demands, count)

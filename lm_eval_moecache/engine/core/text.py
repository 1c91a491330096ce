"""A layer of a text whose tokens are routed in turn, each by what the cache then holds."""

# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from lm_eval_moecache.algorithms.costs import Choice, Routed
from lm_eval_moecache.algorithms.features import Rank, note_pass
from lm_eval_moecache.engine.core.cache import find
from lm_eval_moecache.engine.core.event import enter
from lm_eval_moecache.engine.core.rows import Rows, close_row, route_token
from lm_eval_moecache.engine.core.state import IN_PYTHON, BatchEvent, PassBatch, State, Task
from lm_eval_moecache.records.jit import Table


def begin_token(state: State, number: int, layer: int) -> None:
    """Begin a token that is served layer by layer with others, at this layer."""
    state.run[0].tokens += 1
    note_pass(state, number)
    if IN_PYTHON and state.run[0].own:
        state.outside.by_layer[layer].on_pass(number)


def scan(
    state: State,
    rank: Rank,
    batch: PassBatch,
    counts: Table,
    rows: Rows,
    task: Task,
    routed: Routed,
    choice: Choice,
) -> bool:
    """Serve a layer for all tokens; return whether a cost has chosen others than the router.

    Batch and rows are as in `Rows`, with a token for a row; the task's number is the first pass.
    Each token's counts are added to, and `end_s` by the seconds that it took. Where `routed` has no
    tokens, no cost chooses: the batch has what is looked up and executed.
    """
    run, layer, is_changed = state.run[0], task.layer, False
    for token in range(len(counts)):
        number = task.number + token
        event, count = number * len(state.layers) + layer, counts[token]
        begin_token(state, number, layer)
        now, moved, busy_s = run.now, run.moved, run.busy_s
        evictions, lifetime = run.evictions, run.lifetime
        enter(state, rank, BatchEvent(batch, token, event, layer, 0, 0, 1))
        if len(routed.chosen) > 0:
            find(state, layer, rows.resident[0], rows.absent[0], rows.awaits)
            is_changed |= route_token(routed, choice, routed.state[0], 0, token, batch)
        close_row(state, rank, batch, count, layer, rows, token, event)
        count.end_s += run.now - now
        count.bytes_moved += run.moved - moved
        count.link_busy_s += run.busy_s - busy_s
        count.evictions += run.evictions - evictions
        count.lifetime_tokens += run.lifetime - lifetime
    return is_changed

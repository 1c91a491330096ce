"""A layer of a text whose tokens are routed in turn, each by what the cache then holds."""

# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from typing import NamedTuple

from lm_eval_moecache.algorithms.costs import RankCost, Routed, take_for_row
from lm_eval_moecache.algorithms.features import Rank
from lm_eval_moecache.engine.core.cache import find
from lm_eval_moecache.engine.core.event import enter
from lm_eval_moecache.engine.core.passes import begin_token
from lm_eval_moecache.engine.core.rows import Rows, close_row
from lm_eval_moecache.engine.core.state import BatchEvent, PassBatch, State
from lm_eval_moecache.records.jit import Table, by_reference


class Scan(NamedTuple):
    """Which layer of which tokens is served."""

    layer: int
    first_pass: int
    """The pass of the first token; each has one of its own."""
    tokens_before: int
    """How many tokens the run had before the text."""
    routes: int
    """Whether a cost chooses experts; else the batch has what is looked up and executed."""


class Choice(NamedTuple):
    """What each expert costs, and the records of which it is a function, one of each kind."""

    cost: RankCost
    expert: Table
    seen: Table


def scan(
    state: State,
    rank: Rank,
    batch: PassBatch,
    counts: Table,
    rows: Rows,
    task: Scan,
    routed: Routed,
    choice: Choice,
) -> bool:
    """Serve a layer for all tokens; return whether a cost has chosen others than the router.

    Batch and rows are as in `Rows`, with a token for a row. Each token's counts are added to, and
    `end_s` by the seconds that it took.
    """
    own, events, places = by_reference(state), by_reference(batch), by_reference(rows)
    run, layer, choices, is_changed = state.run[0], task.layer, by_reference(routed), False
    size, top_k, expert, seen = len(counts), run.top_k, choice.expert[0], choice.seen[0]
    for token in range(size):
        number = task.first_pass + token
        event, count = number * len(state.layers) + layer, counts[token]
        run.tokens = task.tokens_before + token
        begin_token(own, number, layer)
        now, moved, busy_s = run.now, run.moved, run.busy_s
        evictions, lifetime = run.evictions, run.lifetime
        enter(own, rank, BatchEvent(events, token, event, layer, 0, 0, 1))
        if task.routes:
            find(own, layer, rows.resident[0], rows.absent[0], rows.awaits)
            stop = token + 1
            is_changed |= take_for_row(choices, choice.cost, expert, seen, 0, token, stop)
            for place in range(top_k):
                for later in (size + token, 2 * size + token):
                    batch.experts[later * top_k + place] = routed.chosen[token, place]
        close_row(own, rank, events, count, layer, places, token, event)
        count.end_s += run.now - now
        count.bytes_moved += run.moved - moved
        count.link_busy_s += run.busy_s - busy_s
        count.evictions += run.evictions - evictions
        count.lifetime_tokens += run.lifetime - lifetime
    return is_changed

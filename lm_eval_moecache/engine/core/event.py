"""One event, from its lookup to the end of its last expert."""

# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from lm_eval_moecache.algorithms.features import Rank, note_event
from lm_eval_moecache.engine.core.cache import (
    EXECUTED,
    NOTED,
    WAVE,
    insert,
    make_room,
    notify,
    pin,
    release_for_upgrade,
    take_bytes,
)
from lm_eval_moecache.engine.core.clock import await_link, charge_loads, execute, wait_until
from lm_eval_moecache.engine.core.link import (
    cancel_due,
    drain,
    drain_fifo,
    is_active,
    land,
    submit,
    transfer,
)
from lm_eval_moecache.engine.core.state import IN_PYTHON, BatchEvent, Keys, State
from lm_eval_moecache.records.jit import Array
from lm_eval_moecache.records.ledger import Counters


def enter(state: State, rank: Rank, event: BatchEvent) -> None:
    """Charge a layer's dense part, up to its router's decision, while the link works on."""
    run, dense_s = state.run[0], event.batch.dense_s[event.place]
    if IN_PYTHON and run.recorded:
        state.outside.add_span("dense", run.now, run.now + dense_s, event.layer, event.tokens)
    run.now += dense_s
    if run.prefetches:
        drain(state, rank, run.now, -1, event.layer)
    charge_loads(run)


def look_up(state: State, event: BatchEvent, count: Counters) -> int:
    """Pin the event's keys, count what is there, and score the predictions for the layer.

    Marks as demanded what is absent or below the best level; returns how many keys these are.
    """
    run, this_pass, keys = state.run[0], state.now[0].pass_index, event.batch.keys
    run.mark += 1
    mark, start, stop, tokens = run.mark, event.start, event.stop, event.tokens
    experts, slots = state.experts, state.slots
    absent = late = below = 0
    for place in range(start, stop):
        key = keys[place]
        expert = experts[key]
        expert.pinned = mark
        if expert.resident:
            if run.num_levels > 1 and slots[key].level > 0:
                below += 1
                slots[key].demanded = mark
                slots[key].demanded_level = 0
            continue
        absent += 1
        slot = slots[key]
        slot.demanded = mark
        slot.demanded_level = 0
        if slot.arriving or slot.due >= 0:
            late += 1
        else:
            count.misses += 1
            count.collisions += slot.left_in == this_pass
    count.late += late
    count.requests += stop - start
    count.token_requests += tokens * run.top_k
    if absent:
        if tokens == 1 and not run.lossy:
            count.token_misses += absent
        else:
            count_tokens(state, event)
            for place in range(start, stop):
                if not experts[keys[place]].resident:
                    count.token_misses += slots[keys[place]].serves
    if run.prefetches:
        score_predictions(state, event, count)
    state.layers[event.layer].stale = 1
    return absent + below


def count_tokens(state: State, event: BatchEvent) -> int:
    """Count the tokens that each expert of an event serves; return their sum."""
    top_k, base, total = state.run[0].top_k, event.layer * state.now[0].num_experts, 0
    batch, at = event.batch, event.place
    for place in range(event.start, event.stop):
        state.slots[batch.keys[place]].serves = 0
    for place in range(batch.rows[at] * top_k, batch.rows[at + 1] * top_k):
        if batch.experts[place] >= 0:
            state.slots[base + batch.experts[place]].serves += 1
            total += 1
    return total


def score_predictions(state: State, event: BatchEvent, count: Counters) -> None:
    """Count prefetch hits, and how many keys were predicted, needed, and both."""
    predicted, right, keys = state.layer_states[event.layer], 0, event.batch.keys
    slots = state.slots
    for place in range(event.start, event.stop):
        slot = slots[keys[place]]
        count.prefetch_hits += slot.unused
        slot.unused = 0
        right += slot.predicted == predicted.epoch
    if predicted.num_predicted:
        count.predicted += predicted.num_predicted
        count.predicted_right += right
        count.predictable += event.stop - event.start
        predicted.epoch += 1
        predicted.num_predicted = 0


def demand(state: State, keys: Keys, layer: int, demands: Keys, levels: Array) -> None:
    """Pin the keys to execute instead of those looked up; mark the chosen demands."""
    run = state.run[0]
    pin(state, keys.keys, keys.start, keys.stop, layer)
    for place in range(demands.start, demands.stop):
        state.slots[demands.keys[place]].demanded = run.mark
        state.slots[demands.keys[place]].demanded_level = levels[place]


def close_event(
    state: State, rank: Rank, event: BatchEvent, demands: Keys, num_demands: int, count: Counters
) -> None:
    """Load what is demanded, execute the event, and let the link work through its prefetches.

    Demanded are the marked ones among `demands`, in this order.
    """
    run, batch, at, layer = state.run[0], event.batch, event.place, event.layer
    mark, tokens, rest = run.mark, event.tokens, event.stop - event.start
    if run.lossy:
        assignments = count_tokens(state, event)
    elif tokens == 1:
        assignments = rest
    else:
        assignments = tokens * run.top_k
        if num_demands or run.num_levels > 1:
            count_tokens(state, event)
    gate_s = ready_s = run.now
    if num_demands:
        if run.prefetches:
            ready_s = await_in_flight(state, rank, event, demands, mark)
        if IN_PYTHON and run.hosts:
            chosen = demands.keys[demands.start : demands.stop]
            num_keys, num_served = state.outside.share_out(state, chosen, mark, count)
            rest, assignments = rest - num_keys, assignments - num_served
        if run.num_levels > 1:
            for place in range(demands.start, demands.stop):
                key = demands.keys[place]
                if state.experts[key].resident and is_missing(state, key, mark):
                    release_for_upgrade(state, key)
        if run.load_overhead_s:
            add_loaded(state, demands, mark, layer)
            charge_loads(run)
            ready_s = max(ready_s, run.now)
        num_keys, num_served, ready_s = load(state, rank, event, demands, mark, ready_s, count)
        rest, assignments = rest - num_keys, assignments - num_served
        if run.cached_first:
            # The compute is busy from here on: predictions do not hide behind the wait.
            wait_until(state, run.now + batch.predict_s[at])
            num_keys, num_served = mark_executed(state, event, mark, True)
            execute(state, layer, num_keys, num_served, count)
            rest, assignments = rest - num_keys, assignments - num_served
    if IN_PYTHON and run.hosts:
        state.outside.await_uploads(state, batch.keys[event.start : event.stop], count)
    if run.prefetches and not run.fifo:
        cancel_due(state, event.number)
    if num_demands and not run.piecewise:
        count.stall_s += await_link(state, ready_s)
    if run.prefetches:
        ready_s = gate_s + batch.predict_s[at]
        if not run.after_layer:
            submit(state, event, ready_s)
        wait_until(state, ready_s)
    if IN_PYTHON and num_demands and run.piecewise:
        state.outside.execute_piecewise(state, event, mark, count)
    else:
        if run.num_levels > 1:
            rest, assignments = mark_executed(state, event, mark, False)
        elif IN_PYTHON and run.watched:
            mark_executed(state, event, mark, False)
        execute(state, layer, rest, assignments, count)
    if run.mark != mark and (run.hosts or is_active(run)):
        # After waves, all keys of the event are pinned again.
        pin(state, batch.keys, event.start, event.stop, layer)
    if IN_PYTHON and run.hosts:
        chosen = demands.keys[demands.start : demands.stop]
        state.outside.end_host(state, rank, chosen, mark, layer, count)
    if run.prefetches:
        if run.after_layer:
            submit(state, event, run.now)
        drain(state, rank, run.now, run.mark, layer)
    note(state, event)


def load(
    state: State,
    rank: Rank,
    event: BatchEvent,
    demands: Keys,
    mark: int,
    ready_s: float,
    count: Counters,
) -> tuple[int, int, float]:
    """Load the demanded keys, in waves where they do not fit together.

    Returns how many keys and assignments waves have executed, and the arrival time of the last key.
    """
    run, layer, all_keys, all_served = state.run[0], event.layer, 0, 0
    cache, keys = state.layers[layer].cache, demands.keys
    for place in range(demands.start, demands.stop):
        key = keys[place]
        if not is_missing(state, key, mark):
            continue
        level = state.slots[key].demanded_level
        nbytes = state.levels[layer * run.num_levels + level].nbytes
        while not make_room(state, rank, key, nbytes, cache, run.mark, layer):
            if IN_PYTHON and run.lanes:
                ready_s = state.outside.move_together(state, ready_s)
                state.outside.end_wave()
            num_keys, num_served = mark_executed(state, event, mark, False)
            all_keys, all_served = all_keys + num_keys, all_served + num_served
            count.stall_s += await_link(state, ready_s)
            execute(state, layer, num_keys, num_served, count)
            ready_s = run.now
            pin_rest(state, event, mark)
        if IN_PYTHON and run.lanes:
            state.outside.moving.append((key, nbytes))
        else:
            ready_s = transfer(state, layer, level, ready_s, False, -1)
        take_bytes(state, cache, nbytes)
        insert(state, key, layer, level, False)
    if IN_PYTHON and run.lanes:
        ready_s = state.outside.move_together(state, ready_s)
    return all_keys, all_served, ready_s


def pin_rest(state: State, event: BatchEvent, mark: int) -> None:
    """After a wave, pin the event's keys that are still to be executed, under a new mark."""
    run, batch = state.run[0], event.batch
    run.mark += 1
    for place in range(event.start, event.stop):
        if state.slots[batch.keys[place]].done != mark:
            state.experts[batch.keys[place]].pinned = run.mark
        elif state.now[0].offline:
            state.experts[batch.keys[place]].next_use = batch.next_use[place]
    state.layers[event.layer].stale = 1
    if run.own:
        notify(state, WAVE, event.layer)


def is_missing(state: State, key: int, mark: int) -> bool:
    """Whether a key is demanded and not there, nor executed by an earlier wave.

    A prefetch may have brought a demanded key since it was looked up.
    """
    slot = state.slots[key]
    if slot.demanded != mark or slot.done == mark:
        return False
    if not state.experts[key].resident or slot.upgrading:
        return True
    return slot.level > slot.demanded_level


def await_in_flight(state: State, rank: Rank, event: BatchEvent, demands: Keys, mark: int) -> float:
    """Land what precedes the demands; return when the last of it that is needed arrives."""
    run = state.run[0]
    ready_s = run.now
    if not is_active(run) or (not run.fifo and run.inflight < 0):
        return ready_s
    if run.fifo:
        ready_s = max(ready_s, drain_fifo(state, rank, demands, mark, event.layer))
    else:
        # It lands before any demand can start, while the compute waits.
        if state.experts[run.inflight].pinned == mark:
            ready_s = run.busy_until
        land(state)
    for place in range(event.start, event.stop):
        state.slots[event.batch.keys[place]].unused = 0
    if IN_PYTHON and run.lanes:
        chosen = demands.keys[demands.start : demands.stop]
        state.outside.note_in_flight(state, chosen, mark, ready_s)
    return ready_s


def add_loaded(state: State, demands: Keys, mark: int, layer: int) -> None:
    """Count the bytes about to be loaded, for `charge_loads`."""
    run = state.run[0]
    for place in range(demands.start, demands.stop):
        if is_missing(state, demands.keys[place], mark):
            level = state.slots[demands.keys[place]].demanded_level
            run.loaded_bytes += state.levels[layer * run.num_levels + level].nbytes


def mark_executed(state: State, event: BatchEvent, mark: int, undemanded: bool) -> tuple[int, int]:
    """Mark resident keys as executed; count keys and assignments.

    `undemanded`: only those that were not demanded.
    """
    run, keys, num_keys, num_served = state.run[0], event.batch.keys, 0, 0
    counts_serves = event.tokens > 1 or run.lossy != 0
    if IN_PYTHON and run.watched:
        state.outside.wave = []
    for place in range(event.start, event.stop):
        key = keys[place]
        slot = state.slots[key]
        is_ready = state.experts[key].resident != 0 and not slot.upgrading
        if undemanded:
            is_ready = slot.demanded != mark
        if is_ready and slot.done != mark:
            slot.done = mark
            served = slot.serves if counts_serves else 1
            num_keys += 1
            num_served += served
            if run.num_levels > 1:
                slot.executed_level = slot.level
                state.experts[key].ran_below_best_precision = int(slot.level > 0)
                level = state.levels[slot.home * run.num_levels + slot.level]
                level.num_keys += 1
                level.num_served += served
            if run.own:
                notify(state, EXECUTED, key)
            if IN_PYTHON and run.watched:
                state.outside.wave.append(key)
    return num_keys, num_served


def note(state: State, event: BatchEvent) -> None:
    """Let the evictions learn of the executed event."""
    if state.run[0].own:
        notify(state, NOTED, event.layer)
        return
    top_k, start, stop = state.run[0].top_k, event.start, event.stop
    first, last = event.batch.rows[event.place] * top_k, event.batch.rows[event.place + 1] * top_k
    note_event(state, event.layer, event.tokens, event.batch, start, stop, first, last)

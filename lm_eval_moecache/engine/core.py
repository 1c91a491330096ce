"""The virtual clock's only statement of time, residency and prefetching: a loop over tables.

Plain functions on tables (`records.jit`, `algorithms.features`), in the subset of Python that numba
compiles, so that the same source serves a pass in Python or in machine code. `serve` is one event
from its dense part to the end of its last expert. Where Python has to speak in between, as lossy
algorithms do, the event is opened (`enter`, `look_up`) and closed (`close_event`) in turn. What no
table can hold is left to Python (`outside`): the host and lanes, which keep a run from machine
code, and evictions with a state of their own, which do not (`tell`, `ask`).
"""

# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from lm_eval_moecache.algorithms.features import (
    Rank,
    find_lowest,
    note_event,
    note_eviction,
    note_load,
    note_pass,
    note_wish,
)
from lm_eval_moecache.records.jit import Array, Table, by_reference, table_at
from lm_eval_moecache.records.ledger import Counters

IN_PYTHON = True
"""False in machine code, which thereby leaves out what only Python can do."""


@dataclass(slots=True)
class Slot:
    """The engine's state of one expert, apart from the features that eviction rules see."""

    home: int = 0
    """Its layer."""
    demanded: int = 0
    done: int = 0
    """Marks of the last event that demanded it and of the last that executed it in a wave."""
    unused: int = 0
    """1 if a prefetch loaded it and no event has used it since."""
    predicted: int = 0
    """The `epoch` of its layer in which it was last predicted."""
    level: int = 0
    """Precision level at which it is resident or arriving."""
    demanded_level: int = 0
    """Level at which it was last demanded."""
    executed_level: int = 0
    arriving: int = 0
    """1 while a prefetch of it is in flight, its bytes reserved."""
    upgrading: int = 0
    """1 from its release for a better level until that is loaded."""
    since: int = 0
    """Tokens processed before its load."""
    arrival: int = 0
    """Number of its load among all."""
    left_in: int = -2
    """The pass in which it was last evicted."""
    due: int = -1
    """Due event of its queued prefetch (-1: none queued); then its neighbours in that queue."""
    next: int = -1
    previous: int = -1
    queued_level: int = 0
    batch: int = -1
    """Level and batch (-1: none) of its queued prefetch."""
    earliest_s: float = 0.0
    """Earliest start of its queued prefetch."""
    serves: int = 0
    """Scratch: how many tokens of the event in progress it serves."""


@dataclass(slots=True)
class Level:
    """One precision level of a layer's experts."""

    nbytes: int = 0
    move_s: float = 0.0
    """Its transfer over a free link, without the latency."""
    flop_s: float = 0.0
    read_s: float = 0.0
    """Its arithmetic for one token, and reading its weights."""
    num_keys: int = 0
    num_served: int = 0
    """Scratch: keys and (token, key) pairs of the wave in progress."""


@dataclass(slots=True)
class LayerState:
    """The prediction for a layer's next event: its number, and how many keys it names."""

    epoch: int = 1
    num_predicted: int = 0


@dataclass(slots=True)
class Queue:
    """Ends of the queue of prefetches for one due event."""

    first: int = -1
    last: int = -1


@dataclass(slots=True)
class CacheState:
    """One cache: the layers `first_layer` to `end_layer` - 1, its bytes, and its counts."""

    first_layer: int = 0
    end_layer: int = 0
    capacity: int = 0
    used: int = 0
    peak: int = 0
    loads: int = 0
    warmed: int = 0
    """Residents present before the first request; not counted as loads."""
    evictions: int = 0
    replaced: int = 0
    """Residents released because the same expert was demanded at a better level."""
    lifetime: int = 0
    """Sum over evicted experts of the tokens processed while they were resident."""


@dataclass(slots=True)
class RunState:
    """Clock, link and totals of the run, and what its setting and policy ask for (flags: 0, 1)."""

    now: float = 0.0
    busy_until: float = 0.0
    busy_s: float = 0.0
    latency_s: float = 0.0
    wait_overhead_s: float = 0.0
    expert_overhead_s: float = 0.0
    load_overhead_s: float = 0.0
    """The compute's overhead of loading a byte."""
    top_k: int = 0
    num_levels: int = 1
    inflight: int = -1
    """Key of the prefetch in flight, which lands at `busy_until`."""
    open_batch: int = -1
    """Batch of the last transfer; the next one joins it if nothing comes between."""
    queued: int = 0
    """Number of queued prefetches; `earliest` is a lower bound on the next one's due event."""
    earliest: int = 0
    tokens: int = 0
    mark: int = 0
    """Number of the event, or wave, whose keys are pinned."""
    absent: int = 0
    """Number of keys that the event in progress demands as it was looked up."""
    loaded_bytes: int = 0
    """Loaded, with the compute's overhead still to be charged."""
    arrivals: int = 0
    moved: int = 0
    """Bytes."""
    transfers: int = 0
    evictions: int = 0
    lifetime: int = 0
    fifo: int = 0
    prefetches: int = 0
    after_layer: int = 0
    cached_first: int = 0
    lossy: int = 0
    """Whether events come with all their experts, some of which may be dropped."""
    own: int = 0
    """Whether evictions keep a state of their own."""
    hosts: int = 0
    lanes: int = 0
    """Whether an event's demands move together, over lanes or by projections."""
    piecewise: int = 0
    """Whether experts are executed as they arrive."""
    watched: int = 0
    """Whether somebody is told of each wave."""
    told: int = 0
    """Number of messages not yet read."""
    placed: int = 0
    """Whether residents have slots in memory (the wall clock)."""
    recorded: int = 0
    """Whether a timeline records what clock and link do."""


@dataclass(slots=True)
class PassCounts(Counters):
    """The counts and times of one pass, under the names of `PassRecord`."""

    start_s: float = 0.0
    end_s: float = 0.0


class State(NamedTuple):
    """All state that outlasts an event, as tables."""

    experts: Table
    """This and the next three are the tables of `algorithms.features.Features`."""
    layers: Table
    now: Table
    forecasts: Table
    slots: Table
    """By key."""
    levels: Table
    """By layer * levels + level."""
    layer_states: Table
    queues: Table
    """By due event modulo their number, one more than layers: events are due within a pass."""
    caches: Table
    run: Table
    """A single record."""
    messages: Array
    """To evictions with a state of their own, not yet read (`tell`); empty in plain Python."""
    outside: Any
    """What is not a table (`engine.outside.Outside`); in machine code, how it is called."""


class PassBatch(NamedTuple):
    """Some passes of a run. Arrays are by event unless they say otherwise."""

    first_pass: int
    """Index in the run of the first one."""
    num_passes: int
    keys: Array
    bounds: Array
    """Event e needs `keys[bounds[e]:bounds[e + 1]]`, in order of first need."""
    rows: Array
    """Event e's tokens are rows `rows[e]:rows[e + 1]` of `experts` and `weights`."""
    experts: Array
    weights: Array
    """Flat, `top_k` entries per row."""
    dense_s: Array
    predict_s: Array
    """Seconds until the layer's router has decided, and of predicting from its input."""
    next_use: Array
    """By place in `keys`: number of the next event that needs the key (offline rules only)."""
    proposed: Array
    proposed_bounds: Array
    """Event e proposes `proposed[proposed_bounds[e]:proposed_bounds[e + 1]]`."""
    proposed_levels: Array
    """By place in `proposed`, if there are several levels: that of the prefetch."""
    warm: Array
    """Keys that a reset cache starts with, in order of loading."""


# Passes and events.

SETTLE, RESET, BEGIN, ENTER, FIND, LOOK_UP, DEMAND, CLOSE = 1, 2, 4, 8, 128, 16, 32, 64
"""What `step` does with an event, in this order."""
RESIDENT, PENDING = 1, 2
PASSES = 0
"""What `step` does with a batch of whole passes: everything."""


def step(
    experts: Table,
    layers: Table,
    now: Table,
    forecasts: Table,
    slots: Table,
    levels: Table,
    layer_states: Table,
    queues: Table,
    caches: Table,
    runs: Table,
    messages: Array,
    outside: Any,
    rank: Rank,
    batch: PassBatch,
    counts: Table,
    what: int,
    number: int,
    layer: int,
    demands: Array,
    demanded_levels: Array,
    num_demands: int,
    rows: Array,
    numbers: Array,
    demand_bounds: Array,
    found: Array,
) -> int:
    """As `act`, on tables that are arguments: what compiled code is entered by.

    `rows` [rows, tables + 1] are the addresses of the tables and counts of several runs of one
    setting, to do `what` is asked with event r of the batch in run r: that of `numbers[r]`, with
    its part of the demands. It has no rows where the tables given are the run's own.
    """
    tables = experts, layers, now, forecasts, slots, levels, layer_states, queues, caches, runs
    state, events = State(*tables, messages, outside), by_reference(batch)
    if len(rows) == 0:
        call = what, number, layer, demands, demanded_levels, 0, num_demands, found
        return act(by_reference(state), rank, events, 0, counts, *call)
    for row in range(len(rows)):
        own = demand_bounds[row], demand_bounds[row + 1]
        call_of_row = what, numbers[row], layer, demands, demanded_levels, *own, found
        act_in_row(state, rows[row], rank, events, row, counts, *call_of_row)
    return 0


def act_in_row(
    like: State,
    places: Array,
    rank: Rank,
    batch: PassBatch,
    event: int,
    counts: Table,
    what: int,
    number: int,
    layer: int,
    demands: Array,
    demanded_levels: Array,
    first: int,
    last: int,
    found: Array,
) -> int:
    """As `act`, on the tables at these addresses, whose types and sizes are like those given."""
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
    count = table_at(counts, places[10])
    call = what, number, layer, demands, demanded_levels, first, last, found
    return act(by_reference(state), rank, batch, event, count, *call)


def act(
    state: State,
    rank: Rank,
    batch: PassBatch,
    event: int,
    counts: Table,
    what: int,
    number: int,
    layer: int,
    demands: Array,
    demanded_levels: Array,
    first: int,
    last: int,
    found: Array,
) -> int:
    """Serve the passes of a batch, or do `what` is asked with one event of it.

    `number` is that of the event in the run, with `BEGIN` that of its pass; it demands
    `demands[first:last]`. Returns how many keys a `LOOK_UP` demands.
    """
    run = state.run[0]
    if what == PASSES:
        serve_passes(state, rank, batch, counts)
        return 0
    if what & SETTLE:
        flush(state)
    if what & RESET:
        reset(state, batch.warm)
    if what & BEGIN:
        begin_pass(state, number, batch.rows[1])
    if what & ENTER:
        tokens = batch.rows[event + 1] - batch.rows[event]
        enter(state, rank, batch.dense_s[event], layer, tokens)
    if what & FIND:
        find(state, layer, found[event])
    if what & LOOK_UP:
        run.absent = look_up(state, batch, event, layer, counts[0])
    start, stop = batch.bounds[event], batch.bounds[event + 1]
    if what & DEMAND:
        demand(state, batch.keys, start, stop, layer, demands, demanded_levels, first, last)
    if what & CLOSE:
        chosen, wanted = demands, last - first
        if not what & DEMAND:
            chosen, first, last, wanted = batch.keys, start, stop, run.absent
        close_event(
            state, rank, batch, event, number, layer, chosen, first, last, wanted, counts[0]
        )
    return run.absent


def find(state: State, layer: int, found: Array) -> None:
    """Write where a layer's experts are: `RESIDENT`, `PENDING` (prefetched) or 0."""
    base = layer * state.now[0].num_experts
    for expert in range(state.now[0].num_experts):
        slot = state.slots[base + expert]
        found[expert] = 0
        if state.experts[base + expert].resident:
            found[expert] = RESIDENT
        elif slot.arriving or slot.due >= 0:
            found[expert] = PENDING


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
            serve(state, rank, batch, event + layer, number * num_layers + layer, layer, count)
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
        tell(state, PASS, number)


def begin_token(state: State, number: int, layer: int) -> None:
    """Begin a token that is served layer by layer with others, at this layer."""
    state.run[0].tokens += 1
    note_pass(state, number)
    if IN_PYTHON and state.run[0].own:
        state.outside.by_layer[layer].on_pass(number)


def serve(
    state: State, rank: Rank, batch: PassBatch, event: int, number: int, layer: int, count: Counters
) -> None:
    """Serve one event with all that its router chose.

    `event` is its number in the batch, `number` in the run.
    """
    if IN_PYTHON or state.run[0].own:
        tell(state, EVENT, layer)
    enter(state, rank, batch.dense_s[event], layer, batch.rows[event + 1] - batch.rows[event])
    demands = look_up(state, batch, event, layer, count)
    start, stop = batch.bounds[event], batch.bounds[event + 1]
    close_event(state, rank, batch, event, number, layer, batch.keys, start, stop, demands, count)


def enter(state: State, rank: Rank, dense_s: float, layer: int, tokens: int) -> None:
    """Charge a layer's dense part, up to its router's decision, while the link works on."""
    run = state.run[0]
    if IN_PYTHON and run.recorded:
        state.outside.add_span("dense", run.now, run.now + dense_s, layer, tokens)
    run.now += dense_s
    if run.prefetches:
        drain(state, rank, run.now, -1, layer)
    charge_loads(run)


def look_up(state: State, batch: PassBatch, event: int, layer: int, count: Counters) -> int:
    """Pin the event's keys, count what is there, and score the predictions for the layer.

    Marks as demanded what is absent or below the best level; returns how many keys these are.
    """
    run, this_pass = state.run[0], state.now[0].pass_index
    run.mark += 1
    mark, start, stop = run.mark, batch.bounds[event], batch.bounds[event + 1]
    tokens, absent, late, below = batch.rows[event + 1] - batch.rows[event], 0, 0, 0
    for place in range(start, stop):
        key = batch.keys[place]
        expert = state.experts[key]
        expert.pinned = mark
        if expert.resident:
            if run.num_levels > 1 and state.slots[key].level > 0:
                below += 1
                state.slots[key].demanded = mark
                state.slots[key].demanded_level = 0
            continue
        absent += 1
        slot = state.slots[key]
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
            count_tokens(state, batch, event, layer)
            for place in range(start, stop):
                if not state.experts[batch.keys[place]].resident:
                    count.token_misses += state.slots[batch.keys[place]].serves
    if run.prefetches:
        score_predictions(state, batch, start, stop, layer, count)
    state.layers[layer].unclear = 1
    return absent + below


def count_tokens(state: State, batch: PassBatch, event: int, layer: int) -> int:
    """Count the tokens that each expert of an event serves; return their sum."""
    top_k, base, total = state.run[0].top_k, layer * state.now[0].num_experts, 0
    for place in range(batch.bounds[event], batch.bounds[event + 1]):
        state.slots[batch.keys[place]].serves = 0
    for place in range(batch.rows[event] * top_k, batch.rows[event + 1] * top_k):
        if batch.experts[place] >= 0:
            state.slots[base + batch.experts[place]].serves += 1
            total += 1
    return total


def score_predictions(
    state: State, batch: PassBatch, start: int, stop: int, layer: int, count: Counters
) -> None:
    """Count prefetch hits, and how many keys were predicted, needed, and both."""
    predicted, right = state.layer_states[layer], 0
    for place in range(start, stop):
        slot = state.slots[batch.keys[place]]
        count.prefetch_hits += slot.unused
        slot.unused = 0
        right += slot.predicted == predicted.epoch
    if predicted.num_predicted:
        count.predicted += predicted.num_predicted
        count.predicted_right += right
        count.predictable += stop - start
        predicted.epoch += 1
        predicted.num_predicted = 0


def demand(
    state: State,
    keys: Array,
    start: int,
    stop: int,
    layer: int,
    demands: Array,
    demanded_levels: Array,
    first: int,
    last: int,
) -> None:
    """Pin the keys to execute instead of those looked up; mark the chosen demands."""
    run = state.run[0]
    pin(state, keys, start, stop, layer)
    for place in range(first, last):
        state.slots[demands[place]].demanded = run.mark
        state.slots[demands[place]].demanded_level = demanded_levels[place]


def close_event(
    state: State,
    rank: Rank,
    batch: PassBatch,
    event: int,
    number: int,
    layer: int,
    demands: Array,
    first: int,
    last: int,
    num_demands: int,
    count: Counters,
) -> None:
    """Load what is demanded, execute the event, and let the link work through its prefetches.

    The demands are marked keys among `demands[first:last]`, in this order.
    """
    run = state.run[0]
    mark, start, stop = run.mark, batch.bounds[event], batch.bounds[event + 1]
    tokens, rest = batch.rows[event + 1] - batch.rows[event], stop - start
    if run.lossy:
        assignments = count_tokens(state, batch, event, layer)
    elif tokens == 1:
        assignments = rest
    else:
        assignments = tokens * run.top_k
        if num_demands or run.num_levels > 1:
            count_tokens(state, batch, event, layer)
    counts_serves = tokens > 1 or run.lossy != 0
    gate_s = ready_s = run.now
    if num_demands:
        if run.prefetches:
            ready_s = await_in_flight(
                state, rank, batch, start, stop, demands, first, last, mark, layer
            )
        if IN_PYTHON and run.hosts:
            num_keys, num_served = state.outside.share_out(state, demands[first:last], mark, count)
            rest, assignments = rest - num_keys, assignments - num_served
        if run.num_levels > 1:
            release_for_upgrades(state, demands, first, last, mark)
        if run.load_overhead_s:
            add_loaded(state, demands, first, last, mark, layer)
            charge_loads(run)
            ready_s = max(ready_s, run.now)
        num_keys, num_served, ready_s = load(
            state, rank, batch, event, demands, first, last, mark, layer, ready_s, count
        )
        rest, assignments = rest - num_keys, assignments - num_served
        if run.cached_first:
            # The compute is busy from here on: predictions do not hide behind the wait.
            wait_until(state, run.now + batch.predict_s[event])
            num_keys, num_served = mark_executed(
                state, batch, start, stop, counts_serves, mark, True
            )
            execute(state, layer, num_keys, num_served, count)
            rest, assignments = rest - num_keys, assignments - num_served
    if IN_PYTHON and run.hosts:
        state.outside.await_uploads(state, batch.keys[start:stop], count)
    if run.prefetches and not run.fifo:
        cancel_due(state, number)
    if num_demands and not run.piecewise:
        count.stall_s += await_link(state, ready_s)
    if run.prefetches:
        ready_s = gate_s + batch.predict_s[event]
        if not run.after_layer:
            submit(state, batch, event, number - layer, layer, ready_s)
        wait_until(state, ready_s)
    if IN_PYTHON and num_demands and run.piecewise:
        chosen = batch.keys[start:stop]
        state.outside.execute_piecewise(state, chosen, counts_serves, mark, layer, count)
    else:
        if run.num_levels > 1:
            rest, assignments = mark_executed(state, batch, start, stop, counts_serves, mark, False)
        elif IN_PYTHON and run.watched:
            mark_executed(state, batch, start, stop, False, mark, False)
        execute(state, layer, rest, assignments, count)
    if run.mark != mark and (run.hosts or is_active(run)):
        # After waves, all keys of the event are pinned again.
        pin(state, batch.keys, start, stop, layer)
    if IN_PYTHON and run.hosts:
        state.outside.end_host(state, rank, demands[first:last], mark, layer, count)
    if run.prefetches:
        if run.after_layer:
            submit(state, batch, event, number - layer, layer, run.now)
        drain(state, rank, run.now, run.mark, layer)
    note(state, batch, event, layer)


def load(
    state: State,
    rank: Rank,
    batch: PassBatch,
    event: int,
    demands: Array,
    first: int,
    last: int,
    mark: int,
    layer: int,
    ready_s: float,
    count: Counters,
) -> tuple[int, int, float]:
    """Load the demanded keys, in waves where they do not fit together.

    Returns how many keys and assignments waves have executed, and the arrival time of the last key.
    """
    run, cache, pins = state.run[0], state.layers[layer].cache, state.run[0].mark
    start, stop = batch.bounds[event], batch.bounds[event + 1]
    counts_serves = batch.rows[event + 1] - batch.rows[event] > 1 or run.lossy != 0
    all_keys, all_served = 0, 0
    for place in range(first, last):
        key = demands[place]
        if not is_missing(state, key, mark):
            continue
        level = state.slots[key].demanded_level
        nbytes = state.levels[layer * run.num_levels + level].nbytes
        while not make_room(state, rank, key, nbytes, cache, pins, layer):
            if IN_PYTHON and run.lanes:
                ready_s = state.outside.move_together(state, ready_s)
                state.outside.end_wave()
            num_keys, num_served = mark_executed(
                state, batch, start, stop, counts_serves, mark, False
            )
            all_keys, all_served = all_keys + num_keys, all_served + num_served
            count.stall_s += await_link(state, ready_s)
            execute(state, layer, num_keys, num_served, count)
            ready_s = run.now
            run.mark += 1
            pins = run.mark
            for other in range(start, stop):
                if state.slots[batch.keys[other]].done != mark:
                    state.experts[batch.keys[other]].pinned = pins
                elif state.now[0].offline:
                    state.experts[batch.keys[other]].next_use = batch.next_use[other]
            state.layers[layer].unclear = 1
            if run.own:
                tell(state, WAVE, layer)
        if IN_PYTHON and run.lanes:
            state.outside.moving.append((key, nbytes))
        else:
            ready_s = transfer(state, layer, level, ready_s, False, -1)
        take_bytes(state, cache, nbytes)
        insert(state, key, layer, level, False)
    if IN_PYTHON and run.lanes:
        ready_s = state.outside.move_together(state, ready_s)
    return all_keys, all_served, ready_s


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


def await_in_flight(
    state: State,
    rank: Rank,
    batch: PassBatch,
    start: int,
    stop: int,
    demands: Array,
    first: int,
    last: int,
    mark: int,
    layer: int,
) -> float:
    """Land what precedes the demands; return when the last of it that is needed arrives."""
    run = state.run[0]
    ready_s = run.now
    if not is_active(run) or (not run.fifo and run.inflight < 0):
        return ready_s
    if run.fifo:
        ready_s = max(ready_s, drain_fifo(state, rank, demands, first, last, mark, layer))
    else:
        # It lands before any demand can start, while the compute waits.
        if state.experts[run.inflight].pinned == mark:
            ready_s = run.busy_until
        land(state)
    for place in range(start, stop):
        state.slots[batch.keys[place]].unused = 0
    if IN_PYTHON and run.lanes:
        state.outside.note_in_flight(state, demands[first:last], mark, ready_s)
    return ready_s


def release_for_upgrades(state: State, demands: Array, first: int, last: int, mark: int) -> None:
    """Release the bytes of residents about to be loaded at a better level.

    Evictions do not learn of it: to them the expert has never left.
    """
    for place in range(first, last):
        key = demands[place]
        if state.experts[key].resident and is_missing(state, key, mark):
            release_for_upgrade(state, key)


def release_for_upgrade(state: State, key: int) -> None:
    """Release a resident's bytes, about to be loaded at a better level."""
    release(state, key)
    state.slots[key].upgrading = 1
    state.caches[state.layers[state.slots[key].home].cache].replaced += 1


def mark_executed(
    state: State,
    batch: PassBatch,
    start: int,
    stop: int,
    counts_serves: bool,
    mark: int,
    undemanded: bool,
) -> tuple[int, int]:
    """Mark resident keys as executed; count keys and assignments.

    `undemanded`: only those that were not demanded.
    """
    run, num_keys, num_served = state.run[0], 0, 0
    if IN_PYTHON and run.watched:
        state.outside.wave = []
    for place in range(start, stop):
        key = batch.keys[place]
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
                state.experts[key].lesser = int(slot.level > 0)
                level = state.levels[slot.home * run.num_levels + slot.level]
                level.num_keys += 1
                level.num_served += served
            if run.own:
                tell(state, EXECUTED, key)
            if IN_PYTHON and run.watched:
                state.outside.wave.append(key)
    return num_keys, num_served


def pin(state: State, keys: Array, start: int, stop: int, layer: int) -> None:
    """Pin these keys of a layer, under a new mark."""
    run = state.run[0]
    run.mark += 1
    for place in range(start, stop):
        state.experts[keys[place]].pinned = run.mark
    state.layers[layer].unclear = 1


def note(state: State, batch: PassBatch, event: int, layer: int) -> None:
    """Let the evictions learn of the executed event."""
    if state.run[0].own:
        tell(state, NOTED, layer)
        return
    top_k, row, stop = state.run[0].top_k, batch.rows[event], batch.rows[event + 1]
    note_event(
        state,
        layer,
        stop - row,
        batch.keys,
        batch.bounds[event],
        batch.bounds[event + 1],
        batch.next_use,
        batch.experts,
        batch.weights,
        row * top_k,
        stop * top_k,
    )


# The clock.


def wait_until(state: State, time_s: float) -> float:
    """Advance the clock to `time_s`; return the seconds waited."""
    run = state.run[0]
    stall_s = time_s - run.now
    if stall_s <= 0:
        return 0.0
    if IN_PYTHON and run.recorded:
        state.outside.add_span("wait", run.now, time_s, 0, 0)
    run.now = time_s
    return stall_s


def await_link(state: State, time_s: float) -> float:
    """Wait for a transfer that arrives at `time_s`; return the seconds of the stall.

    Any wait also costs the profile's `wait_overhead_s`, which does not count as a stall.
    """
    run = state.run[0]
    stall_s = time_s - run.now
    if stall_s <= 0:
        return 0.0
    if IN_PYTHON and run.recorded:
        state.outside.add_span("stall", run.now, time_s, 0, 0)
        state.outside.add_span("wake", time_s, time_s + run.wait_overhead_s, 0, 0)
    run.now = time_s
    run.now += run.wait_overhead_s
    return stall_s


def charge_loads(run: RunState) -> None:
    """Charge the compute's overhead of what was loaded, prefetches included.

    Prefetches that land while it is busy are charged at the next event.
    """
    if run.loaded_bytes:
        run.now += run.load_overhead_s * run.loaded_bytes
        run.loaded_bytes = 0


def add_loaded(state: State, demands: Array, first: int, last: int, mark: int, layer: int) -> None:
    """Count the bytes about to be loaded, for `charge_loads`."""
    run = state.run[0]
    for place in range(first, last):
        if is_missing(state, demands[place], mark):
            level = state.slots[demands[place]].demanded_level
            run.loaded_bytes += state.levels[layer * run.num_levels + level].nbytes


def execute(state: State, layer: int, num_keys: int, assignments: int, count: Counters) -> None:
    """Charge the execution of some of a layer's experts; each precision level has its kernels."""
    run = state.run[0]
    if IN_PYTHON and run.watched:
        state.outside.tell_wave()
    if run.num_levels == 1:
        execute_level(state, layer, 0, num_keys, assignments, 1.0, False)
        return
    for number in range(run.num_levels):
        level = state.levels[layer * run.num_levels + number]
        execute_level(state, layer, number, level.num_keys, level.num_served, 1.0, False)
        if number:
            count.low_precision += level.num_served
        level.num_keys = level.num_served = 0


def execute_level(
    state: State,
    layer: int,
    number: int,
    num_keys: int,
    assignments: int,
    share: float,
    launched: bool,
) -> None:
    """Charge experts of one level.

    Those whose event has its kernels `launched` already pay no launch overhead; `share` is the part
    of their weights that is executed (one projection of several).
    """
    if num_keys:
        run = state.run[0]
        level = state.levels[layer * run.num_levels + number]
        flop_s, read_s = level.flop_s * assignments, level.read_s * num_keys
        overhead_s = 0.0 if launched else run.expert_overhead_s
        start_s = run.now
        # A single addition: the last digits of a time decide which transfers have arrived.
        run.now += share * (flop_s if flop_s > read_s else read_s) + overhead_s
        if IN_PYTHON and run.recorded:
            state.outside.add_span("experts", start_s, run.now, layer, num_keys)


# The cache.


def make_room(
    state: State, rank: Rank, key: int, nbytes: int, cache: int, mark: int, layer: int
) -> bool:
    """Evict until `nbytes` fit, for `key`; False once only pinned or arriving keys are left.

    Evictions made on the way to a False are not undone.
    """
    run, held = state.run[0], state.caches[cache]
    if run.own and held.used > held.capacity - nbytes:
        tell(state, MISSED, key)
    while held.used > held.capacity - nbytes:
        if run.own:
            victim = ask(state, cache, mark, layer)
        else:
            victim = find_lowest(state, rank, held.first_layer, held.end_layer, mark, layer)
        if victim < 0:
            return False
        evict(state, victim)
    return True


def evict(state: State, key: int) -> None:
    """Evict a resident; count it for its cache and for the run."""
    run, slot = state.run[0], state.slots[key]
    cache, lived = state.caches[state.layers[slot.home].cache], run.tokens - slot.since
    cache.evictions += 1
    cache.lifetime += lived
    run.evictions += 1
    run.lifetime += lived
    slot.left_in = state.now[0].pass_index
    release(state, key)
    note_eviction(state, key, slot.home)
    if run.own:
        tell(state, EVICTED, key)


def release(state: State, key: int) -> None:
    """Give back a resident's bytes."""
    slot = state.slots[key]
    level = state.levels[slot.home * state.run[0].num_levels + slot.level]
    state.caches[state.layers[slot.home].cache].used -= level.nbytes
    slot.unused = 0
    if IN_PYTHON and state.run[0].placed:
        state.outside.vacate(key)


def take_bytes(state: State, cache: int, nbytes: int) -> None:
    """Take a load's bytes from a cache."""
    held = state.caches[cache]
    held.used += nbytes
    held.peak = max(held.peak, held.used)
    held.loads += 1


def insert(state: State, key: int, home: int, level: int, prefetched: bool) -> None:
    """Make a key of layer `home` resident."""
    run, slot = state.run[0], state.slots[key]
    slot.since = run.tokens
    slot.level = level
    run.arrivals += 1
    slot.arrival = run.arrivals
    if slot.upgrading:
        slot.upgrading = 0
        return
    slot.unused = int(prefetched)
    note_load(state, key, home, prefetched)
    if run.own:
        tell(state, PREFETCHED if prefetched else DEMANDED, key)


def reset(state: State, warm: Array) -> None:
    """Restore the initial caches; the link is empty. No pass counts these evictions."""
    run = state.run[0]
    own, run.own = run.own, 0
    if own:
        tell_reset(state)
    for home in range(len(state.layers)):
        while state.layers[home].held:
            base = home * state.now[0].num_experts
            evict(state, state.experts[base + state.layers[home].held - 1].member)
    run.own = own
    fill(state, warm)


def fill(state: State, warm: Array) -> None:
    """Make these keys resident, in this order; they are not counted as loads."""
    for place in range(len(warm)):
        home = state.slots[warm[place]].home
        cache = state.layers[home].cache
        take_bytes(state, cache, state.levels[home * state.run[0].num_levels].nbytes)
        state.caches[cache].loads -= 1
        state.caches[cache].warmed += 1
        insert(state, warm[place], home, 0, False)


# The link.


def is_active(run: RunState) -> bool:
    """Whether a prefetch is in flight or queued."""
    return run.inflight >= 0 or run.queued > 0


def transfer(
    state: State, layer: int, level: int, now: float, joins: bool, prefetched: int
) -> float:
    """Move an expert of a layer from `now` on or once the link is free; return its arrival.

    A transfer that `joins` the previous one in a batch pays no latency of its own. `prefetched` is
    the key of a prefetch, else -1.
    """
    size, run = state.levels[layer * state.run[0].num_levels + level], state.run[0]
    carry_s = size.move_s
    if not joins:
        carry_s += run.latency_s
        run.open_batch = -1
    run.transfers += 1
    return occupy(state, now, carry_s, size.nbytes, prefetched)


def occupy(state: State, now: float, carry_s: float, nbytes: int, prefetched: int) -> float:
    """Occupy the link for some seconds from `now` on or once it is free; return when it ends."""
    run = state.run[0]
    start_s = now if now > run.busy_until else run.busy_until
    run.busy_until = start_s + carry_s
    run.busy_s += carry_s
    run.moved += nbytes
    if IN_PYTHON and run.recorded:
        state.outside.add_span("transfer", start_s, run.busy_until, nbytes, prefetched)
    return run.busy_until


def submit(
    state: State, batch: PassBatch, event: int, first_event: int, layer: int, ready_s: float
) -> None:
    """Queue the prefetches proposed at an event.

    `first_event` is the number of its pass' first event.
    """
    start, stop = batch.proposed_bounds[event], batch.proposed_bounds[event + 1]
    submit_keys(
        state, batch.proposed, batch.proposed_levels, start, stop, first_event, layer, ready_s, -1
    )


def submit_keys(
    state: State,
    keys: Array,
    levels: Array,
    start: int,
    stop: int,
    first_event: int,
    after: int,
    ready_s: float,
    batch: int,
) -> None:
    """Queue prefetches; note a prediction of the keys already resident.

    Those of layers up to `after` are for the next pass. Consecutive prefetches of one `batch` with
    no gap between them share one latency.
    """
    run, num_layers = state.run[0], len(state.layers)
    for place in range(start, stop):
        key = keys[place]
        slot = state.slots[key]
        home = slot.home
        predicted = state.layer_states[home]
        if slot.predicted != predicted.epoch:
            slot.predicted = predicted.epoch
            predicted.num_predicted += 1
        if state.experts[key].resident:
            note_wish(state, key, home)
            if run.own:
                tell(state, WISHED, key)
        elif not slot.arriving and slot.due < 0:
            due = 0
            if not run.fifo:
                due = first_event + home + (num_layers if home <= after else 0)
            slot.queued_level = levels[place] if run.num_levels > 1 else 0
            slot.batch = batch
            enqueue(state, key, due, ready_s)


def enqueue(state: State, key: int, due: int, ready_s: float) -> None:
    """Queue a prefetch for event `due`, to start at `ready_s` or later."""
    run, slot, queue = state.run[0], state.slots[key], state.queues[due % len(state.queues)]
    if run.queued == 0 or due < run.earliest:
        run.earliest = due
    run.queued += 1
    slot.due, slot.earliest_s = due, ready_s
    slot.previous, slot.next = queue.last, -1
    if queue.last >= 0:
        state.slots[queue.last].next = key
    else:
        queue.first = key
    queue.last = key


def head(state: State) -> int:
    """Return the key of the next queued prefetch, or -1."""
    run = state.run[0]
    if run.queued == 0:
        return -1
    while state.queues[run.earliest % len(state.queues)].first < 0:
        run.earliest += 1
    return state.queues[run.earliest % len(state.queues)].first


def withdraw(state: State, key: int) -> None:
    """Take a prefetch off its queue."""
    slot = state.slots[key]
    queue = state.queues[slot.due % len(state.queues)]
    if slot.previous >= 0:
        state.slots[slot.previous].next = slot.next
    else:
        queue.first = slot.next
    if slot.next >= 0:
        state.slots[slot.next].previous = slot.previous
    else:
        queue.last = slot.previous
    slot.due = -1
    state.run[0].queued -= 1


def cancel_due(state: State, number: int) -> None:
    """Drop the queued prefetches of events up to this one."""
    run = state.run[0]
    while run.queued and run.earliest <= number:
        queue = state.queues[run.earliest % len(state.queues)]
        while queue.first >= 0 and state.slots[queue.first].due == run.earliest:
            withdraw(state, queue.first)
        run.earliest += 1


def drain(state: State, rank: Rank, until: float, mark: int, layer: int) -> None:
    """Let the link work through its prefetches up to a time.

    A transfer that could start at this very instant is left: a demand at that instant goes first.
    """
    run = state.run[0]
    while is_active(run):
        if run.inflight >= 0:
            if run.busy_until > until:
                return
            land(state)
        key = head(state)
        if key < 0:
            return
        start_s = max(state.slots[key].earliest_s, run.busy_until)
        if start_s >= until:
            return
        if not begin(state, rank, key, start_s, mark, layer):
            # All other residents are in use until then.
            state.slots[key].earliest_s = until
            return


def begin(state: State, rank: Rank, key: int, start_s: float, mark: int, layer: int) -> bool:
    """Begin a queued prefetch, or withdraw it if resident; False where no room can be made."""
    run, slot = state.run[0], state.slots[key]
    home, level = slot.home, slot.queued_level
    cache, nbytes = state.layers[home].cache, state.levels[home * run.num_levels + level].nbytes
    if state.experts[key].resident:
        withdraw(state, key)
        return True
    if not make_room(state, rank, key, nbytes, cache, mark, layer):
        return False
    reserve(state, key)
    joins = slot.batch >= 0 and slot.batch == run.open_batch and start_s <= run.busy_until
    transfer(state, home, level, start_s, joins, key)
    run.open_batch, run.inflight = slot.batch, key
    return True


def reserve(state: State, key: int) -> None:
    """Take a prefetch whose transfer begins off its queue; its bytes are reserved from now on."""
    slot = state.slots[key]
    withdraw(state, key)
    slot.level, slot.arriving = slot.queued_level, 1
    level = state.levels[slot.home * state.run[0].num_levels + slot.level]
    take_bytes(state, state.layers[slot.home].cache, level.nbytes)


def land(state: State) -> None:
    """Make the prefetch in flight resident."""
    run = state.run[0]
    key = run.inflight
    run.inflight = -1
    slot = state.slots[key]
    if run.load_overhead_s:
        run.loaded_bytes += state.levels[slot.home * run.num_levels + slot.level].nbytes
    arrive(state, key)


def arrive(state: State, key: int) -> None:
    """Make a key resident whose prefetch has arrived."""
    slot = state.slots[key]
    slot.arriving = 0
    insert(state, key, slot.home, slot.level, True)


def drain_fifo(
    state: State, rank: Rank, demands: Array, first: int, last: int, mark: int, layer: int
) -> float:
    """Move the prefetches issued before these demands, as a fifo link does.

    If every demand is pending these are the ones up to the last demand, else all that are queued. A
    prefetch that finds no room is dropped. Returns the arrival of the last pending demand, or 0.
    """
    run = state.run[0]
    ready_s, waits, absent = 0.0, 0, False
    for place in range(first, last):
        key = demands[place]
        if state.slots[key].demanded == mark:
            pending = state.slots[key].arriving != 0 or state.slots[key].due >= 0
            waits += pending
            absent = absent or not pending
    while is_active(run) and (absent or waits > 0):
        key = run.inflight
        if key >= 0:
            if state.slots[key].demanded == mark:
                ready_s = run.busy_until
                waits -= 1
            land(state)
            continue
        key = head(state)
        start_s = max(state.slots[key].earliest_s, run.busy_until)
        was_demanded = state.slots[key].demanded == mark
        if not begin(state, rank, key, start_s, mark, layer):
            waits -= was_demanded
            withdraw(state, key)
        elif run.inflight != key:
            waits -= was_demanded  # It was resident already.
    return ready_s


def flush(state: State) -> None:
    """Empty the link: drop queued prefetches and land the one in flight; forget predictions."""
    run = state.run[0]
    for place in range(len(state.queues)):
        state.queues[place].first = state.queues[place].last = -1
    for home in range(len(state.layer_states)):
        state.layer_states[home].num_predicted = 0
        state.layer_states[home].epoch += 1
    for key in range(len(state.slots)):
        state.slots[key].due = -1
    run.queued = 0
    if run.inflight >= 0:
        wait_until(state, run.busy_until)
        land(state)


# Evictions with a state of their own, which Python alone can ask.

PASS, EVENT, DEMANDED, PREFETCHED, WISHED, MISSED, EVICTED, EXECUTED, WAVE, NOTED = range(10)
"""What they are told of: a pass, an event that begins (its layer), a key's loading and the like, a
wave that ends (its layer, after its keys), and that the event has been executed."""


def tell(state: State, kind: int, number: int) -> None:
    """Tell them at once or, from machine code, before they are next asked."""
    if IN_PYTHON:
        state.outside.tell[kind](number)
    else:
        run = state.run[0]
        state.messages[run.told] = kind
        state.messages[run.told + 1] = number
        run.told += 2
        if run.told == len(state.messages):
            ask(state, READ, 0, 0)


READ, RESET_ALL = -1, -2
"""In place of a cache: asks for no victim, but that messages be read, or of a reset."""


def ask(state: State, cache: int, mark: int, layer: int) -> int:
    """Return the key that a cache's eviction chooses, not pinned by `mark`, or -1."""
    if IN_PYTHON:
        return state.outside.victim(state, cache, mark, layer)
    told, state.run[0].told = state.run[0].told, 0
    return state.outside(cache, mark, layer, told)


def tell_reset(state: State) -> None:
    """Tell of the evictions that a reset is about to make: those loaded first leave first."""
    if IN_PYTHON:
        state.outside.tell_reset(state)
    else:
        ask(state, RESET_ALL, 0, 0)

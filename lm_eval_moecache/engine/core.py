"""Lossless passes over tables: lookup, victims, link, prefetch queue and virtual time, in one loop.

These functions mirror `engine.VirtualEngine` and `virtual.link`, down to the names; every float is
computed by the same operations in the same order, so counts, bytes and times agree to the last
digit. They keep to the subset of Python that numba compiles (see `records.jit` and
`algorithms.features`); `engine.compiled` builds the tables.
"""

# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from lm_eval_moecache.algorithms.features import (
    FAST,
    MIDDLE,
    SLOW,
    Rank,
    add_weight,
    end_use,
    find_lowest,
    note_eviction,
    note_load,
    note_pass,
    note_served,
    note_turn,
    note_use,
    note_wish,
)
from lm_eval_moecache.records.jit import Array, Table


@dataclass(slots=True)
class Slot:
    """The engine's state of one expert, apart from the features that eviction rules see."""

    home: int = 0
    """Its layer."""
    absent: int = 0
    done: int = 0
    """Marks of the last event that found it absent and of the last that executed it in a wave."""
    unused: int = 0
    """1 if a prefetch loaded it and no event has used it since."""
    foretold: int = 0
    """The `epoch` of its layer in which it was last predicted."""
    since: int = 0
    """Tokens processed before its load."""
    left_in: int = -2
    """The pass in which it was last evicted."""
    due: int = -1
    """Due event of its queued prefetch (-1: none queued); then its neighbours in that queue."""
    next: int = -1
    previous: int = -1
    earliest_s: float = 0.0
    """Earliest start of its queued prefetch."""
    serves: int = 0
    """Scratch: how many tokens of the event in progress it serves."""


@dataclass(slots=True)
class Place:
    """The engine's state of one layer, and of the cache with the same number."""

    nbytes: int = 0
    """Size of one expert of the layer."""
    carry_s: float = 0.0
    """Its transfer over a free link."""
    flop_s: float = 0.0
    read_s: float = 0.0
    """Its arithmetic for one token, and reading its weights."""
    epoch: int = 1
    num_foretold: int = 0
    """Number of the prediction for the layer's next event, and how many keys it names."""
    first: int = -1
    last: int = -1
    """Ends of one queue: of due events by their number modulo the number of places."""
    first_layer: int = 0
    end_layer: int = 0
    capacity: int = 0
    used: int = 0
    peak: int = 0
    loads: int = 0
    warmed: int = 0
    evictions: int = 0
    lifetime: int = 0


@dataclass(slots=True)
class Machine:
    """Clock, link, totals and flags of the policy."""

    now: float = 0.0
    busy_until: float = 0.0
    busy_s: float = 0.0
    wait_overhead_s: float = 0.0
    expert_overhead_s: float = 0.0
    top_k: int = 0
    inflight: int = -1
    """Key of the prefetch in flight, which lands at `busy_until`."""
    queued: int = 0
    """Number of queued prefetches; `earliest` is a lower bound on the next one's due event."""
    earliest: int = 0
    tokens: int = 0
    mark: int = 0
    moved: int = 0
    """Bytes."""
    transfers: int = 0
    evictions: int = 0
    lifetime: int = 0
    fifo: int = 0
    prefetches: int = 0
    after_layer: int = 0
    cached_first: int = 0
    weighs: int = 0
    offline: int = 0


@dataclass(slots=True)
class Count:
    """The counts of one pass, under the names of `PassRecord`."""

    requests: int = 0
    late: int = 0
    misses: int = 0
    collisions: int = 0
    token_misses: int = 0
    prefetch_hits: int = 0
    predicted: int = 0
    predicted_right: int = 0
    predictable: int = 0
    evictions: int = 0
    lifetime_tokens: int = 0
    bytes_moved: int = 0
    start_s: float = 0.0
    end_s: float = 0.0
    stall_s: float = 0.0
    link_busy_s: float = 0.0


class State(NamedTuple):
    """All state that outlasts an event, as tables."""

    experts: Table
    """This and the next three are the tables of `algorithms.features.Features`."""
    layers: Table
    now: Table
    forecasts: Table
    slots: Table
    """By key."""
    places: Table
    """By layer, plus one for the queues: due events are at most one pass apart."""
    machine: Table
    """A single record."""


class Piece(NamedTuple):
    """Some passes of a run. Arrays are by event unless they say otherwise."""

    first_pass: int
    """Index in the run of the first one."""
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
    cold: Array
    """[passes] Whether the cache is reset before the pass."""
    warm: Array
    """Keys that a reset cache starts with, in order of loading."""


def run(
    experts: Table,
    layers: Table,
    now: Table,
    forecasts: Table,
    slots: Table,
    places: Table,
    machine: Table,
    rank: Rank,
    p: Piece,
    counts: Table,
) -> None:
    """Serve the passes of `p`; write each one's counts to `counts`."""
    s = State(experts, layers, now, forecasts, slots, places, machine)
    num_layers, m = len(layers), machine[0]
    for index in range(len(p.cold)):
        if p.cold[index]:
            reset(s, p)
        number, event, count = p.first_pass + index, index * num_layers, counts[index]
        m.tokens += p.rows[event + 1] - p.rows[event]
        note_pass(s, number)
        moved, busy_s, evictions, lifetime = m.moved, m.busy_s, m.evictions, m.lifetime
        count.start_s = m.now
        for layer in range(num_layers):
            serve(s, rank, p, event + layer, number * num_layers + layer, layer, count)
        count.end_s = m.now
        count.bytes_moved = m.moved - moved
        count.evictions = m.evictions - evictions
        count.lifetime_tokens = m.lifetime - lifetime
        count.link_busy_s = m.busy_s - busy_s


def serve(s: State, rank: Rank, p: Piece, e: int, number: int, layer: int, count: Count) -> None:
    """Serve one event: `e` is its number in the piece, `number` in the run."""
    m = s.machine[0]
    m.now += p.dense_s[e]
    if m.prefetches:
        drain(s, rank, -1, layer)
    m.mark += 1
    mark, start, stop = m.mark, p.bounds[e], p.bounds[e + 1]
    tokens, rest = p.rows[e + 1] - p.rows[e], stop - start
    absent = look_up(s, p, start, stop, mark, count)
    count.requests += rest
    assignments = rest if tokens == 1 else tokens * m.top_k
    if absent:
        count.token_misses += absent if tokens == 1 else count_tokens(s, p, e, layer)
    if m.prefetches:
        judge(s, p, start, stop, layer, count)
    s.layers[layer].unclear = 1
    gate_s = ready_s = m.now
    if absent:
        if m.prefetches:
            ready_s = await_what_is_under_way(s, rank, p, start, stop, mark, layer)
        ready_s, rest, assignments = load(
            s, rank, p, e, mark, layer, ready_s, rest, assignments, count
        )
        if m.cached_first:
            # The compute is busy from here on: predictions do not hide behind the wait.
            wait_until(m, m.now + p.predict_s[e])
            num_keys, num_served = take(s, p, start, stop, tokens, mark, True)
            execute(s, layer, num_keys, num_served)
            rest, assignments = rest - num_keys, assignments - num_served
    if m.prefetches and not m.fifo:
        cancel_due(s, number)
    if absent:
        count.stall_s += await_link(m, ready_s)
    if m.prefetches:
        ready_s = gate_s + p.predict_s[e]
        if not m.after_layer:
            submit(s, p, e, number, layer, ready_s)
        wait_until(m, ready_s)
    execute(s, layer, rest, assignments)
    if m.prefetches:
        if m.after_layer:
            submit(s, p, e, number, layer, m.now)
        if is_active(m):
            if m.mark != mark:
                mark = pin(s, p, start, stop, layer)
            drain(s, rank, mark, layer)
    note(s, p, e, layer)


def look_up(s: State, p: Piece, start: int, stop: int, mark: int, count: Count) -> int:
    """Pin the event's keys; count late keys, misses and collisions; return how many are absent."""
    absent, inflight, this_pass = 0, s.machine[0].inflight, s.now[0].pass_index
    for i in range(start, stop):
        expert = s.experts[p.keys[i]]
        expert.pinned = mark
        if expert.resident:
            continue
        absent += 1
        slot = s.slots[p.keys[i]]
        slot.absent = mark
        if p.keys[i] == inflight or slot.due >= 0:
            count.late += 1
        else:
            count.misses += 1
            count.collisions += slot.left_in == this_pass
    return absent


def count_tokens(s: State, p: Piece, e: int, layer: int) -> int:
    """Count the tokens each expert serves; return the (token, expert) pairs that miss."""
    m, base, missed = s.machine[0], layer * s.now[0].num_experts, 0
    for i in range(p.bounds[e], p.bounds[e + 1]):
        s.slots[p.keys[i]].serves = 0
    for i in range(p.rows[e] * m.top_k, p.rows[e + 1] * m.top_k):
        s.slots[base + p.experts[i]].serves += 1
    for i in range(p.bounds[e], p.bounds[e + 1]):
        if not s.experts[p.keys[i]].resident:
            missed += s.slots[p.keys[i]].serves
    return missed


def judge(s: State, p: Piece, start: int, stop: int, layer: int, count: Count) -> None:
    """Count prefetch hits, and how many keys were predicted, needed, and both."""
    place, right = s.places[layer], 0
    for i in range(start, stop):
        slot = s.slots[p.keys[i]]
        count.prefetch_hits += slot.unused
        slot.unused = 0
        right += slot.foretold == place.epoch
    if place.num_foretold:
        count.predicted += place.num_foretold
        count.predicted_right += right
        count.predictable += stop - start
        place.epoch += 1
        place.num_foretold = 0


def load(
    s: State,
    rank: Rank,
    p: Piece,
    e: int,
    mark: int,
    layer: int,
    ready_s: float,
    rest: int,
    assignments: int,
    count: Count,
) -> tuple[float, int, int]:
    """Load the absent keys, in waves where they do not fit together.

    Returns the arrival time of the last one, and how many keys and assignments remain to execute.
    """
    m, cache, nbytes = s.machine[0], s.layers[layer].cache, s.places[layer].nbytes
    start, stop = p.bounds[e], p.bounds[e + 1]
    pins = mark
    for i in range(start, stop):
        key = p.keys[i]
        slot = s.slots[key]
        # Keys that a prefetch has loaded or a wave has executed meanwhile are no longer demanded.
        if slot.absent != mark or s.experts[key].resident or slot.done == mark:
            continue
        while not make_room(s, rank, nbytes, cache, pins, layer):
            num_keys, num_served = take(s, p, start, stop, p.rows[e + 1] - p.rows[e], mark, False)
            rest, assignments = rest - num_keys, assignments - num_served
            count.stall_s += await_link(m, ready_s)
            execute(s, layer, num_keys, num_served)
            ready_s = m.now
            m.mark += 1
            pins = m.mark
            for j in range(start, stop):
                if s.slots[p.keys[j]].done != mark:
                    s.experts[p.keys[j]].pinned = pins
                elif m.offline:
                    s.experts[p.keys[j]].next_use = p.next_use[j]
            s.layers[layer].unclear = 1
        ready_s = transfer(s, layer, ready_s)
        take_bytes(s, cache, nbytes)
        insert(s, key, layer, False)
    return ready_s, rest, assignments


def await_what_is_under_way(
    s: State, rank: Rank, p: Piece, start: int, stop: int, mark: int, layer: int
) -> float:
    """Land what precedes the demands, withdraw their queued prefetches; return when that ends."""
    m = s.machine[0]
    ready_s = m.now
    if m.fifo:
        if is_active(m):
            ready_s = max(ready_s, work_off(s, rank, p, start, stop, mark, layer))
    elif m.inflight >= 0:
        if s.experts[m.inflight].pinned == mark:
            ready_s = m.busy_until
        land(s)
    for i in range(start, stop):
        key = p.keys[i]
        s.slots[key].unused = 0
        if not m.fifo and s.slots[key].due >= 0:
            withdraw(s, key)
    return ready_s


def take(
    s: State, p: Piece, start: int, stop: int, tokens: int, mark: int, at_lookup: bool
) -> tuple[int, int]:
    """Mark resident keys as executed; count keys and assignments.

    `at_lookup`: those that were resident when they were looked up, instead of now.
    """
    num_keys = num_served = 0
    for i in range(start, stop):
        slot = s.slots[p.keys[i]]
        ready = slot.absent != mark if at_lookup else s.experts[p.keys[i]].resident != 0
        if ready and slot.done != mark:
            slot.done = mark
            num_keys += 1
            num_served += 1 if tokens == 1 else slot.serves
    return num_keys, num_served


def pin(s: State, p: Piece, start: int, stop: int, layer: int) -> int:
    """Pin all keys of the event again, after waves; return the new mark."""
    m = s.machine[0]
    m.mark += 1
    for i in range(start, stop):
        s.experts[p.keys[i]].pinned = m.mark
    s.layers[layer].unclear = 1
    return m.mark


def note(s: State, p: Piece, e: int, layer: int) -> None:
    """Update the eviction features by the executed event."""
    m, turns = s.machine[0], s.layers[s.layers[layer].cache].turns
    if m.weighs:
        add_weights(s, p, e, layer)
    for i in range(p.bounds[e], p.bounds[e + 1]):
        note_use(s, p.keys[i], turns)
        if m.offline:
            s.experts[p.keys[i]].next_use = p.next_use[i]
    tokens = p.rows[e + 1] - p.rows[e]
    if s.now[0].forecasts:
        for i in range(p.bounds[e], p.bounds[e + 1]):
            end_use(s, p.keys[i], layer, tokens)
        if tokens > 1:
            add_served(s, p, e, layer)
    note_turn(s, layer, tokens)


def add_served(s: State, p: Piece, e: int, layer: int) -> None:
    """Add an event's tokens to the forecasts, discounted by age (the last token counts 1)."""
    m, base = s.machine[0], layer * s.now[0].num_experts
    fast = middle = slow = 1.0
    for row in range(p.rows[e + 1] - 1, p.rows[e] - 1, -1):
        for i in range(row * m.top_k, (row + 1) * m.top_k):
            note_served(s, base + p.experts[i], fast, middle, slow)
        fast *= FAST
        middle *= MIDDLE
        slow *= SLOW


def add_weights(s: State, p: Piece, e: int, layer: int) -> None:
    """Add each expert's router weights, summed over the event's tokens, to the features."""
    m, base = s.machine[0], layer * s.now[0].num_experts
    for i in range(p.bounds[e], p.bounds[e + 1]):
        total, tokens = 0.0, 0
        for j in range(p.rows[e] * m.top_k, p.rows[e + 1] * m.top_k):
            if p.experts[j] == p.keys[i] - base:
                total += p.weights[j]
                tokens += 1
        add_weight(s, p.keys[i], total, tokens)


# The clock.


def wait_until(m: Machine, time_s: float) -> float:
    """Advance the clock to `time_s`; return the seconds waited."""
    stall_s = time_s - m.now
    if stall_s <= 0:
        return 0.0
    m.now = time_s
    return stall_s


def await_link(m: Machine, time_s: float) -> float:
    """As `wait_until`, adding the overhead of a wait where there is one; return the stall (s)."""
    stall_s = wait_until(m, time_s)
    if stall_s:
        m.now += m.wait_overhead_s
    return stall_s


def execute(s: State, layer: int, num_experts: int, assignments: int) -> None:
    """Charge the time of executing some of a layer's experts."""
    if num_experts:
        m = s.machine[0]
        flop_s = s.places[layer].flop_s * assignments
        read_s = s.places[layer].read_s * num_experts
        m.now += (flop_s if flop_s > read_s else read_s) + m.expert_overhead_s


# The cache.


def make_room(s: State, rank: Rank, nbytes: int, cache: int, mark: int, layer: int) -> bool:
    """Evict until `nbytes` fit; False once only pinned or arriving keys are left."""
    place = s.places[cache]
    while place.used > place.capacity - nbytes:
        key = find_lowest(s, rank, place.first_layer, place.end_layer, mark, layer)
        if key < 0:
            return False
        evict(s, key)
    return True


def evict(s: State, key: int) -> None:
    """Evict a resident; count it for its cache and for the run."""
    m, slot = s.machine[0], s.slots[key]
    place, lived = s.places[s.layers[slot.home].cache], m.tokens - slot.since
    place.evictions += 1
    place.lifetime += lived
    m.evictions += 1
    m.lifetime += lived
    slot.left_in = s.now[0].pass_index
    place.used -= s.places[slot.home].nbytes
    slot.unused = 0
    note_eviction(s, key, slot.home)


def take_bytes(s: State, cache: int, nbytes: int) -> None:
    """Take a load's bytes from a cache."""
    place = s.places[cache]
    place.used += nbytes
    place.peak = max(place.peak, place.used)
    place.loads += 1


def insert(s: State, key: int, home: int, prefetched: bool) -> None:
    """Make a key of layer `home` resident."""
    s.slots[key].since = s.machine[0].tokens
    s.slots[key].unused = int(prefetched)
    note_load(s, key, home, prefetched)


def reset(s: State, p: Piece) -> None:
    """Empty the link and restore the initial caches. No pass counts these evictions."""
    m, num_experts = s.machine[0], s.now[0].num_experts
    for i in range(len(s.places)):
        s.places[i].first = s.places[i].last = -1
        s.places[i].num_foretold = 0
        s.places[i].epoch += 1
    for key in range(len(s.slots)):
        s.slots[key].due = -1
    m.queued = 0
    if m.inflight >= 0:
        wait_until(m, m.busy_until)
        land(s)
    for home in range(len(s.layers)):
        while s.layers[home].held:
            evict(s, s.experts[home * num_experts + s.layers[home].held - 1].member)
    for i in range(len(p.warm)):
        home = s.slots[p.warm[i]].home
        cache = s.layers[home].cache
        take_bytes(s, cache, s.places[home].nbytes)
        s.places[cache].loads -= 1
        s.places[cache].warmed += 1
        insert(s, p.warm[i], home, False)


# The link.


def is_active(m: Machine) -> bool:
    """Whether a prefetch is in flight or queued."""
    return m.inflight >= 0 or m.queued > 0


def transfer(s: State, layer: int, now: float) -> float:
    """Move an expert of a layer from `now` on or once the link is free; return its arrival."""
    m, place = s.machine[0], s.places[layer]
    m.busy_until = (now if now > m.busy_until else m.busy_until) + place.carry_s
    m.busy_s += place.carry_s
    m.moved += place.nbytes
    m.transfers += 1
    return m.busy_until


def submit(s: State, p: Piece, e: int, number: int, layer: int, ready_s: float) -> None:
    """Queue the prefetches proposed at an event; note a prediction of the keys already resident."""
    m, num_layers = s.machine[0], len(s.layers)
    for i in range(p.proposed_bounds[e], p.proposed_bounds[e + 1]):
        key = p.proposed[i]
        slot = s.slots[key]
        home = slot.home
        place = s.places[home]
        if slot.foretold != place.epoch:
            slot.foretold = place.epoch
            place.num_foretold += 1
        if s.experts[key].resident:
            note_wish(s, key, home)
        elif key != m.inflight and slot.due < 0:
            due = 0
            if not m.fifo:
                due = number - layer + home + (num_layers if home <= layer else 0)
            enqueue(s, key, due, ready_s)


def enqueue(s: State, key: int, due: int, ready_s: float) -> None:
    """Queue a prefetch for event `due`, to start at `ready_s` or later."""
    m, slot, queue = s.machine[0], s.slots[key], s.places[due % len(s.places)]
    if m.queued == 0 or due < m.earliest:
        m.earliest = due
    m.queued += 1
    slot.due, slot.earliest_s = due, ready_s
    slot.previous, slot.next = queue.last, -1
    if queue.last >= 0:
        s.slots[queue.last].next = key
    else:
        queue.first = key
    queue.last = key


def head(s: State) -> int:
    """Return the key of the next queued prefetch, or -1."""
    m = s.machine[0]
    if m.queued == 0:
        return -1
    while s.places[m.earliest % len(s.places)].first < 0:
        m.earliest += 1
    return s.places[m.earliest % len(s.places)].first


def withdraw(s: State, key: int) -> None:
    """Take a prefetch off its queue."""
    slot = s.slots[key]
    queue = s.places[slot.due % len(s.places)]
    if slot.previous >= 0:
        s.slots[slot.previous].next = slot.next
    else:
        queue.first = slot.next
    if slot.next >= 0:
        s.slots[slot.next].previous = slot.previous
    else:
        queue.last = slot.previous
    slot.due = -1
    s.machine[0].queued -= 1


def cancel_due(s: State, number: int) -> None:
    """Drop the queued prefetches of an event; those of earlier events are gone already."""
    m, queue = s.machine[0], s.places[number % len(s.places)]
    key = queue.first
    while key >= 0:
        s.slots[key].due = -1
        m.queued -= 1
        key = s.slots[key].next
    queue.first = queue.last = -1
    # If `earliest` fell further behind, two due events would share a queue.
    m.earliest = max(m.earliest, number + 1)


def drain(s: State, rank: Rank, mark: int, layer: int) -> None:
    """Let the link work through its prefetches up to now.

    A transfer that could start at this very instant is left: a demand at that instant goes first.
    """
    m = s.machine[0]
    now = m.now
    while is_active(m):
        if m.inflight >= 0:
            if m.busy_until > now:
                return
            land(s)
        # Nothing starts before the link is free.
        if m.busy_until >= now:
            return
        key = head(s)
        if key < 0:
            return
        start_s = max(s.slots[key].earliest_s, m.busy_until)
        if start_s >= now:
            return
        if not begin(s, rank, key, start_s, mark, layer):
            # All other residents are in use until now.
            s.slots[key].earliest_s = now
            return


def begin(s: State, rank: Rank, key: int, start_s: float, mark: int, layer: int) -> bool:
    """Begin a queued prefetch, or withdraw it if resident; False where no room can be made."""
    home = s.slots[key].home
    cache, nbytes = s.layers[home].cache, s.places[home].nbytes
    if s.experts[key].resident:
        withdraw(s, key)
        return True
    if not make_room(s, rank, nbytes, cache, mark, layer):
        return False
    take_bytes(s, cache, nbytes)
    withdraw(s, key)
    transfer(s, home, start_s)
    s.machine[0].inflight = key
    return True


def land(s: State) -> None:
    """Make the prefetch in flight resident."""
    key = s.machine[0].inflight
    s.machine[0].inflight = -1
    insert(s, key, s.slots[key].home, True)


def work_off(s: State, rank: Rank, p: Piece, start: int, stop: int, mark: int, layer: int) -> float:
    """Move the prefetches issued before these demands, as a fifo link does.

    If every demand is pending these are the ones up to the last demand, else all that are queued. A
    prefetch that finds no room is dropped. Returns the arrival of the last pending demand, or 0.
    """
    m = s.machine[0]
    ready_s, waits, absent = 0.0, 0, False
    for i in range(start, stop):
        key = p.keys[i]
        if s.slots[key].absent == mark:
            pending = key == m.inflight or s.slots[key].due >= 0
            waits += pending
            absent = absent or not pending
    while is_active(m) and (absent or waits > 0):
        key = m.inflight
        if key >= 0:
            if s.slots[key].absent == mark:
                ready_s = m.busy_until
                waits -= 1
            land(s)
            continue
        key = head(s)
        start_s = max(s.slots[key].earliest_s, m.busy_until)
        if not begin(s, rank, key, start_s, mark, layer):
            waits -= s.slots[key].absent == mark
            withdraw(s, key)
    return ready_s

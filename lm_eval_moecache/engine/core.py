"""Lossless passes over arrays: lookup, victims, link, prefetch queue and virtual time, in one loop.

The rules are those of `virtual.executor`, `virtual.traffic` and `link`, whose names these functions
keep; every float is made by the same operations in the same order, so that counts, bytes and times
are theirs to the last digit. Plain functions in the part of Python that numba compiles;
`engine.compiled` binds the eviction's `rank` and the constants below, and hands over the arrays.
"""

# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from lm_eval_moecache.algorithms.features import (
    CACHE_OF,
    HELD,
    NEXT_USE,
    PASS,
    PINNED,
    RESIDENT,
    UNCLEAR,
    Features,
    add_weight,
    find_lowest,
    note_eviction,
    note_load,
    note_pass,
    note_turn,
    note_use,
    note_wish,
)

Array = Any

PREFETCHES = False
"""Whether there is a prefetcher: bound before compiling, as an engine without is twice as fast."""

NOW, BUSY_UNTIL, BUSY, WAIT_OVERHEAD, EXPERT_OVERHEAD = range(5)
INFLIGHT, QUEUED, EARLIEST, TOKENS, MARK, MOVED, TRANSFERS = range(7)
FIFO, AFTER_LAYER, CACHED_FIRST, WEIGHTS, OFFLINE = range(7, 12)
NUM_SECONDS, NUM_WHOLE = 5, 12
REQUESTS, LATE, MISSES, COLLISIONS, TOKEN_MISSES, PREFETCH_HITS = range(6)
PREDICTED, RIGHT, PREDICTABLE, LEFT, LIVED, BYTES = range(6, 12)
NUM_COUNTS = 12
START, END, STALL, LINK_BUSY = range(4)
NUM_TIMES = 4


HOME, UNUSED, SINCE, LEFT_IN, DUE, NEXT, PREVIOUS, FORETOLD, ABSENT, DONE = range(10)
"""Columns of `State.keys`: the key's layer; whether a prefetch brought it and no event has used it;
the tokens before its load; the pass in which it was evicted last; the event that its queued
prefetch is for (-1: none waits) and its neighbours in that event's queue; the EPOCH of its layer in
which it was predicted; marks of the last events that found it absent, and that executed it in a
wave."""
EPOCH, NUM_FORETOLD, NBYTES, CAPACITY, USED, PEAK, LOADS, WARMED, EVICTIONS = range(9)
LIFETIME, FIRST_LAYER, END_LAYER = range(9, 12)
"""Columns of `State.layers`: number of the prediction for the layer's coming turn, and how many
keys it names; bytes of one expert; all others by cache."""
CARRY_S, FLOP_S, READ_S = range(3)
"""Columns of `State.layer_s`, of one expert: on a free link, a token's arithmetic, reading."""


class State(NamedTuple):
    """What outlasts an event, beside the features. Whole numbers, but the last three."""

    keys: Array
    layers: Array
    served_by: Array
    """[experts] Scratch: tokens of the event that each expert serves."""
    first: Array
    last: Array
    """[layers + 1] Ends of the queue of each due event, by its number modulo the length."""
    whole: Array
    """INFLIGHT, QUEUED ... of link and bookkeeping; FIFO ... whether it is so, 0 or 1."""
    earliest: Array
    """By key: when its queued prefetch may start."""
    layer_s: Array
    seconds: Array
    """NOW, BUSY_UNTIL ... of clock and link."""


def make_state(num_layers: int, num_experts: int) -> State:
    num_keys = num_layers * num_experts
    s = State(
        keys=np.zeros((num_keys, 10), np.int64),
        layers=np.zeros((num_layers, 12), np.int64),
        served_by=np.zeros(num_experts, np.int64),
        first=np.full(num_layers + 1, -1),
        last=np.full(num_layers + 1, -1),
        whole=np.zeros(NUM_WHOLE, np.int64),
        earliest=np.zeros(num_keys),
        layer_s=np.zeros((num_layers, 3)),
        seconds=np.zeros(NUM_SECONDS),
    )
    s.keys[:, HOME] = np.arange(num_keys) // num_experts
    s.keys[:, LEFT_IN] = -2
    s.keys[:, DUE] = -1
    s.whole[INFLIGHT] = -1
    s.layers[:, EPOCH] = 1
    return s


class Piece(NamedTuple):
    """Some passes of a trace. By event unless it says otherwise."""

    first_pass: int
    """The run's number of the first one."""
    keys: Array
    bounds: Array
    """Event e needs `keys[bounds[e]:bounds[e + 1]]`, in order of first need."""
    rows: Array
    """Event e's tokens are rows `rows[e]:rows[e + 1]` of `experts` and `weights`."""
    experts: Array
    weights: Array
    dense_s: Array
    predict_s: Array
    """Seconds before the layer's router has decided, and those of predicting from its input."""
    next_use: Array
    """By place in `keys`: number of the next event that needs the key (offline rules alone)."""
    proposed: Array
    proposed_bounds: Array
    """Event e proposes `proposed[proposed_bounds[e]:proposed_bounds[e + 1]]`."""
    cold: Array
    """[passes] Whether the cache starts anew before it."""
    warm: Array
    """Keys that it starts with, the last one loaded last."""


def run(s: State, f: Features, p: Piece, counts: Array, times: Array) -> None:
    """Serve the passes; write what each counted to `counts` and `times` [passes, ...]."""
    num_layers = len(f.layers)
    for index in range(len(p.cold)):
        if p.cold[index]:
            reset(s, f, p)
        number = p.first_pass + index
        event = index * num_layers
        begin_pass(s, f, number, p.rows[event + 1] - p.rows[event])
        count, time = counts[index], times[index]
        time[START] = s.seconds[NOW]
        moved, busy = s.whole[MOVED], s.seconds[BUSY]
        left, lived = s.layers[:, EVICTIONS].sum(), s.layers[:, LIFETIME].sum()
        for layer in range(num_layers):
            serve(s, f, p, event + layer, number * num_layers + layer, layer, count, time)
        time[END] = s.seconds[NOW]
        count[BYTES] = s.whole[MOVED] - moved
        count[LEFT] = s.layers[:, EVICTIONS].sum() - left
        count[LIVED] = s.layers[:, LIFETIME].sum() - lived
        time[LINK_BUSY] = s.seconds[BUSY] - busy


def begin_pass(s: State, f: Features, number: int, tokens: int) -> None:
    s.whole[TOKENS] += tokens
    note_pass(f, number)


def serve(
    s: State, f: Features, p: Piece, e: int, number: int, layer: int, count: Array, time: Array
) -> None:
    """Serve one event: number `e` of the piece, `number` of the run."""
    seconds, whole = s.seconds, s.whole
    seconds[NOW] += p.dense_s[e]
    if PREFETCHES and is_active(s):
        drain(s, f, -1, layer)
    whole[MARK] += 1
    mark = whole[MARK]
    start, stop = p.bounds[e], p.bounds[e + 1]
    tokens = p.rows[e + 1] - p.rows[e]
    absent = look_up(s, f, p, start, stop, mark, count)
    count[REQUESTS] += stop - start
    if absent and tokens > 1:
        count_tokens(s, f, p, e, count)
    elif absent:
        count[TOKEN_MISSES] += absent
    if PREFETCHES:
        judge(s, p, start, stop, layer, count)
    f.layers[layer, UNCLEAR] = 1
    gate_s = ready_s = seconds[NOW]
    rest, assignments = stop - start, (p.rows[e + 1] - p.rows[e]) * p.experts.shape[1]
    if tokens == 1:
        assignments = rest
    if absent:
        ready_s, rest, assignments = load(s, f, p, e, mark, layer, rest, assignments, time)
        if s.whole[CACHED_FIRST]:
            # The compute is busy from here on: predicting does not hide behind the wait.
            wait_until(s, seconds[NOW] + p.predict_s[e])
            own, ours = take(s, f, p, start, stop, tokens, mark, True)
            execute(s, layer, own, ours)
            rest, assignments = rest - own, assignments - ours
    if PREFETCHES and not s.whole[FIFO]:
        cancel_due(s, number)
    if absent:
        time[STALL] += await_link(s, ready_s)
    if PREFETCHES:
        ready_s = gate_s + p.predict_s[e]
        if not s.whole[AFTER_LAYER]:
            submit(s, f, p, e, number, layer, ready_s)
        wait_until(s, ready_s)
    execute(s, layer, rest, assignments)
    if PREFETCHES:
        if s.whole[AFTER_LAYER]:
            submit(s, f, p, e, number, layer, seconds[NOW])
        if is_active(s):
            if whole[MARK] != mark:
                mark = pin(s, f, p, start, stop, layer)
            drain(s, f, mark, layer)
    note(s, f, p, e, layer)


def look_up(s: State, f: Features, p: Piece, start: int, stop: int, mark: int, count: Array) -> int:
    """Pin the event's keys and count those that are not resident; return how many."""
    absent, inflight, now = 0, s.whole[INFLIGHT], f.time[PASS]
    for i in range(start, stop):
        key = p.keys[i]
        f.keys[key, PINNED] = mark
        if f.keys[key, RESIDENT]:
            continue
        absent += 1
        s.keys[key, ABSENT] = mark
        if PREFETCHES and (key == inflight or s.keys[key, DUE] >= 0):
            count[LATE] += 1
        else:
            count[MISSES] += 1
            count[COLLISIONS] += s.keys[key, LEFT_IN] == now
    return absent


def count_tokens(s: State, f: Features, p: Piece, e: int, count: Array) -> None:
    """Count the tokens that each expert serves, and those that miss one."""
    base = p.keys[p.bounds[e]] // len(s.served_by) * len(s.served_by)
    s.served_by[:] = 0
    for row in range(p.rows[e], p.rows[e + 1]):
        for i in range(p.experts.shape[1]):
            s.served_by[p.experts[row, i]] += 1
    for expert in range(len(s.served_by)):
        if s.served_by[expert] and not f.keys[base + expert, RESIDENT]:
            count[TOKEN_MISSES] += s.served_by[expert]


def judge(s: State, p: Piece, start: int, stop: int, layer: int, count: Array) -> None:
    """Count what prefetches brought, and what was predicted and how much of it is needed."""
    epoch = s.layers[layer, EPOCH]
    right = 0
    for i in range(start, stop):
        key = p.keys[i]
        if s.keys[key, UNUSED]:
            s.keys[key, UNUSED] = 0
            count[PREFETCH_HITS] += 1
        right += s.keys[key, FORETOLD] == epoch
    if s.layers[layer, NUM_FORETOLD]:
        count[PREDICTED] += s.layers[layer, NUM_FORETOLD]
        count[RIGHT] += right
        count[PREDICTABLE] += stop - start
        s.layers[layer, EPOCH] = epoch + 1
        s.layers[layer, NUM_FORETOLD] = 0


def load(
    s: State,
    f: Features,
    p: Piece,
    e: int,
    mark: int,
    layer: int,
    rest: int,
    assignments: int,
    time: Array,
) -> tuple[float, int, int]:
    """Load what is absent, in waves where it does not fit together.

    Returns when the last one is there, and how many keys and assignments are still to be executed.
    """
    cache, nbytes = f.layers[layer, CACHE_OF], s.layers[layer, NBYTES]
    start, stop = p.bounds[e], p.bounds[e + 1]
    tokens = p.rows[e + 1] - p.rows[e]
    ready_s, pins = s.seconds[NOW], mark
    if PREFETCHES:
        ready_s = await_what_is_under_way(s, f, p, start, stop, mark, layer)
    for i in range(start, stop):
        key = p.keys[i]
        # What a prefetch has brought meanwhile, or a wave has executed, is no demand any more.
        if s.keys[key, ABSENT] != mark or f.keys[key, RESIDENT] or s.keys[key, DONE] == mark:
            continue
        if not make_room(s, f, nbytes, cache, pins, layer):
            own, ours = take(s, f, p, start, stop, tokens, mark, False)
            rest, assignments = rest - own, assignments - ours
            time[STALL] += await_link(s, ready_s)
            execute(s, layer, own, ours)
            ready_s = s.seconds[NOW]
            s.whole[MARK] += 1
            pins = s.whole[MARK]
            for j in range(start, stop):
                if s.keys[p.keys[j], DONE] != mark:
                    f.keys[p.keys[j], PINNED] = pins
                elif s.whole[OFFLINE]:
                    f.keys[p.keys[j], NEXT_USE] = p.next_use[j]
            f.layers[layer, UNCLEAR] = 1
            make_room(s, f, nbytes, cache, pins, layer)
        ready_s = transfer(s, layer, ready_s)
        take_bytes(s, cache, nbytes)
        insert(s, f, key, layer, False)
    return ready_s, rest, assignments


def await_what_is_under_way(
    s: State, f: Features, p: Piece, start: int, stop: int, mark: int, layer: int
) -> float:
    """Let what goes before the demands land, and withdraw those that wait; return when."""
    ready_s, inflight = s.seconds[NOW], s.whole[INFLIGHT]
    if s.whole[FIFO]:
        if is_active(s):
            ready_s = max(ready_s, work_off(s, f, p, start, stop, mark, layer))
    elif inflight >= 0:
        if f.keys[inflight, PINNED] == mark:
            ready_s = s.seconds[BUSY_UNTIL]
        land(s, f)
    for i in range(start, stop):
        key = p.keys[i]
        s.keys[key, UNUSED] = 0
        if not s.whole[FIFO] and s.keys[key, DUE] >= 0:
            withdraw(s, key)
    return ready_s


def take(
    s: State,
    f: Features,
    p: Piece,
    start: int,
    stop: int,
    tokens: int,
    mark: int,
    found: bool,
) -> tuple[int, int]:
    """Mark as executed what is resident (or was `found` so); return how many keys, assignments."""
    own = ours = 0
    for i in range(start, stop):
        key = p.keys[i]
        ready = s.keys[key, ABSENT] != mark if found else f.keys[key, RESIDENT] != 0
        if ready and s.keys[key, DONE] != mark:
            s.keys[key, DONE] = mark
            own += 1
            ours += 1 if tokens == 1 else s.served_by[key % len(s.served_by)]
    return own, ours


def pin(s: State, f: Features, p: Piece, start: int, stop: int, layer: int) -> int:
    """Pin all keys of the event anew, after waves; return the mark."""
    s.whole[MARK] += 1
    for i in range(start, stop):
        f.keys[p.keys[i], PINNED] = s.whole[MARK]
    f.layers[layer, UNCLEAR] = 1
    return s.whole[MARK]


def note(s: State, f: Features, p: Piece, e: int, layer: int) -> None:
    """Tell the eviction what was executed."""
    start, stop = p.bounds[e], p.bounds[e + 1]
    if s.whole[WEIGHTS]:
        add_weights(s, f, p, e)
    for i in range(start, stop):
        key = p.keys[i]
        note_use(f, key, layer)
        if s.whole[OFFLINE]:
            f.keys[key, NEXT_USE] = p.next_use[i]
    note_turn(f, layer)


def add_weights(s: State, f: Features, p: Piece, e: int) -> None:
    for i in range(p.bounds[e], p.bounds[e + 1]):
        key = p.keys[i]
        expert = key % len(s.served_by)
        total, tokens = 0.0, 0
        for row in range(p.rows[e], p.rows[e + 1]):
            for j in range(p.experts.shape[1]):
                if p.experts[row, j] == expert:
                    total += p.weights[row, j]
                    tokens += 1
        add_weight(f, key, total, tokens)


# The clock.


def wait_until(s: State, time_s: float) -> float:
    stall_s = time_s - s.seconds[NOW]
    if stall_s <= 0:
        return 0.0
    s.seconds[NOW] = time_s
    return stall_s


def await_link(s: State, time_s: float) -> float:
    stall_s = wait_until(s, time_s)
    if stall_s:
        s.seconds[NOW] += s.seconds[WAIT_OVERHEAD]
    return stall_s


def execute(s: State, layer: int, num_experts: int, assignments: int) -> None:
    if num_experts:
        flop_s = s.layer_s[layer, FLOP_S] * assignments
        read_s = s.layer_s[layer, READ_S] * num_experts
        s.seconds[NOW] += (flop_s if flop_s > read_s else read_s) + s.seconds[EXPERT_OVERHEAD]


# The cache.


def make_room(s: State, f: Features, nbytes: int, cache: int, mark: int, layer: int) -> bool:
    most = s.layers[cache, CAPACITY] - nbytes
    while s.layers[cache, USED] > most:
        key = find_lowest(f, s.layers[cache, FIRST_LAYER], s.layers[cache, END_LAYER], mark, layer)
        if key < 0:
            return False
        evict(s, f, key)
    return True


def evict(s: State, f: Features, key: int) -> None:
    home = s.keys[key, HOME]
    cache = f.layers[home, CACHE_OF]
    s.layers[cache, EVICTIONS] += 1
    s.layers[cache, LIFETIME] += s.whole[TOKENS] - s.keys[key, SINCE]
    s.keys[key, LEFT_IN] = f.time[PASS]
    s.layers[cache, USED] -= s.layers[home, NBYTES]
    s.keys[key, UNUSED] = 0
    note_eviction(f, key, home)


def take_bytes(s: State, cache: int, nbytes: int) -> None:
    s.layers[cache, USED] += nbytes
    s.layers[cache, PEAK] = max(s.layers[cache, PEAK], s.layers[cache, USED])
    s.layers[cache, LOADS] += 1


def insert(s: State, f: Features, key: int, home: int, prefetched: bool) -> None:
    s.keys[key, SINCE] = s.whole[TOKENS]
    s.keys[key, UNUSED] = prefetched
    note_load(f, key, home, prefetched)


def reset(s: State, f: Features, p: Piece) -> None:
    """Start anew: an empty link, and caches as they began."""
    s.first[:] = -1
    s.last[:] = -1
    s.keys[:, DUE] = -1
    s.whole[QUEUED] = 0
    s.layers[:, NUM_FORETOLD] = 0
    for home in range(len(f.layers)):
        s.layers[home, EPOCH] += 1
    if s.whole[INFLIGHT] >= 0:
        wait_until(s, s.seconds[BUSY_UNTIL])
        land(s, f)
    for home in range(len(f.layers)):
        while f.layers[home, HELD]:
            evict(s, f, f.members[home, f.layers[home, HELD] - 1])
    for i in range(len(p.warm)):
        key = p.warm[i]
        home = s.keys[key, HOME]
        take_bytes(s, f.layers[home, CACHE_OF], s.layers[home, NBYTES])
        s.layers[f.layers[home, CACHE_OF], LOADS] -= 1
        s.layers[f.layers[home, CACHE_OF], WARMED] += 1
        insert(s, f, key, home, False)


# The link.


def is_active(s: State) -> bool:
    return s.whole[INFLIGHT] >= 0 or s.whole[QUEUED] > 0


def transfer(s: State, layer: int, now: float) -> float:
    start = now if now > s.seconds[BUSY_UNTIL] else s.seconds[BUSY_UNTIL]
    s.seconds[BUSY_UNTIL] = start + s.layer_s[layer, CARRY_S]
    s.seconds[BUSY] += s.layer_s[layer, CARRY_S]
    s.whole[MOVED] += s.layers[layer, NBYTES]
    s.whole[TRANSFERS] += 1
    return s.seconds[BUSY_UNTIL]


def submit(
    s: State, f: Features, p: Piece, e: int, number: int, layer: int, ready_s: float
) -> None:
    """Queue what is proposed at an event; tell the eviction of what is resident already."""
    num_layers = len(f.layers)
    for i in range(p.proposed_bounds[e], p.proposed_bounds[e + 1]):
        key = p.proposed[i]
        home = s.keys[key, HOME]
        if s.keys[key, FORETOLD] != s.layers[home, EPOCH]:
            s.keys[key, FORETOLD] = s.layers[home, EPOCH]
            s.layers[home, NUM_FORETOLD] += 1
        if f.keys[key, RESIDENT]:
            note_wish(f, key, home)
        elif key != s.whole[INFLIGHT] and s.keys[key, DUE] < 0:
            due = 0
            if not s.whole[FIFO]:
                due = number - layer + home + (num_layers if home <= layer else 0)
            enqueue(s, key, due, ready_s)


def enqueue(s: State, key: int, due: int, ready_s: float) -> None:
    slot = due % len(s.first)
    if s.whole[QUEUED] == 0 or due < s.whole[EARLIEST]:
        s.whole[EARLIEST] = due
    s.whole[QUEUED] += 1
    s.keys[key, DUE], s.earliest[key] = due, ready_s
    tail = s.last[slot]
    s.keys[key, PREVIOUS], s.keys[key, NEXT], s.last[slot] = tail, -1, key
    if tail >= 0:
        s.keys[tail, NEXT] = key
    else:
        s.first[slot] = key


def head(s: State) -> int:
    """Return the key of the next queued prefetch, or -1."""
    if s.whole[QUEUED] == 0:
        return -1
    while s.first[s.whole[EARLIEST] % len(s.first)] < 0:
        s.whole[EARLIEST] += 1
    return s.first[s.whole[EARLIEST] % len(s.first)]


def withdraw(s: State, key: int) -> None:
    slot = s.keys[key, DUE] % len(s.first)
    before, after = s.keys[key, PREVIOUS], s.keys[key, NEXT]
    if before >= 0:
        s.keys[before, NEXT] = after
    else:
        s.first[slot] = after
    if after >= 0:
        s.keys[after, PREVIOUS] = before
    else:
        s.last[slot] = before
    s.keys[key, DUE] = -1
    s.whole[QUEUED] -= 1


def cancel_due(s: State, number: int) -> None:
    """Drop the queued prefetches of an event: those of the ones before it are gone already."""
    slot = number % len(s.first)
    key = s.first[slot]
    while key >= 0:
        s.keys[key, DUE] = -1
        s.whole[QUEUED] -= 1
        key = s.keys[key, NEXT]
    s.first[slot] = s.last[slot] = -1
    # Further behind, two due events would have one slot.
    s.whole[EARLIEST] = max(s.whole[EARLIEST], number + 1)


def drain(s: State, f: Features, mark: int, layer: int) -> None:
    """Let the link work through its prefetches up to now.

    A transfer that could start at this instant is left: a demand at this instant goes first.
    """
    now = s.seconds[NOW]
    while True:
        if s.whole[INFLIGHT] >= 0:
            if s.seconds[BUSY_UNTIL] > now:
                return
            land(s, f)
        # Nothing starts before the link is free, whatever waits.
        if s.seconds[BUSY_UNTIL] >= now:
            return
        key = head(s)
        if key < 0:
            return
        start_s = max(s.earliest[key], s.seconds[BUSY_UNTIL])
        if start_s >= now:
            return
        if not begin(s, f, key, start_s, mark, layer):
            # Everything else is in use until now.
            s.earliest[key] = now
            return


def begin(s: State, f: Features, key: int, start_s: float, mark: int, layer: int) -> bool:
    """Begin a queued prefetch, or withdraw one that is resident; False where there is no room."""
    home = s.keys[key, HOME]
    cache = f.layers[home, CACHE_OF]
    if f.keys[key, RESIDENT]:
        withdraw(s, key)
        return True
    if not make_room(s, f, s.layers[home, NBYTES], cache, mark, layer):
        return False
    take_bytes(s, cache, s.layers[home, NBYTES])
    withdraw(s, key)
    transfer(s, home, start_s)
    s.whole[INFLIGHT] = key
    return True


def land(s: State, f: Features) -> None:
    key = s.whole[INFLIGHT]
    s.whole[INFLIGHT] = -1
    insert(s, f, key, s.keys[key, HOME], True)


def work_off(
    s: State, f: Features, p: Piece, start: int, stop: int, mark: int, layer: int
) -> float:
    """Move what was asked for before these demands, which a fifo link does first.

    Where every demand is pending that is up to the last of them, else all that waits. What finds
    no room is dropped. Returns when the last of those that were pending is there, or 0.
    """
    ready_s, waits, absent = 0.0, 0, False
    for i in range(start, stop):
        key = p.keys[i]
        if s.keys[key, ABSENT] == mark:
            pending = key == s.whole[INFLIGHT] or s.keys[key, DUE] >= 0
            waits += pending
            absent = absent or not pending
    while is_active(s) and (absent or waits):
        key = s.whole[INFLIGHT]
        if key >= 0:
            if s.keys[key, ABSENT] == mark:
                ready_s = s.seconds[BUSY_UNTIL]
                waits -= 1
            land(s, f)
            continue
        key = head(s)
        start_s = max(s.earliest[key], s.seconds[BUSY_UNTIL])
        if not begin(s, f, key, start_s, mark, layer):
            waits -= s.keys[key, ABSENT] == mark
            withdraw(s, key)
    return ready_s

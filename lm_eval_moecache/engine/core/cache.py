"""The caches: what is resident, who leaves, and what stateful evictions are notified of."""

# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from lm_eval_moecache.algorithms.features import Rank, find_lowest, note_eviction, note_load
from lm_eval_moecache.engine.core.state import IN_PYTHON, State
from lm_eval_moecache.records.jit import Array


def find(state: State, layer: int, resident: Array, absent: Array, awaits: int) -> None:
    """Write which of a layer's experts are resident, and which are neither that nor awaited."""
    base = layer * state.now[0].num_experts
    for expert in range(state.now[0].num_experts):
        slot, is_awaited = state.slots[base + expert], False
        if awaits:
            is_awaited = slot.arriving > 0 or slot.due >= 0
        resident[expert] = state.experts[base + expert].resident
        absent[expert] = resident[expert] == 0 and not is_awaited


def pin(state: State, keys: Array, start: int, stop: int, layer: int) -> None:
    """Pin these keys of a layer, under a new mark."""
    run = state.run[0]
    run.mark += 1
    for place in range(start, stop):
        state.experts[keys[place]].pinned = run.mark
    state.layers[layer].stale = 1


def make_room(
    state: State, rank: Rank, key: int, nbytes: int, cache: int, mark: int, layer: int
) -> bool:
    """Evict until `nbytes` fit, for `key`; False once only pinned or arriving keys are left.

    Evictions made on the way to a False are not undone.
    """
    run, held = state.run[0], state.caches[cache]
    if run.own and held.used > held.capacity - nbytes:
        notify(state, MISSED, key)
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
        notify(state, EVICTED, key)


def release(state: State, key: int) -> None:
    """Give back a resident's bytes."""
    slot = state.slots[key]
    level = state.levels[slot.home * state.run[0].num_levels + slot.level]
    state.caches[state.layers[slot.home].cache].used -= level.nbytes
    slot.unused = 0
    if IN_PYTHON and state.run[0].placed:
        state.outside.vacate(key)


def release_for_upgrade(state: State, key: int) -> None:
    """Release a resident's bytes, about to be loaded at a better level.

    Evictions do not learn of it: to them the expert has never left.
    """
    release(state, key)
    state.slots[key].upgrading = 1
    state.caches[state.layers[state.slots[key].home].cache].replaced += 1


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
        notify(state, PREFETCHED if prefetched else DEMANDED, key)


def reset(state: State, warm: Array) -> None:
    """Restore the initial caches; the link is empty. No pass counts these evictions."""
    run = state.run[0]
    own, run.own = run.own, 0
    if IN_PYTHON and own:
        state.outside.notify_reset(state)
    elif own:
        ask(state, RESET_ALL, 0, 0)
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


PASS, EVENT, DEMANDED, PREFETCHED, HINTED, MISSED, EVICTED, EXECUTED, WAVE, NOTED = range(10)
"""What they are notified of: a pass, an event that begins (its layer), a key's loading and such, a
wave that ends (its layer, after its keys), and that the event has been executed."""


def notify(state: State, kind: int, number: int) -> None:
    """Notify them at once or, from machine code, before they are next called."""
    if IN_PYTHON:
        state.outside.notify[kind](number)
    else:
        run = state.run[0]
        state.messages[run.num_messages] = kind
        state.messages[run.num_messages + 1] = number
        run.num_messages += 2
        if run.num_messages == len(state.messages):
            ask(state, READ, 0, 0)


READ, RESET_ALL = -1, -2
"""In place of a cache: asks for no victim, but that messages be read, or of a reset."""


def ask(state: State, cache: int, mark: int, layer: int) -> int:
    """Return the key that a cache's eviction chooses, not pinned by `mark`, or -1."""
    if IN_PYTHON:
        return state.outside.victim(state, cache, mark, layer)
    num_messages, state.run[0].num_messages = state.run[0].num_messages, 0
    return state.outside(cache, mark, layer, num_messages)

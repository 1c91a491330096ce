"""The caches: what is resident, who leaves, and what stateful evictions are notified of."""

from __future__ import annotations

from lm_eval_moecache.engine.kernel.clock import READ
from lm_eval_moecache.engine.kernel.ranking import find_victim, note_eviction, note_load
from lm_eval_moecache.engine.kernel.state import CACHE, EXPERT, LAYER, LEVEL, SLOT, Call, Run
from lm_eval_moecache.records.memory import FLAGS, INTS, at, invoke, numbers

PASS, EVENT, DEMANDED, PREFETCHED, HINTED, MISSED, EVICTED, EXECUTED, WAVE, NOTED = range(10)
"""What stateful evictions are notified of: a pass, an event that begins (its place in the batch), a
key's loading and such, a wave that ends (its layer, after its keys), and that the event has been
executed (its layer)."""
RELEASED, UPGRADED = 10, 11
"""What the wall alone is notified of: a key loaded anew at a better level."""


def notify(run: Run, kind: int, number: int) -> None:
    """Notify Python: evictions with a state of their own, before they are next asked."""
    if run.notifies:
        messages = numbers(run.messages, INTS)
        messages[run.num_messages] = kind
        messages[run.num_messages + 1] = number
        run.num_messages += 2
        if run.num_messages == run.max_messages:
            invoke(run.ask, READ, 0, 0)


def find(run: Run, call: Call) -> None:
    """Write which of the layer's experts are resident, and which are neither that nor awaited."""
    resident, absent = numbers(call.resident, FLAGS), numbers(call.absent, FLAGS)
    base, place = run.layer * run.num_experts, run.row * run.num_experts
    for key in range(base, base + run.num_experts):
        slot, is_there = at(run.slots, key, SLOT), at(run.experts, key, EXPERT).resident
        is_coming = call.awaits and (slot.arriving or slot.due >= 0)
        resident[place] = is_there
        absent[place] = not (is_there or is_coming)
        place += 1


def pin(run: Run) -> None:
    """Pin the keys of the event in progress, under a new mark."""
    run.mark += 1
    keys = numbers(run.keys, INTS)
    for place in range(run.num_keys):
        at(run.experts, keys[place], EXPERT).pinned = run.mark
    at(run.layers, run.layer, LAYER).stale = 1


def is_missing(run: Run, key: int, mark: int) -> bool:
    """Whether a demanded key is not there, nor executed by an earlier wave of this mark.

    A prefetch may have brought it since it was looked up.
    """
    slot = at(run.slots, key, SLOT)
    if slot.done == mark:
        return False
    is_there = at(run.experts, key, EXPERT).resident and not slot.upgrading
    return not is_there or slot.level > slot.demanded_level


def make_room(run: Run, key: int, nbytes: int, mark: int) -> bool:
    """Evict until `nbytes` fit, for `key`; False once only pinned or arriving keys are left.

    Evictions made on the way to a False are not undone.
    """
    number = at(run.layers, at(run.slots, key, SLOT).home, LAYER).cache
    cache = at(run.caches, number, CACHE)
    if cache.used > cache.capacity - nbytes:
        notify(run, MISSED, key)
    while cache.used > cache.capacity - nbytes:
        victim = find_victim(run, number, mark)
        if victim < 0:
            return False
        evict(run, victim)
    return True


def evict(run: Run, key: int) -> None:
    """Evict a resident; count it for its cache and for the run."""
    slot = at(run.slots, key, SLOT)
    cache = at(run.caches, at(run.layers, slot.home, LAYER).cache, CACHE)
    lived = run.tokens - slot.since
    cache.evictions += 1
    cache.lifetime += lived
    run.evictions += 1
    run.lifetime += lived
    slot.left_in = run.pass_index
    release(run, key)
    note_eviction(run, key)
    notify(run, EVICTED, key)


def release(run: Run, key: int) -> None:
    """Give back a resident's bytes."""
    slot = at(run.slots, key, SLOT)
    level = at(run.levels, slot.home * run.num_levels + slot.level, LEVEL)
    at(run.caches, at(run.layers, slot.home, LAYER).cache, CACHE).used -= level.size_bytes
    slot.unused = 0


def take_bytes(run: Run, home: int, level: int) -> None:
    """Take the bytes of a load of a layer from its cache."""
    cache = at(run.caches, at(run.layers, home, LAYER).cache, CACHE)
    cache.used += at(run.levels, home * run.num_levels + level, LEVEL).size_bytes
    cache.peak = max(cache.peak, cache.used)
    cache.loads += 1


def insert(run: Run, key: int, level: int, prefetched: bool) -> None:
    """Make a key resident."""
    slot = at(run.slots, key, SLOT)
    slot.since = run.tokens
    slot.level = level
    run.num_loads += 1
    slot.arrival = run.num_loads
    if slot.upgrading:
        # To evictions it has never left.
        slot.upgrading = 0
        if run.wall:
            notify(run, UPGRADED, key)
        return
    slot.unused = int(prefetched)
    note_load(run, key, prefetched)
    notify(run, PREFETCHED if prefetched else DEMANDED, key)


def fill(run: Run, call: Call) -> None:
    """Fill the empty caches with the call's keys; no pass counts it."""
    keys = numbers(call.keys, INTS)
    for place in range(call.num_keys):
        home = at(run.slots, keys[place], SLOT).home
        cache = at(run.caches, at(run.layers, home, LAYER).cache, CACHE)
        take_bytes(run, home, 0)
        cache.loads -= 1
        cache.warmed += 1
        insert(run, keys[place], 0, False)

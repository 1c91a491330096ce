"""The per-expert features that eviction rules rank by, and the search for the victim.

Order numbers count loads, uses and hints (proposals of keys) as they happen: smaller is older. A
cache's turns are its events.
"""

# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import math

from lm_eval_moecache.engine.kernel.state import (
    CACHE,
    EXPERT,
    EXPERT_SIZE,
    FORECAST,
    LAYER,
    LAYER_SIZE,
    SLOT,
    Cache,
    Call,
    Run,
)
from lm_eval_moecache.records.memory import FLOATS, INTS, at, invoke, numbers

BY_USE, BY_LOADING = 1, 2
"""Orders of recency (`Run.recency`)."""
FAST, MIDDLE, SLOW = 0.6, 0.9, 0.98
"""Decay per token: windows of about two, ten and fifty tokens."""
SLACK = 5.0
"""Net duels that a forecast may lose before LRU takes over: the first of a run say little."""


def cache_of(run: Run, home: int) -> Cache:
    """Return the cache of a layer."""
    return at(run.caches, at(run.layers, home, LAYER).cache, CACHE)


def note_pass(run: Run, index: int) -> None:
    """Begin a pass: the experts proposed for it become current, in the order of the hints."""
    for home in range(run.num_layers):
        layer = at(run.layers, home, LAYER)
        layer.stale = 1
        for place in range(layer.held if run.num_hints else 0):
            member = at(run.experts, home * run.num_experts + place, EXPERT).member
            expert = at(run.experts, member, EXPERT)
            if expert.hint_place:
                expert.current_since = run.order + expert.hint_place
                expert.current = index
                expert.hint_place = 0
    if run.num_hints:
        run.order += run.num_hints + 1
        run.num_hints = 0
    run.pass_index = index
    run.served = -1


def note_load(run: Run, key: int, prefetched: bool) -> None:
    """Note that a key became resident."""
    home, expert = at(run.slots, key, SLOT).home, at(run.experts, key, EXPERT)
    layer = at(run.layers, home, LAYER)
    cache = at(run.caches, layer.cache, CACHE)
    expert.last_use = run.order
    expert.loaded = run.order
    expert.current_since = run.order
    run.order += 1
    expert.current = run.pass_index
    expert.turn = cache.turns
    expert.accessed = cache.accesses
    expert.hits = 0
    cache.cold_fills += 1 - cache.has_evicted
    expert.cold_fill_rank = 0 if cache.has_evicted else cache.cold_fills
    at(run.experts, home * run.num_experts + layer.held, EXPERT).member = key
    expert.place = layer.held
    layer.held += 1
    cache.held += 1
    expert.resident = 1
    layer.stale = 1
    if prefetched:
        expert.predicted = 1
        layer.predicted = 1
    else:
        expert.demanded = run.pass_index
    if prefetched and home <= run.served:
        run.num_hints += 1
        expert.hint_place = run.num_hints
    if run.recency:
        put_last(run, cache, key)


def note_eviction(run: Run, key: int) -> None:
    """Note that a key was evicted."""
    home, expert = at(run.slots, key, SLOT).home, at(run.experts, key, EXPERT)
    layer, base = at(run.layers, home, LAYER), home * run.num_experts
    cache = at(run.caches, layer.cache, CACHE)
    layer.held -= 1
    moved = at(run.experts, base + layer.held, EXPERT).member
    at(run.experts, base + expert.place, EXPERT).member = moved
    at(run.experts, moved, EXPERT).place = expert.place
    expert.resident = 0
    expert.hint_place = 0
    expert.predicted = 0
    layer.stale = 1
    cache.held -= 1
    cache.has_evicted = 1
    if not cache.held:  # emptied: it fills anew
        cache.cold_fills = 0
        cache.has_evicted = 0
    if run.recency:
        take_out(run, cache, key)
    if run.furthest >= 0:
        begin_duel(run, key)


def put_last(run: Run, cache: Cache, key: int) -> None:
    """Make a key the most recent of its cache."""
    expert = at(run.experts, key, EXPERT)
    expert.older = cache.newest
    expert.newer = -1
    if cache.newest >= 0:
        at(run.experts, cache.newest, EXPERT).newer = key
    else:
        cache.oldest = key
    cache.newest = key


def take_out(run: Run, cache: Cache, key: int) -> None:
    """Take a key out of its cache's order of recency."""
    expert = at(run.experts, key, EXPERT)
    if expert.older >= 0:
        at(run.experts, expert.older, EXPERT).newer = expert.newer
    else:
        cache.oldest = expert.newer
    if expert.newer >= 0:
        at(run.experts, expert.newer, EXPERT).older = expert.older
    else:
        cache.newest = expert.older


def note_hint(run: Run, key: int) -> None:
    """Note that a prefetcher wants a resident key."""
    home, expert = at(run.slots, key, SLOT).home, at(run.experts, key, EXPERT)
    layer = at(run.layers, home, LAYER)
    if expert.current != run.pass_index:
        expert.current = run.pass_index
        expert.current_since = run.order
        run.order += 1
        layer.stale = 1
    if run.forecasts:
        expert.predicted = 1
        layer.predicted = 1
        layer.stale = 1
    if home <= run.served:
        run.num_hints += 1
        expert.hint_place = run.num_hints


def note_event(run: Run, call: Call) -> None:
    """Note the executed event, of the keys in order of need."""
    cache, keys = cache_of(run, run.layer), numbers(run.keys, INTS)
    if run.weighs:
        add_weights(run, call)
    turns = cache.turns
    for place in range(run.num_keys):
        expert = at(run.experts, keys[place], EXPERT)
        expert.uses += 1 - expert.ran_below_best_precision if run.only_best else 1
        cache.accesses += 1
        expert.accessed = cache.accesses
        expert.hits += expert.demanded != run.pass_index
        expert.demanded = -2
        if expert.resident:
            expert.last_use = run.order
            expert.current_since = run.order
            run.order += 1
            expert.current = run.pass_index
            expert.turn = turns
            if run.recency == BY_USE:
                take_out(run, cache, keys[place])
                put_last(run, cache, keys[place])
    if run.offline:
        note_next_uses(run, call, -1)
    if run.by_token and run.tokens_here > 1:
        note_tokens(run, call, cache)
    if run.forecasts:
        note_uses(run, call, turns)
    cache.turns += 1
    run.served = run.layer
    at(run.layers, run.layer, LAYER).stale = 1
    if run.ages:
        for home in range(run.num_layers):
            at(run.layers, home, LAYER).stale = 1


def note_next_uses(run: Run, call: Call, done: int) -> None:
    """Note when the event's keys are needed next: all, or those executed by a wave of this mark."""
    keys, next_use = numbers(run.keys, INTS), numbers(call.next_use, INTS)
    for place in range(run.num_keys):
        if done < 0 or at(run.slots, keys[place], SLOT).done == done:
            at(run.experts, keys[place], EXPERT).next_use = next_use[run.cursor + place]


def note_tokens(run: Run, call: Call, cache: Cache) -> None:
    """Let recency be that of the last token to need an expert, and not of the first."""
    experts, base = numbers(call.executed, INTS), run.layer * run.num_experts
    for entry in range(run.first_entry, run.end_entry):
        if experts[entry] >= 0:
            expert = at(run.experts, base + experts[entry], EXPERT)
            expert.last_use = run.order
            run.order += 1
            if run.recency and expert.resident:
                take_out(run, cache, base + experts[entry])
                put_last(run, cache, base + experts[entry])


def add_weights(run: Run, call: Call) -> None:
    """Add the weights that the event's tokens give its experts, before its uses are noted.

    With a `growth`, later weights grow instead of earlier ones decaying; in logarithms, because the
    factor outgrows a float.
    """
    experts, weights = numbers(call.executed, INTS), numbers(call.seen_weights, FLOATS)
    keys, base = numbers(run.keys, INTS), run.layer * run.num_experts
    for place in range(run.num_keys):
        expert = at(run.experts, keys[place], EXPERT)
        expert.fresh_weight = 0.0
        expert.fresh_tokens = 0
    for entry in range(run.first_entry, run.end_entry):
        if experts[entry] >= 0:
            expert = at(run.experts, base + experts[entry], EXPERT)
            expert.fresh_weight += float(weights[entry])
            expert.fresh_tokens += 1
    for place in range(run.num_keys):
        expert = at(run.experts, keys[place], EXPERT)
        if run.growth:
            fresh = math.log(max(expert.fresh_weight, 1e-30)) + run.growth * run.pass_index
            old = expert.weight if expert.served_tokens else -math.inf
            high, low = max(old, fresh), min(old, fresh)
            expert.weight = high + math.log1p(math.exp(low - high))
        else:
            expert.weight += expert.fresh_weight
        expert.served_tokens += expert.fresh_tokens


def note_uses(run: Run, call: Call, turns: int) -> None:
    """For forecasts: end the duels of the event's keys, and update the rates of its layer.

    Each token is a step of decay; the event's last one counts 1.
    """
    keys, layer = numbers(run.keys, INTS), at(run.layers, run.layer, LAYER)
    for place in range(run.num_keys):
        at(run.forecast_rows, keys[place], FORECAST).asked = turns + 1
    for place in range(run.num_keys):
        end_duel(run, keys[place])
    experts, base = numbers(call.executed, INTS), run.layer * run.num_experts
    fast = middle = slow = 1.0
    for token in range(run.tokens_here):
        stop = run.end_entry - token * run.top_k
        for entry in range(stop - run.top_k, stop):
            if experts[entry] >= 0:
                own = at(run.forecast_rows, base + experts[entry], FORECAST)
                own.fresh_fast += fast
                own.fresh_middle += middle
                own.fresh_slow += slow
        fast *= FAST
        middle *= MIDDLE
        slow *= SLOW
    layer.predicted = 0
    for key in range(base, base + run.num_experts):
        expert, own = at(run.experts, key, EXPERT), at(run.forecast_rows, key, FORECAST)
        own.fast = own.fast * fast + (1 - FAST) * own.fresh_fast
        own.middle = own.middle * middle + (1 - MIDDLE) * own.fresh_middle
        own.slow = own.slow * slow + (1 - SLOW) * own.fresh_slow
        own.fresh_fast = 0.0
        own.fresh_middle = 0.0
        own.fresh_slow = 0.0
        expert.rate = (own.fast + own.middle + own.slow) / 3
        expert.predicted = 0


def end_duel(run: Run, key: int) -> None:
    """End a key's duel, if it is in one: once all uses of an event are noted."""
    own = at(run.forecast_rows, key, FORECAST)
    if own.rival >= 0:
        other = at(run.forecast_rows, own.rival, FORECAST)
        own.rival = -1
        other.rival = -1
        if other.asked != own.asked:
            cache = cache_of(run, run.layer)
            cache.balance = run.keep * cache.balance + (-1.0 if own.unwanted else 1.0)


def begin_duel(run: Run, key: int) -> None:
    """Begin the pending duel if `key`, which is being evicted, is one of its two victims."""
    first = at(run.forecast_rows, run.furthest, FORECAST)
    second = at(run.forecast_rows, run.other, FORECAST)
    if (key == run.furthest or key == run.other) and first.rival < 0 and second.rival < 0:
        first.rival = run.other
        first.unwanted = 1
        second.rival = run.furthest
        second.unwanted = 0
    run.furthest = -1


def find_victim(run: Run, number: int, mark: int) -> int:
    """Return the key to evict from a cache, not pinned by `mark`, or -1 for none.

    Pinned are keys of the layer being served, or of layers whose `stale` has been set.
    """
    cache, oldest = at(run.caches, number, CACHE), -1
    if run.stateful:
        return invoke(run.ask, number, mark, 0)
    if run.recency:
        oldest = cache.oldest
        while oldest >= 0 and at(run.experts, oldest, EXPERT).pinned == mark:
            oldest = at(run.experts, oldest, EXPERT).newer
        if not run.forecasts:
            return oldest
    best = find_lowest(run, cache, mark)
    run.furthest = -1
    if run.forecasts and best != oldest:
        run.furthest = best
        run.other = oldest
        if cache.balance < -SLACK:
            return oldest
    return best


def find_lowest(run: Run, cache: Cache, mark: int) -> int:
    """Return the key of the lowest rank in a cache, ties to the smaller one, or -1."""
    run.turns = cache.turns
    run.accesses = cache.accesses
    run.cold_fills = cache.cold_fills
    best, best_a, best_b = -1, 0.0, 0.0
    for home in range(cache.first_layer, cache.end_layer):
        layer = at(run.layers, home, LAYER)
        if layer.stale:
            look_up_lowest(run, home, mark)
        elif run.moves and layer.lowest >= 0:
            rank(run, home, layer.lowest)
            layer.first = run.first
            layer.second = run.second
        if layer.lowest >= 0:
            a, b = layer.first, layer.second
            if best < 0 or a < best_a or (a == best_a and b < best_b):
                best, best_a, best_b = layer.lowest, a, b
    return best


def rank(run: Run, home: int, key: int) -> None:
    """Write the rank of a resident of a layer to `first` and `second`."""
    expert, layer = run.experts + key * EXPERT_SIZE, run.layers + home * LAYER_SIZE
    invoke(run.rank, expert, layer, run.address)


def look_up_lowest(run: Run, home: int, mark: int) -> None:
    """Recompute a layer's first victim, `lowest`."""
    layer, base = at(run.layers, home, LAYER), home * run.num_experts
    best, best_a, best_b = -1, 0.0, 0.0
    for place in range(layer.held):
        key = at(run.experts, base + place, EXPERT).member
        if at(run.experts, key, EXPERT).pinned == mark:
            continue
        rank(run, home, key)
        a, b = run.first, run.second
        if best < 0 or a < best_a or (a == best_a and (b < best_b or (b == best_b and key < best))):
            best, best_a, best_b = key, a, b
    layer.lowest = best
    layer.first = best_a
    layer.second = best_b
    layer.stale = 0

"""What a ranking rule may know of each expert, kept in arrays, and the search for who leaves.

Plain functions of arrays, in the part of Python that numba compiles: a replay compiles them into
its loop (`engine.compiled`), a live run calls `play` (`ranked.RankedEviction`). `rank` and `AGES`
are the rule's: whoever uses these functions binds them (`records.jit.specialise`).

Order numbers count loads, uses and wishes as they happen, so that of two the smaller is the older.
A cache's turns are its events. A key is `layer * num_experts + expert`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

Array = Any
"""A numpy array of the type that its comment says; numba wants to know no more."""

LAST_USE, LOADED, WANTED, CURRENT, USES, TURN, NEXT_USE, SERVED_TOKENS = range(8)
RESIDENT, AHEAD, PINNED, PLACE = range(8, 12)
"""Columns of `Features.keys`. The first three are order numbers: of the last use, or of the load
where that is later; of the last load; of when it became current, by a load, a use, or the first
wish in a pass. CURRENT: the pass of that. USES: events that needed it, resident or not. TURN: the
cache's turn at its last use or load. NEXT_USE: number of the next event that needs it (offline
rules alone). SERVED_TOKENS: of which `weights` has the sum. The others are how residents are found:
whether it is one, its place among the wishes for the next pass (0 for none), the mark of the last
search that may not take it, and its place among its layer's `members`."""

HELD, CACHE_OF, LOWEST, UNCLEAR, TURNS = range(5)
"""Columns of `Features.layers`: residents; the layer's cache; who of it leaves first (-1: nobody),
unless UNCLEAR; and, in the row of a cache, the events that it has seen."""

ORDER, PASS, SERVED, WISHES = range(4)
"""Places in `Features.time`: the next order number, the pass in progress, the layer it has served
last (-1 for none), and how many residents are wanted for the next pass."""

AGES = False
"""Whether the rule's order within a layer changes with every event, used or not."""


def rank(f: Features, key: int, home: int, layer: int) -> tuple[float, float]:
    """Return what is compared, first number first; the lowest leaves, ties go to the smaller key.

    `home` is the key's layer, `layer` the one being served. Within one layer the order must change
    only by what happens to its own residents, by a new pass, and, where `AGES`, by an event.
    """
    raise NotImplementedError


class Features(NamedTuple):
    """What is known of the experts of one cache, or of all of them. Whole numbers, but the last."""

    keys: Array
    """[keys, 12]"""
    layers: Array
    """[layers, 5]"""
    members: Array
    """[layers, experts] A layer's residents, in no order."""
    time: Array
    """ORDER, PASS, SERVED, WISHES."""
    weights: Array
    """float64 [keys + 1]: routing weights summed over the tokens that an expert served, and at the
    end how much more a pass' weights count than those of the pass before, as a logarithm."""


def make_features(
    num_layers: int, num_experts: int, per_layer: bool = False, growth: float = 0.0
) -> Features:
    """Return the features of one cache, or of one for each layer, that nothing happened to yet."""
    num_keys = num_layers * num_experts
    f = Features(
        keys=np.zeros((num_keys, 12), np.int64),
        layers=np.zeros((num_layers, 5), np.int64),
        members=np.zeros((num_layers, num_experts), np.int64),
        time=np.asarray([1, -1, -1, 0]),
        weights=np.zeros(num_keys + 1),
    )
    f.keys[:, CURRENT] = -2
    f.layers[:, CACHE_OF] = np.arange(num_layers) if per_layer else 0
    f.layers[:, LOWEST], f.layers[:, UNCLEAR] = -1, 1
    f.weights[-1] = growth
    return f


def note_pass(f: Features, index: int) -> None:
    """A pass begins: what is wanted for it is current, in the order of the wishes."""
    if f.time[WISHES]:
        order = f.time[ORDER]
        for home in range(len(f.layers)):
            for i in range(f.layers[home, HELD]):
                key = f.members[home, i]
                if f.keys[key, AHEAD]:
                    f.keys[key, WANTED] = order + f.keys[key, AHEAD]
                    f.keys[key, CURRENT] = index
                    f.keys[key, AHEAD] = 0
        f.time[ORDER] = order + f.time[WISHES] + 1
        f.time[WISHES] = 0
    f.time[PASS] = index
    f.time[SERVED] = -1
    f.layers[:, UNCLEAR] = 1


def note_load(f: Features, key: int, home: int, prefetched: bool) -> None:
    order = f.time[ORDER]
    f.time[ORDER] = order + 1
    f.keys[key, LAST_USE] = f.keys[key, LOADED] = f.keys[key, WANTED] = order
    f.keys[key, CURRENT] = f.time[PASS]
    f.keys[key, TURN] = f.layers[f.layers[home, CACHE_OF], TURNS]
    at = f.layers[home, HELD]
    f.members[home, at] = key
    f.keys[key, PLACE] = at
    f.layers[home, HELD] = at + 1
    f.keys[key, RESIDENT] = 1
    f.layers[home, UNCLEAR] = 1
    if prefetched and home <= f.time[SERVED]:
        f.time[WISHES] += 1
        f.keys[key, AHEAD] = f.time[WISHES]


def note_eviction(f: Features, key: int, home: int) -> None:
    last = f.layers[home, HELD] - 1
    moved, at = f.members[home, last], f.keys[key, PLACE]
    f.members[home, at] = moved
    f.keys[moved, PLACE] = at
    f.layers[home, HELD] = last
    f.keys[key, RESIDENT] = 0
    f.keys[key, AHEAD] = 0
    f.layers[home, UNCLEAR] = 1


def note_wish(f: Features, key: int, home: int) -> None:
    """A prefetcher wants what is resident already."""
    if f.keys[key, CURRENT] != f.time[PASS]:
        f.keys[key, CURRENT] = f.time[PASS]
        f.keys[key, WANTED] = f.time[ORDER]
        f.time[ORDER] += 1
        f.layers[home, UNCLEAR] = 1
    if home <= f.time[SERVED]:
        f.time[WISHES] += 1
        f.keys[key, AHEAD] = f.time[WISHES]


def note_use(f: Features, key: int, home: int) -> None:
    """An event needed a key, and was executed; `note_turn` follows the last one."""
    f.keys[key, USES] += 1
    if f.keys[key, RESIDENT]:
        order = f.time[ORDER]
        f.time[ORDER] = order + 1
        f.keys[key, LAST_USE] = f.keys[key, WANTED] = order
        f.keys[key, CURRENT] = f.time[PASS]
        f.keys[key, TURN] = f.layers[f.layers[home, CACHE_OF], TURNS]


def note_turn(f: Features, layer: int) -> None:
    f.layers[f.layers[layer, CACHE_OF], TURNS] += 1
    f.time[SERVED] = layer
    f.layers[layer, UNCLEAR] = 1
    if AGES:
        f.layers[:, UNCLEAR] = 1


def add_weight(f: Features, key: int, weight: float, tokens: int) -> None:
    """Add what an event's tokens gave a key, before its `note_use`.

    With a growth, later weights count for more instead of earlier ones ageing: as logarithms, for
    the factor outgrows a float.
    """
    growth = f.weights[-1]
    if growth:
        fresh = math.log(max(weight, 1e-30)) + growth * f.time[PASS]
        old = f.weights[key] if f.keys[key, SERVED_TOKENS] else -math.inf
        high, low = max(old, fresh), min(old, fresh)
        f.weights[key] = high + math.log1p(math.exp(low - high))
    else:
        f.weights[key] += weight
    f.keys[key, SERVED_TOKENS] += tokens


def find_lowest(f: Features, first: int, last: int, mark: int, layer: int) -> int:
    """Return who leaves first of layers `first` to `last`, the latter left out; -1 for nobody.

    Keys `pinned` with the mark may not leave; they are all of `layer`, or of one whose `unclear`
    the caller has set.
    """
    best, best_a, best_b = -1, 0.0, 0.0
    for home in range(first, last):
        if f.layers[home, UNCLEAR]:
            _look_up(f, home, mark, layer)
        key = f.layers[home, LOWEST]
        if key >= 0:
            a, b = rank(f, key, home, layer)
            if best < 0 or a < best_a or (a == best_a and b < best_b):
                best, best_a, best_b = key, a, b
    return best


def _look_up(f: Features, home: int, mark: int, layer: int) -> None:
    best, best_a, best_b = -1, 0.0, 0.0
    for i in range(f.layers[home, HELD]):
        key = f.members[home, i]
        if f.keys[key, PINNED] == mark:
            continue
        a, b = rank(f, key, home, layer)
        if best < 0 or a < best_a or (a == best_a and (b < best_b or (b == best_b and key < best))):
            best, best_a, best_b = key, a, b
    f.layers[home, LOWEST] = best
    f.layers[home, UNCLEAR] = 0


A_LOAD, A_PREFETCH, AN_EVICTION, A_WISH, A_USE, A_LESSER_USE, A_NEXT_USE, A_TURN, A_PASS = range(9)
"""What a log tells, each with a key (or a layer, or a pass) and a value."""


def play(
    keys: Array,
    layers: Array,
    members: Array,
    time: Array,
    weights: Array,
    log: Array,
    pins: Array,
    layer: int,
) -> int:
    """Take in a log [what, key, value, what ...] and return who leaves, none of `pins`, or -1."""
    f = Features(keys, layers, members, time, weights)
    num_layers, num_experts = members.shape
    for i in range(0, len(log), 3):
        what, key, value = log[i], log[i + 1], log[i + 2]
        home = key // num_experts
        if what in (A_LOAD, A_PREFETCH):
            note_load(f, key, home, what == A_PREFETCH)
        elif what == AN_EVICTION:
            note_eviction(f, key, home)
        elif what == A_WISH:
            note_wish(f, key, home)
        elif what in (A_USE, A_LESSER_USE):
            note_use(f, key, home)
            f.keys[key, USES] -= what == A_LESSER_USE
        elif what == A_NEXT_USE:
            f.keys[key, NEXT_USE] = value
            f.layers[home, UNCLEAR] = 1
        elif what == A_TURN:
            note_turn(f, key)
        elif what == A_PASS:
            note_pass(f, key)
    for i in range(len(pins)):
        f.keys[pins[i], PINNED] = 1
        f.layers[pins[i] // num_experts, UNCLEAR] = 1
    found = find_lowest(f, 0, num_layers, 1, layer)
    for i in range(len(pins)):
        f.keys[pins[i], PINNED] = 0
        f.layers[pins[i] // num_experts, UNCLEAR] = 1
    return found

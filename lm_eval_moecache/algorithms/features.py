"""What a ranking rule may know of each expert, kept in tables, and the search for who leaves.

Plain functions of tables of records, in the part of Python that numba compiles: a replay has them
in its loop (`engine.core`), a live run calls `play` (`ranked.RankedEviction`). A table is a list of
objects, or a numpy array of records with the same fields, on which the same functions run compiled
(`records.jit`). Which rule it is, is an argument, so that all rules share what is compiled.

Order numbers count loads, uses and wishes as they happen, so that of two the smaller is the older.
A cache's turns are its events. A key is `layer * num_experts + expert`.
"""

# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from lm_eval_moecache.records.jit import Table, make_table


@dataclass(slots=True)
class Expert:
    """What is known of one expert."""

    pinned: int = 0
    """The mark of the last search that may not take it."""
    last_use: int = 0
    """Order number of the last use, or of the load where that is later."""
    uses: int = 0
    """Events that needed it, resident or not."""
    loaded: int = 0
    """Order number of the last load."""
    current: int = -2
    """The pass in which it became current last: by a load, a use, or the first wish in a pass."""
    wanted: int = 0
    """Order number of when it did."""
    next_use: int = 0
    """Number of the next event that needs it (offline rules alone)."""
    turn: int = 0
    """Its cache's turn at its last use or load."""
    served_tokens: int = 0
    """Tokens that it served, of which `weight` has the sum."""
    weight: float = 0.0
    """Routing weights summed over these tokens; their logarithm where there is a `growth`."""
    resident: int = 0
    ahead: int = 0
    """Its place among the wishes for the next pass, 0 for none."""
    place: int = 0
    """Its place among its layer's residents."""
    member: int = 0
    """The resident that has the place of this expert's index."""


@dataclass(slots=True)
class Layer:
    """What is known of one layer."""

    index: int = 0
    held: int = 0
    """Residents."""
    cache: int = 0
    unclear: int = 1
    """Whether who leaves first has to be looked up again."""
    lowest: int = -1
    """Key of who leaves first, or -1 for nobody, with what is compared of it."""
    first: float = 0.0
    second: float = 0.0
    turns: int = 0
    """In the row of a cache, the events that it has seen."""


@dataclass(slots=True)
class Now:
    """What is the same for all experts, and what of the rule is."""

    num_layers: int
    num_experts: int
    pass_index: int = -1
    """The pass in progress."""
    layer: int = -1
    """The layer being served, when somebody has to leave."""
    turns: int = 0
    """The events that the cache has seen from which somebody has to leave."""
    served: int = -1
    """The layer that the pass has served last, -1 for none."""
    order: int = 1
    """The next order number."""
    wishes: int = 0
    """How many residents are wanted for the next pass."""
    ages: int = 0
    moves: int = 0
    growth: float = 0.0
    """How much more a pass' weights count than those of the pass before, as a logarithm."""


Rank = Callable[[Expert, Layer, Now], tuple[float, float]]
"""Returns what is compared, first number first; the lowest leaves, ties go to the smaller key.

It is asked about a resident, its layer, and what is now. Within one layer the order may change only
by what happens to its own residents, by a new pass, and by what its class says (`RankedEviction`).
"""


class Features(NamedTuple):
    """The tables of one cache, or of all of them."""

    experts: Table
    """By key."""
    layers: Table
    now: Table
    """A single record."""


def make_features(
    num_layers: int,
    num_experts: int,
    per_layer: bool = False,
    *,
    ages: bool = False,
    moves: bool = True,
    growth: float = 0.0,
) -> Features:
    """Return the features of one cache, or of one for each layer, that nothing happened to yet."""
    layers = make_table(Layer, num_layers)
    for index, layer in enumerate(layers):
        layer.index, layer.cache = index, index if per_layer else 0
    now = Now(num_layers, num_experts, ages=int(ages), moves=int(moves), growth=growth)
    return Features(make_table(Expert, num_layers * num_experts), layers, [now])


def note_pass(f: Any, index: int) -> None:
    """A pass begins: what is wanted for it is current, in the order of the wishes."""
    now = f.now[0]
    for home in range(now.num_layers):
        f.layers[home].unclear = 1
        if now.wishes:
            for i in range(f.layers[home].held):
                e = f.experts[f.experts[home * now.num_experts + i].member]
                if e.ahead:
                    e.wanted = now.order + e.ahead
                    e.current = index
                    e.ahead = 0
    if now.wishes:
        now.order += now.wishes + 1
        now.wishes = 0
    now.pass_index = index
    now.served = -1


def note_load(f: Any, key: int, home: int, prefetched: bool) -> None:
    now, layer, e = f.now[0], f.layers[home], f.experts[key]
    e.last_use = e.loaded = e.wanted = now.order
    now.order += 1
    e.current = now.pass_index
    e.turn = f.layers[layer.cache].turns
    f.experts[home * now.num_experts + layer.held].member = key
    e.place = layer.held
    layer.held += 1
    e.resident = 1
    layer.unclear = 1
    if prefetched and home <= now.served:
        now.wishes += 1
        e.ahead = now.wishes


def note_eviction(f: Any, key: int, home: int) -> None:
    layer, e, base = f.layers[home], f.experts[key], home * f.now[0].num_experts
    layer.held -= 1
    moved = f.experts[base + layer.held].member
    f.experts[base + e.place].member = moved
    f.experts[moved].place = e.place
    e.resident = 0
    e.ahead = 0
    layer.unclear = 1


def note_wish(f: Any, key: int, home: int) -> None:
    """A prefetcher wants what is resident already."""
    now, e = f.now[0], f.experts[key]
    if e.current != now.pass_index:
        e.current = now.pass_index
        e.wanted = now.order
        now.order += 1
        f.layers[home].unclear = 1
    if home <= now.served:
        now.wishes += 1
        e.ahead = now.wishes


def note_use(f: Any, key: int, turns: int) -> None:
    """An event needed a key, and was executed; `note_turn` follows the last one.

    `turns` are those of the key's cache.
    """
    now, e = f.now[0], f.experts[key]
    e.uses += 1
    if e.resident:
        e.last_use = e.wanted = now.order
        now.order += 1
        e.current = now.pass_index
        e.turn = turns


def note_turn(f: Any, layer: int) -> None:
    now = f.now[0]
    f.layers[f.layers[layer].cache].turns += 1
    now.served = layer
    f.layers[layer].unclear = 1
    if now.ages:
        for home in range(now.num_layers):
            f.layers[home].unclear = 1


def add_weight(f: Any, key: int, weight: float, tokens: int) -> None:
    """Add what an event's tokens gave a key, before its `note_use`.

    With a growth, later weights count for more instead of earlier ones ageing: as logarithms, for
    the factor outgrows a float.
    """
    now, e = f.now[0], f.experts[key]
    if now.growth:
        fresh = math.log(max(weight, 1e-30)) + now.growth * now.pass_index
        old = e.weight if e.served_tokens else -math.inf
        high, low = max(old, fresh), min(old, fresh)
        e.weight = high + math.log1p(math.exp(low - high))
    else:
        e.weight += weight
    e.served_tokens += tokens


def find_lowest(f: Any, rank: Rank, first: int, last: int, mark: int, layer: int) -> int:
    """Return who leaves first of layers `first` to `last`, the latter left out; -1 for nobody.

    Keys `pinned` with the mark may not leave; they are all of `layer`, or of one whose `unclear`
    the caller has set.
    """
    now = f.now[0]
    now.layer, now.turns = layer, f.layers[f.layers[first].cache].turns
    best, best_a, best_b = -1, 0.0, 0.0
    for index in range(first, last):
        home = f.layers[index]
        if home.unclear:
            look_up_lowest(f, rank, index, mark)
        elif now.moves and home.lowest >= 0:
            home.first, home.second = rank(f.experts[home.lowest], home, now)
        if home.lowest >= 0:
            a, b = home.first, home.second
            if best < 0 or a < best_a or (a == best_a and b < best_b):
                best, best_a, best_b = home.lowest, a, b
    return best


def look_up_lowest(f: Any, rank: Rank, index: int, mark: int) -> None:
    """Look up who of a layer leaves first."""
    now, home = f.now[0], f.layers[index]
    base = index * now.num_experts
    best, best_a, best_b = -1, 0.0, 0.0
    for i in range(home.held):
        key = f.experts[base + i].member
        e = f.experts[key]
        if e.pinned == mark:
            continue
        a, b = rank(e, home, now)
        if best < 0 or a < best_a or (a == best_a and (b < best_b or (b == best_b and key < best))):
            best, best_a, best_b = key, a, b
    home.lowest, home.first, home.second = best, best_a, best_b
    home.unclear = 0


A_LOAD, A_PREFETCH, AN_EVICTION, A_WISH, A_USE, A_LESSER_USE, A_NEXT_USE, A_TURN, A_PASS = range(9)
"""What a log tells, each with a key (or a layer, or a pass) and a value."""


def play(
    experts: Table, layers: Table, now: Table, rank: Rank, log: Any, pins: Any, layer: int
) -> int:
    """Take in a log [what, key, value, what ...] and return who leaves, none of `pins`, or -1."""
    f = Features(experts, layers, now)
    num_layers, num_experts = now[0].num_layers, now[0].num_experts
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
            note_use(f, key, layers[layers[home].cache].turns)
            experts[key].uses -= what == A_LESSER_USE
        elif what == A_NEXT_USE:
            experts[key].next_use = value
            layers[home].unclear = 1
        elif what == A_TURN:
            note_turn(f, key)
        elif what == A_PASS:
            note_pass(f, key)
    if layer < 0:
        return -1
    for i in range(len(pins)):
        experts[pins[i]].pinned = 1
        layers[pins[i] // num_experts].unclear = 1
    found = find_lowest(f, rank, 0, num_layers, 1, layer)
    for i in range(len(pins)):
        experts[pins[i]].pinned = 0
        layers[pins[i] // num_experts].unclear = 1
    return found

"""The per-expert features that eviction rules rank by, and the search for the victim.

Plain functions on tables of records, in the subset of Python that numba compiles: a replay has them
in its loop (`engine.core`), a live run calls `play` (`ranked.RankedEviction`). A table is a list of
objects, or a numpy array of records with the same fields, on which the same functions run compiled
(`records.jit`). The rule is an argument, so that all rules share the compiled code.

Order numbers count loads, uses and wishes (proposals of keys) as they happen: smaller is older. A
cache's turns are its events. A key is `layer * num_experts + expert`.
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
    """The features of one expert."""

    pinned: int = 0
    """Mark of the last search in which the expert was pinned."""
    last_use: int = 0
    """Order number of the last use or load, whichever is later."""
    uses: int = 0
    """Number of events that needed the expert, resident or not."""
    loaded: int = 0
    """Order number of the last load."""
    current: int = -2
    """The last pass in which it became current: by a load, a use, or its first wish there."""
    wanted: int = 0
    """Order number at which it last became current."""
    next_use: int = 0
    """Number of the next event that needs it (offline rules only)."""
    turn: int = 0
    """Its cache's turn at its last use or load."""
    served_tokens: int = 0
    """Number of tokens summed in `weight`."""
    weight: float = 0.0
    """Routing weights summed over these tokens; the sum's logarithm if there is a `growth`."""
    rate: float = 0.0
    """Share of its layer's recent tokens that needed it; only for rules that forecast, as are
    `foretold` and all of `Forecast`."""
    foretold: int = 0
    """Whether a prefetcher predicts that the layer's next turn needs it."""
    resident: int = 0
    ahead: int = 0
    """Its place among the wishes for the next pass, 0 for none."""
    place: int = 0
    """Its index among its layer's residents."""
    member: int = 0
    """Key of the layer's resident at this expert's index."""


@dataclass(slots=True)
class Layer:
    """The features of one layer. A cache's own fields are in the row of number `cache`."""

    index: int = 0
    held: int = 0
    """Number of residents."""
    cache: int = 0
    """Number of the layer's cache."""
    unclear: int = 1
    """Whether `lowest` is stale."""
    lowest: int = -1
    """Key of the layer's first victim, or -1 for none; `first` and `second` are its rank."""
    first: float = 0.0
    second: float = 0.0
    turns: int = 0
    """In the row of a cache, the number of events it has seen."""
    foretold: int = 0
    """Whether any expert is foretold for the layer's next turn."""
    oldest: int = -1
    """Key of LRU's victim."""
    balance: float = 0.0
    """In the row of a cache, duels won minus duels lost, with decay."""


@dataclass(slots=True)
class Forecast:
    """The inputs of a key's forecast, and its duel with LRU.

    Where forecast and LRU choose different victims, the two keys are in a duel: whoever chose the
    key that is needed first loses. A key has one duel at a time; if one event needs both keys, the
    duel is a draw.
    """

    fast: float = 0.0
    middle: float = 0.0
    slow: float = 0.0
    """Decayed use rates."""
    fresh_fast: float = 0.0
    fresh_middle: float = 0.0
    fresh_slow: float = 0.0
    """Contribution of the running event's tokens."""
    asked: int = 0
    """The cache's turn, counted from 1, that last needed it."""
    rival: int = -1
    """Key of its opponent in a duel, or -1."""
    unwanted: int = 0
    """Whether it, not its rival, was the forecast's victim."""


@dataclass(slots=True)
class Now:
    """State shared by all experts, and the rule's settings."""

    num_layers: int
    num_experts: int
    pass_index: int = -1
    """The pass in progress."""
    layer: int = -1
    """The layer being served, while a victim is sought."""
    turns: int = 0
    """Turns of the cache in which a victim is sought."""
    served: int = -1
    """The layer that the pass last served, -1 for none."""
    order: int = 1
    """The next order number."""
    wishes: int = 0
    """Number of residents wanted for the next pass."""
    ages: int = 0
    moves: int = 0
    growth: float = 0.0
    """Logarithm of a pass' weight relative to the pass before."""
    forecasts: int = 0
    nearness: float = 0.0
    """Turns that a whole cycle counts as."""
    keep: float = 0.0
    """Weight of a duel relative to the next one."""
    furthest: int = -1
    other: int = -1
    """Victims of forecast and LRU where they differ: a duel begins once one of them is evicted."""


Rank = Callable[[Expert, Layer, Now], tuple[float, float]]
"""(resident, its layer, now) -> rank, compared as a pair; the lowest leaves, ties go to the smaller
key.

Within one layer the order may change only through calls about its own residents, a new pass, and as
its class declares (`RankedEviction`: `ages`, `moves`).
"""


class Features(NamedTuple):
    """The tables of one cache, or of all of them."""

    experts: Table
    """Indexed by key."""
    layers: Table
    now: Table
    """A single record."""
    forecasts: Table
    """Indexed by key; a single record for rules without forecasts."""


def make_features(now: Now, per_layer: bool = False) -> Features:
    """Return the initial features of one cache, or of one cache per layer."""
    layers, num_keys = make_table(Layer, now.num_layers), now.num_layers * now.num_experts
    for index, layer in enumerate(layers):
        layer.index, layer.cache = index, index if per_layer else 0
    forecasts = make_table(Forecast, num_keys if now.forecasts else 1)
    return Features(make_table(Expert, num_keys), layers, [now], forecasts)


def note_pass(f: Any, index: int) -> None:
    """Begin a pass: the experts wanted for it become current, in the order of their wishes."""
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
    """Note that a key of layer `home` became resident."""
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
    if prefetched:
        e.foretold = layer.foretold = 1
    if prefetched and home <= now.served:
        now.wishes += 1
        e.ahead = now.wishes


def note_eviction(f: Any, key: int, home: int) -> None:
    """Note that a key of layer `home` was evicted."""
    now, layer, e = f.now[0], f.layers[home], f.experts[key]
    base = home * now.num_experts
    layer.held -= 1
    moved = f.experts[base + layer.held].member
    f.experts[base + e.place].member = moved
    f.experts[moved].place = e.place
    e.resident = 0
    e.ahead = 0
    e.foretold = 0
    layer.unclear = 1
    if now.furthest >= 0:
        begin_duel(f, key)


def note_wish(f: Any, key: int, home: int) -> None:
    """Note that a prefetcher wants a resident key of layer `home`."""
    now, e = f.now[0], f.experts[key]
    if e.current != now.pass_index:
        e.current = now.pass_index
        e.wanted = now.order
        now.order += 1
        f.layers[home].unclear = 1
    if now.forecasts:
        e.foretold = f.layers[home].foretold = f.layers[home].unclear = 1
    if home <= now.served:
        now.wishes += 1
        e.ahead = now.wishes


def note_use(f: Any, key: int, turns: int) -> None:
    """Note that an executed event needed a key; `note_turn` follows the event's last key.

    `turns` are those of the key's cache.
    """
    now, e = f.now[0], f.experts[key]
    e.uses += 1
    if e.resident:
        e.last_use = e.wanted = now.order
        now.order += 1
        e.current = now.pass_index
        e.turn = turns
    if now.forecasts:
        f.forecasts[key].asked = turns + 1


def note_turn(f: Any, layer: int, tokens: int) -> None:
    """End an event of a number of tokens."""
    now = f.now[0]
    if now.forecasts:
        forecast(f, layer, tokens)
    f.layers[f.layers[layer].cache].turns += 1
    now.served = layer
    f.layers[layer].unclear = 1
    if now.ages:
        for home in range(now.num_layers):
            f.layers[home].unclear = 1


def add_weight(f: Any, key: int, weight: float, tokens: int) -> None:
    """Add the weight that an event's tokens gave a key, before its `note_use`.

    With a `growth`, later weights grow instead of earlier ones decaying; in logarithms, because the
    factor outgrows a float.
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


FAST, MIDDLE, SLOW = 0.6, 0.9, 0.98
"""Decay per token: windows of about two, ten and fifty tokens."""
SLACK = 5.0
"""Net duels that a forecast may lose before LRU takes over: the first of a run say little."""


def note_served(f: Any, key: int, fast: float, middle: float, slow: float) -> None:
    """Add an event's tokens to a key's rates: the sum of each decay to the power of token age."""
    g = f.forecasts[key]
    g.fresh_fast += fast
    g.fresh_middle += middle
    g.fresh_slow += slow


def end_use(f: Any, key: int, home: int, tokens: int) -> None:
    """For forecasts: end the key's duel and, for a single token, add it to the key's rates.

    Called after the `note_use` of all keys of an event and before its `note_turn`.
    """
    if tokens == 1:
        note_served(f, key, 1.0, 1.0, 1.0)
    g = f.forecasts[key]
    if g.rival >= 0:
        other, cache = f.forecasts[g.rival], f.layers[f.layers[home].cache]
        g.rival = other.rival = -1
        if other.asked != g.asked:
            cache.balance = f.now[0].keep * cache.balance + (-1.0 if g.unwanted else 1.0)


def begin_duel(f: Any, key: int) -> None:
    """Begin the pending duel if `key`, which is being evicted, is one of its two victims."""
    now = f.now[0]
    first, second = f.forecasts[now.furthest], f.forecasts[now.other]
    if key in (now.furthest, now.other) and first.rival < 0 and second.rival < 0:
        first.rival, first.unwanted = now.other, 1
        second.rival, second.unwanted = now.furthest, 0
    now.furthest = -1


def forecast(f: Any, layer: int, tokens: int) -> None:
    """Update the rates of a layer by an event's tokens, one decay step per token."""
    fast, middle, slow = FAST, MIDDLE, SLOW
    for _ in range(tokens - 1):
        fast *= FAST
        middle *= MIDDLE
        slow *= SLOW
    base, f.layers[layer].foretold = layer * f.now[0].num_experts, 0
    for key in range(base, base + f.now[0].num_experts):
        e, g = f.experts[key], f.forecasts[key]
        g.fast = g.fast * fast + (1 - FAST) * g.fresh_fast
        g.middle = g.middle * middle + (1 - MIDDLE) * g.fresh_middle
        g.slow = g.slow * slow + (1 - SLOW) * g.fresh_slow
        g.fresh_fast = g.fresh_middle = g.fresh_slow = 0.0
        e.rate = (g.fast + g.middle + g.slow) / 3
        e.foretold = 0


def find_lowest(f: Any, rank: Rank, first: int, last: int, mark: int, layer: int) -> int:
    """Return the victim's key among layers `first` to `last` - 1, or -1 for none.

    Keys whose `pinned` equals `mark` are excluded; they must all be of `layer`, or of layers whose
    `unclear` the caller has set.
    """
    now = f.now[0]
    now.layer, now.turns = layer, f.layers[f.layers[first].cache].turns
    best, best_a, best_b, oldest = -1, 0.0, 0.0, -1
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
            if now.forecasts:
                used = f.experts[home.oldest].last_use
                if oldest < 0 or used < f.experts[oldest].last_use:
                    oldest = home.oldest
    now.furthest = -1
    if now.forecasts and best != oldest:
        now.furthest, now.other = best, oldest
        if f.layers[f.layers[first].cache].balance < -SLACK:
            return oldest
    return best


def look_up_lowest(f: Any, rank: Rank, index: int, mark: int) -> None:
    """Recompute a layer's first victim, `lowest`, and LRU's, `oldest`."""
    now, home = f.now[0], f.layers[index]
    base = index * now.num_experts
    best, best_a, best_b, oldest = -1, 0.0, 0.0, -1
    for i in range(home.held):
        key = f.experts[base + i].member
        e = f.experts[key]
        if e.pinned == mark:
            continue
        if now.forecasts and (oldest < 0 or e.last_use < f.experts[oldest].last_use):
            oldest = key
        a, b = rank(e, home, now)
        if best < 0 or a < best_a or (a == best_a and (b < best_b or (b == best_b and key < best))):
            best, best_a, best_b = key, a, b
    home.lowest, home.first, home.second, home.oldest = best, best_a, best_b, oldest
    home.unclear = 0


A_LOAD, A_PREFETCH, AN_EVICTION, A_WISH, A_USE, A_LESSER_USE, A_NEXT_USE, A_TURN, A_PASS = range(9)
"""Kinds of log entries; each entry has a key (or a layer, or a pass) and a value."""


def play(
    experts: Table,
    layers: Table,
    now: Table,
    forecasts: Table,
    rank: Rank,
    log: Any,
    pins: Any,
    layer: int,
) -> int:
    """Process a log [kind, key, value, kind ...]; return the victim outside `pins`, or -1.

    No victim is sought where `layer` is negative.
    """
    f = Features(experts, layers, now, forecasts)
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
            j = i - 3
            while now[0].forecasts and j >= 0 and log[j] in (A_USE, A_LESSER_USE):
                j -= 3
            for k in range(j + 3, i, 3):
                end_use(f, log[k + 1], key, value)
            note_turn(f, key, value)
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

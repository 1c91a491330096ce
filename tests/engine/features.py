"""The features that evictions rank by, told slowly on lists of objects, to judge the kernel by."""

# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lm_eval_moecache.algorithms.ranked import RankedEviction
from lm_eval_moecache.records.event import Event

Table = Any


def make_table(kind: Any, count: int) -> list[Any]:
    return [kind() for _ in range(count)]


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
    """The last pass in which it became current: by a load, a use, or its first hint there."""
    current_since: int = 0
    """Order number at which it last became current."""
    next_use: int = 0
    """Number of the next event that needs it (offline rules only)."""
    turn: int = 0
    """Its cache's turn at its last use or load."""
    accessed: int = 0
    """Its cache's accesses as of its last use or load."""
    hits: int = 0
    """Number of uses since its load, without the one that it was loaded for."""
    demanded: int = -2
    """The pass in which a demand last loaded it, until it is used."""
    cold_fill_rank: int = 0
    """Its place, from 1, among the loads before its cache's first eviction; 0 if loaded later."""
    served_tokens: int = 0
    """Number of tokens summed in `weight`."""
    weight: float = 0.0
    """Routing weights summed over these tokens; the sum's logarithm if there is a `growth`."""
    rate: float = 0.0
    """Share of its layer's recent tokens that needed it; only for rules that forecast, as are
    `predicted` and all of `Forecast`."""
    predicted: int = 0
    """Whether a prefetcher predicts that the layer's next turn needs it."""
    resident: int = 0
    fresh_weight: float = 0.0
    fresh_tokens: int = 0
    """What the running event's tokens add to `weight` and `served_tokens`."""
    ran_below_best_precision: int = 0
    """Whether the running event executed it below the best precision level."""
    hint_place: int = 0
    """Its place among the hints for the next pass, 0 for none."""
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
    stale: int = 1
    """Whether `lowest` is stale."""
    lowest: int = -1
    """Key of the layer's first victim, or -1 for none; `first` and `second` are its rank."""
    first: float = 0.0
    second: float = 0.0
    turns: int = 0
    """In the row of a cache, the number of events it has seen."""
    accesses: int = 0
    """In the row of a cache, the number of keys that these events needed."""
    cold_fills: int = 0
    has_evicted: int = 0
    """In the row of a cache, its loads before the first eviction, and whether that has been; an
    emptied cache starts anew."""
    slots: int = 0
    """Experts of the mean size that its cache has room for."""
    predicted: int = 0
    """Whether any expert is predicted for the layer's next turn."""
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
    """This and the next two are those of the cache in which a victim is sought."""
    accesses: int = 0
    cold_fills: int = 0
    served: int = -1
    """The layer that the pass last served, -1 for none."""
    order: int = 1
    """The next order number."""
    num_hints: int = 0
    """Number of residents that a prefetcher proposed for the next pass."""
    ages: int = 0
    moves: int = 0
    growth: float = 0.0
    """Logarithm of a pass' weight relative to the pass before."""
    forecasts: int = 0
    weighs: int = 0
    offline: int = 0
    only_best: int = 0
    """Whether uses below the best precision level do not count."""
    by_token: int = 0
    """Whether recency is that of the last token to need an expert, and not of the first."""
    parameter: float = 0.0
    """The rule's own."""
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


def make_features(now: Now, slots: Sequence[int]) -> Features:
    """Return the initial features of one cache, or of one per layer, with so many slots each."""
    layers, num_keys = make_table(Layer, now.num_layers), now.num_layers * now.num_experts
    for index, layer in enumerate(layers):
        layer.index, layer.cache = index, index if len(slots) > 1 else 0
        layer.slots = slots[layer.cache]
    forecasts = make_table(Forecast, num_keys if now.forecasts else 1)
    return Features(make_table(Expert, num_keys), layers, [now], forecasts)


def note_pass(tables: Any, index: int) -> None:
    """Begin a pass: the experts proposed for it become current, in the order of the hints."""
    now = tables.now[0]
    for home in range(now.num_layers):
        tables.layers[home].stale = 1
        if now.num_hints:
            for i in range(tables.layers[home].held):
                expert = tables.experts[tables.experts[home * now.num_experts + i].member]
                if expert.hint_place:
                    expert.current_since = now.order + expert.hint_place
                    expert.current = index
                    expert.hint_place = 0
    if now.num_hints:
        now.order += now.num_hints + 1
        now.num_hints = 0
    now.pass_index = index
    now.served = -1


def note_load(tables: Any, key: int, home: int, prefetched: bool) -> None:
    """Note that a key of layer `home` became resident."""
    now, layer, expert = tables.now[0], tables.layers[home], tables.experts[key]
    cache = tables.layers[layer.cache]
    expert.last_use = expert.loaded = expert.current_since = now.order
    now.order += 1
    expert.current = now.pass_index
    expert.turn, expert.accessed, expert.hits = cache.turns, cache.accesses, 0
    cache.cold_fills += 1 - cache.has_evicted
    expert.cold_fill_rank = 0 if cache.has_evicted else cache.cold_fills
    tables.experts[home * now.num_experts + layer.held].member = key
    expert.place = layer.held
    layer.held += 1
    expert.resident = 1
    layer.stale = 1
    if prefetched:
        expert.predicted = layer.predicted = 1
    else:
        expert.demanded = now.pass_index
    if prefetched and home <= now.served:
        now.num_hints += 1
        expert.hint_place = now.num_hints


def note_eviction(tables: Any, key: int, home: int) -> None:
    """Note that a key of layer `home` was evicted."""
    now, layer, expert = tables.now[0], tables.layers[home], tables.experts[key]
    base = home * now.num_experts
    layer.held -= 1
    moved = tables.experts[base + layer.held].member
    tables.experts[base + expert.place].member = moved
    tables.experts[moved].place = expert.place
    expert.resident = 0
    expert.hint_place = 0
    expert.predicted = 0
    layer.stale = 1
    cache = tables.layers[layer.cache]
    cache.has_evicted = 1
    if not layer.held:
        held = 0
        for index in range(now.num_layers):
            if tables.layers[index].cache == layer.cache:
                held += tables.layers[index].held
        if not held:  # emptied, as by a reset: it fills anew
            cache.cold_fills = cache.has_evicted = 0
    if now.furthest >= 0:
        begin_duel(tables, key)


def note_hint(tables: Any, key: int, home: int) -> None:
    """Note that a prefetcher wants a resident key of layer `home`."""
    now, expert = tables.now[0], tables.experts[key]
    if expert.current != now.pass_index:
        expert.current = now.pass_index
        expert.current_since = now.order
        now.order += 1
        tables.layers[home].stale = 1
    if now.forecasts:
        expert.predicted = tables.layers[home].predicted = tables.layers[home].stale = 1
    if home <= now.served:
        now.num_hints += 1
        expert.hint_place = now.num_hints


class Chosen(NamedTuple):
    """What an event consists of."""

    keys: Any
    next_use: Any
    """By place in `keys`: number of the next event that needs the key."""
    experts: Any
    """Dropped ones are negative."""
    weights: Any


def note_event(
    tables: Any, layer: int, tokens: int, chosen: Any, start: int, stop: int, first: int, last: int
) -> None:
    """Note an executed event of a number of tokens, which needed the keys from `start` to `stop`.

    Its tokens chose the experts from `first` to `last` of what is `chosen`.
    """
    now, cache = tables.now[0], tables.layers[tables.layers[layer].cache]
    base, keys, experts = layer * now.num_experts, chosen.keys, chosen.experts
    if now.weighs:
        for place in range(start, stop):
            expert = tables.experts[keys[place]]
            expert.fresh_weight, expert.fresh_tokens = 0.0, 0
        for entry in range(first, last):
            if experts[entry] >= 0:
                expert = tables.experts[base + experts[entry]]
                expert.fresh_weight += chosen.weights[entry]
                expert.fresh_tokens += 1
        for place in range(start, stop):
            expert = tables.experts[keys[place]]
            add_weight(tables, keys[place], expert.fresh_weight, expert.fresh_tokens)
    rows, turns = tables.experts, cache.turns
    for place in range(start, stop):
        expert = rows[keys[place]]
        expert.uses += 1 - expert.ran_below_best_precision if now.only_best else 1
        cache.accesses += 1
        expert.accessed = cache.accesses
        expert.hits += expert.demanded != now.pass_index
        expert.demanded = -2
        if expert.resident:
            expert.last_use = expert.current_since = now.order
            now.order += 1
            expert.current = now.pass_index
            expert.turn = turns
        if now.offline:
            expert.next_use = chosen.next_use[place]
    if now.by_token and tokens > 1:
        for entry in range(first, last):
            if experts[entry] >= 0:
                tables.experts[base + experts[entry]].last_use = now.order
                now.order += 1
    if now.forecasts:
        for place in range(start, stop):
            tables.forecasts[keys[place]].asked = turns + 1
        for place in range(start, stop):
            end_use(tables, keys[place], layer, tokens)
        if tokens > 1:
            add_served(tables, base, tokens, experts, first, last)
    note_turn(tables, layer, tokens)


def add_served(tables: Any, base: int, tokens: int, experts: Any, first: int, last: int) -> None:
    """Add an event's tokens to the forecasts, discounted by age (the last token counts 1)."""
    fast = middle = slow = 1.0
    top_k = (last - first) // tokens
    for row in range(tokens - 1, -1, -1):
        for entry in range(first + row * top_k, first + (row + 1) * top_k):
            if experts[entry] >= 0:
                note_served(tables, base + experts[entry], fast, middle, slow)
        fast *= FAST
        middle *= MIDDLE
        slow *= SLOW


def note_turn(tables: Any, layer: int, tokens: int) -> None:
    """End an event of a number of tokens."""
    now = tables.now[0]
    if now.forecasts:
        forecast(tables, layer, tokens)
    tables.layers[tables.layers[layer].cache].turns += 1
    now.served = layer
    tables.layers[layer].stale = 1
    if now.ages:
        for home in range(now.num_layers):
            tables.layers[home].stale = 1


def add_weight(tables: Any, key: int, weight: float, tokens: int) -> None:
    """Add the weight that an event's tokens gave a key, before its use is noted.

    With a `growth`, later weights grow instead of earlier ones decaying; in logarithms, because the
    factor outgrows a float.
    """
    now, expert = tables.now[0], tables.experts[key]
    if now.growth:
        fresh = math.log(max(weight, 1e-30)) + now.growth * now.pass_index
        old = expert.weight if expert.served_tokens else -math.inf
        high, low = max(old, fresh), min(old, fresh)
        expert.weight = high + math.log1p(math.exp(low - high))
    else:
        expert.weight += weight
    expert.served_tokens += tokens


FAST, MIDDLE, SLOW = 0.6, 0.9, 0.98
"""Decay per token: windows of about two, ten and fifty tokens."""
SLACK = 5.0
"""Net duels that a forecast may lose before LRU takes over: the first of a run say little."""


def note_served(tables: Any, key: int, fast: float, middle: float, slow: float) -> None:
    """Add an event's tokens to a key's rates: the sum of each decay to the power of token age."""
    own = tables.forecasts[key]
    own.fresh_fast += fast
    own.fresh_middle += middle
    own.fresh_slow += slow


def end_use(tables: Any, key: int, home: int, tokens: int) -> None:
    """For forecasts: end the key's duel and, for a single token, add it to the key's rates.

    Called once all uses of an event are noted and before its `note_turn`.
    """
    if tokens == 1:
        note_served(tables, key, 1.0, 1.0, 1.0)
    own = tables.forecasts[key]
    if own.rival >= 0:
        other, cache = tables.forecasts[own.rival], tables.layers[tables.layers[home].cache]
        own.rival = other.rival = -1
        if other.asked != own.asked:
            cache.balance = tables.now[0].keep * cache.balance + (-1.0 if own.unwanted else 1.0)


def begin_duel(tables: Any, key: int) -> None:
    """Begin the pending duel if `key`, which is being evicted, is one of its two victims."""
    now = tables.now[0]
    first, second = tables.forecasts[now.furthest], tables.forecasts[now.other]
    if key in (now.furthest, now.other) and first.rival < 0 and second.rival < 0:
        first.rival, first.unwanted = now.other, 1
        second.rival, second.unwanted = now.furthest, 0
    now.furthest = -1


def forecast(tables: Any, layer: int, tokens: int) -> None:
    """Update the rates of a layer by an event's tokens, one decay step per token."""
    fast, middle, slow = FAST, MIDDLE, SLOW
    for _ in range(tokens - 1):
        fast *= FAST
        middle *= MIDDLE
        slow *= SLOW
    base, tables.layers[layer].predicted = layer * tables.now[0].num_experts, 0
    for key in range(base, base + tables.now[0].num_experts):
        expert, own = tables.experts[key], tables.forecasts[key]
        own.fast = own.fast * fast + (1 - FAST) * own.fresh_fast
        own.middle = own.middle * middle + (1 - MIDDLE) * own.fresh_middle
        own.slow = own.slow * slow + (1 - SLOW) * own.fresh_slow
        own.fresh_fast = own.fresh_middle = own.fresh_slow = 0.0
        expert.rate = (own.fast + own.middle + own.slow) / 3
        expert.predicted = 0


def find_lowest(tables: Any, rank: Rank, first: int, last: int, mark: int, layer: int) -> int:
    """Return the victim's key among layers `first` to `last` - 1, or -1 for none.

    Keys whose `pinned` equals `mark` are excluded; they must all be of `layer`, or of layers whose
    `stale` the caller has set.
    """
    now, cache = tables.now[0], tables.layers[tables.layers[first].cache]
    now.layer, now.turns = layer, cache.turns
    now.accesses, now.cold_fills = cache.accesses, cache.cold_fills
    best, best_a, best_b, oldest = -1, 0.0, 0.0, -1
    for index in range(first, last):
        home = tables.layers[index]
        if home.stale:
            look_up_lowest(tables, rank, index, mark)
        elif now.moves and home.lowest >= 0:
            home.first, home.second = rank(tables.experts[home.lowest], home, now)
        if home.lowest >= 0:
            a, b = home.first, home.second
            if best < 0 or a < best_a or (a == best_a and b < best_b):
                best, best_a, best_b = home.lowest, a, b
            if now.forecasts:
                used = tables.experts[home.oldest].last_use
                if oldest < 0 or used < tables.experts[oldest].last_use:
                    oldest = home.oldest
    now.furthest = -1
    if now.forecasts and best != oldest:
        now.furthest, now.other = best, oldest
        if cache.balance < -SLACK:
            return oldest
    return best


def look_up_lowest(tables: Any, rank: Rank, index: int, mark: int) -> None:
    """Recompute a layer's first victim, `lowest`, and LRU's, `oldest`."""
    now, home, experts = tables.now[0], tables.layers[index], tables.experts
    base, forecasts = index * now.num_experts, now.forecasts
    best, best_a, best_b, oldest = -1, 0.0, 0.0, -1
    for i in range(home.held):
        key = experts[base + i].member
        expert = experts[key]
        if expert.pinned == mark:
            continue
        if forecasts and (oldest < 0 or expert.last_use < experts[oldest].last_use):
            oldest = key
        a, b = rank(expert, home, now)
        if best < 0 or a < best_a or (a == best_a and (b < best_b or (b == best_b and key < best))):
            best, best_a, best_b = key, a, b
    home.lowest, home.first, home.second, home.oldest = best, best_a, best_b, oldest
    home.stale = 0


class RankedAlone:
    """A ranked eviction by itself, called as one with a state of its own is."""

    def __init__(self, rule: RankedEviction) -> None:
        self.rule, self.geometry = rule, rule.geometry
        self._searches, self._future = 0, None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rule, name)

    @property
    def features(self) -> Features:
        if "_features" not in vars(self):
            rule, g = self.rule, self.geometry
            flags = ("ages", "moves", "forecasts", "only_best", "by_token")
            now = Now(
                g.num_layers, g.num_experts, **{name: int(getattr(rule, name)) for name in flags}
            )
            now.growth, now.parameter, now.keep = rule.growth, rule.parameter, rule.keep
            now.weighs, now.offline = int(rule.uses_weights), int(rule.is_offline)
            self._features = make_features(now, [self.num_slots])
            if self._future is not None and rule.is_offline:
                for key, first in enumerate(self._future.first_use.tolist()):
                    self._features.experts[key].next_use = first
        return self._features

    def prepare(self, future: Any) -> None:
        self._future = future

    def on_pass(self, index: int) -> None:
        self._pass = index
        note_pass(self.features, index)

    def on_insert(self, key: int, prefetched: bool) -> None:
        note_load(self.features, key, key // self.geometry.num_experts, prefetched)

    def on_event(self, event: Event, levels: Any = None) -> None:
        keys, rows = event.keys, (event.experts.ravel().tolist(), event.weights.ravel().tolist())
        for key in keys:
            low = int((levels or {}).get(key, 0) > 0)
            self.features.experts[key].ran_below_best_precision = low
        needs = self._next_uses(event.layer, keys)
        sizes = 0, len(keys), 0, len(rows[0])
        chosen = Chosen(keys, needs, *rows)
        note_event(self.features, event.layer, len(event.experts), chosen, *sizes)

    def on_executed(self, layer: int, keys: Sequence[int]) -> None:
        for key, need in zip(keys, self._next_uses(layer, keys), strict=bool(self.rule.is_offline)):
            self.features.experts[key].next_use = need

    def _next_uses(self, layer: int, keys: Sequence[int]) -> list[int]:
        if not self.rule.is_offline:
            return []
        after = self._pass * self.geometry.num_layers + layer + 1
        return [self._future.rank_from(key, after) for key in keys]

    def on_predicted(self, key: int) -> None:
        note_hint(self.features, key, key // self.geometry.num_experts)

    def on_evict(self, key: int) -> None:
        note_eviction(self.features, key, key // self.geometry.num_experts)

    def on_miss(self, key: int) -> None:
        return

    def victim(self, pinned: Container[int], layer: int) -> int | None:
        if not isinstance(pinned, Iterable):
            every = range(self.geometry.num_layers * self.geometry.num_experts)
            pinned = [key for key in every if key in pinned]
        tables, num_layers = self.features, self.geometry.num_layers
        self._searches += 1
        for key in pinned:
            tables.experts[key].pinned = self._searches
        for home in tables.layers:
            home.stale = 1
        rank = self.rule.plain_rank
        found = find_lowest(tables, rank, 0, num_layers, self._searches, layer)
        return None if found < 0 else found


def as_stateful(rule: Any) -> Any:
    """Return an eviction that hears of all that the cache does, whatever its kind."""
    return RankedAlone(rule) if isinstance(rule, RankedEviction) else rule

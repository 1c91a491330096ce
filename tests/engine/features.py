"""The features that evictions rank by, found slowly and plainly, to judge the kernel by."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import count
from typing import Any

from lm_eval_moecache.algorithms.eviction.base import RankedEviction
from lm_eval_moecache.algorithms.features import Expert, Layer, Now
from lm_eval_moecache.records.event import Event

DECAYS = (0.6, 0.9, 0.98)
"""Per token: a forecast is of about the last two, ten and fifty tokens."""


class RankedAlone:
    """A ranked eviction of one cache, called as one with a state of its own is.

    Every resident is ranked for every victim, and duels are pairs in a list.
    """

    capacity_bytes = num_slots = 0
    """The cache says these before the first call."""

    def __init__(self, rule: RankedEviction) -> None:
        self.rule, g = rule, rule.geometry
        self.experts = [Expert() for _ in range(g.num_layers * g.num_experts)]
        self.layers = [Layer(index) for index in range(g.num_layers)]
        self.now = Now(g.num_layers, g.num_experts, parameter=rule.parameter)
        self.rates = [[0.0] * len(DECAYS) for _ in self.experts]
        self.orders, self.hints, self.has_evicted = count(1), list[int](), False
        self.duels, self.balance = list[tuple[int, int]](), 0.0
        """The victim by the forecast and that by LRU, until one of them is needed."""
        self.offer: tuple[int, int] | None = None
        self.future: Any = None

    def home(self, key: int) -> Layer:
        return self.layers[key // self.now.num_experts]

    def prepare(self, future: Any) -> None:
        if self.rule.is_offline:
            self.future = future
            for expert, first in zip(self.experts, future.first_use.tolist(), strict=True):
                expert.next_use = first

    def on_pass(self, index: int) -> None:
        """What was hinted at after its layer's turn is current in this pass, in that order."""
        self.now.pass_index, self.now.served = index, -1
        for key in self.hints:
            self.experts[key].current, self.experts[key].current_since = index, next(self.orders)
        self.hints = []

    def on_insert(self, key: int, prefetched: bool) -> None:
        expert, now = self.experts[key], self.now
        expert.last_use = expert.loaded = expert.current_since = next(self.orders)
        expert.current, expert.turn, expert.accessed = now.pass_index, now.turns, now.accesses
        expert.hits, expert.resident, expert.cold_fill_rank = 0, 1, 0
        self.home(key).held += 1
        if not self.has_evicted:
            now.cold_fills += 1
            expert.cold_fill_rank = now.cold_fills
        if prefetched:
            self.predict(key)
        else:
            expert.demanded = now.pass_index

    def on_predicted(self, key: int) -> None:
        expert = self.experts[key]
        if expert.current != self.now.pass_index:
            expert.current, expert.current_since = self.now.pass_index, next(self.orders)
        self.predict(key)

    def predict(self, key: int) -> None:
        self.experts[key].predicted = self.home(key).predicted = 1
        if self.home(key).index <= self.now.served:
            self.hints.append(key)

    def on_miss(self, key: int) -> None:
        return

    def on_executed(self, layer: int, keys: Sequence[int]) -> None:
        after = self.now.pass_index * self.now.num_layers + layer + 1
        for key in keys if self.future is not None else ():
            self.experts[key].next_use = self.future.rank_from(key, after)

    def on_event(self, event: Event) -> None:
        self.on_levels(event, {})

    def on_levels(self, event: Event, levels: Mapping[int, int]) -> None:
        """Note the use of an event's keys, each executed at a level of precision."""
        now, rule, base = self.now, self.rule, event.layer * self.now.num_experts
        rows = [[base + e for e in row if e >= 0] for row in event.experts.tolist()]
        entries = [base + e if e >= 0 else -1 for e in event.experts.ravel().tolist()]
        for key in event.keys:
            expert = self.experts[key]
            if rule.uses_weights:
                pairs = zip(entries, event.weights.ravel().tolist(), strict=True)
                self.weigh(expert, [weight for other, weight in pairs if other == key])
            expert.uses += not (rule.only_best and levels.get(key, 0) > 0)
            now.accesses += 1
            expert.accessed = now.accesses
            # The first use in the pass of a demanded load is what it was loaded for.
            expert.hits += expert.demanded != now.pass_index
            expert.demanded = -2
            if expert.resident:
                expert.last_use = expert.current_since = next(self.orders)
                expert.current, expert.turn = now.pass_index, now.turns
        self.on_executed(event.layer, event.keys)
        if rule.by_token and len(rows) > 1:
            for key in (key for row in rows for key in row):
                self.experts[key].last_use = next(self.orders)
        if rule.forecasts:
            self.forecast(event.layer, event.keys, rows)
        now.turns += 1
        now.served = event.layer

    def weigh(self, expert: Expert, weights: Sequence[float]) -> None:
        """Add weights; with a `growth` later ones grow, in logarithms, as they outgrow a float."""
        if self.rule.growth:
            old = expert.weight if expert.served_tokens else -math.inf
            fresh = math.log(max(sum(weights), 1e-30)) + self.rule.growth * self.now.pass_index
            high, low = max(old, fresh), min(old, fresh)
            expert.weight = high + math.log1p(math.exp(low - high))
        else:
            expert.weight += sum(weights)
        expert.served_tokens += len(weights)

    def forecast(self, layer: int, keys: Collection[int], rows: Sequence[Sequence[int]]) -> None:
        """Settle the duels of an event's keys, and let its tokens change its layer's rates."""
        for key in keys:
            for duel in [duel for duel in self.duels if key in duel]:
                self.duels.remove(duel)
                if not {*duel} <= {*keys}:  # else it is a draw
                    lost = key == duel[0]
                    self.balance = self.rule.keep * self.balance + (-1.0 if lost else 1.0)
        num_experts = self.now.num_experts
        for key in range(layer * num_experts, (layer + 1) * num_experts):
            for place, decay in enumerate(DECAYS):
                power, fresh = 1.0, 0.0
                for row in reversed(rows):
                    fresh += power * (key in row)
                    power *= decay
                self.rates[key][place] = self.rates[key][place] * power + (1 - decay) * fresh
            self.experts[key].rate = sum(self.rates[key]) / len(DECAYS)
            self.experts[key].predicted = 0
        self.layers[layer].predicted = 0

    def on_evict(self, key: int) -> None:
        self.experts[key].resident = self.experts[key].predicted = 0
        self.home(key).held -= 1
        self.hints = [hinted for hinted in self.hints if hinted != key]
        self.has_evicted = any(layer.held for layer in self.layers)
        if not self.has_evicted:  # emptied: it fills anew
            self.now.cold_fills = 0
        if self.offer and key in self.offer and not any({*self.offer} & {*d} for d in self.duels):
            self.duels.append(self.offer)
        self.offer = None

    def victim(self, pinned: Collection[int], layer: int) -> int | None:
        self.now.layer = layer
        free = [k for k, expert in enumerate(self.experts) if expert.resident and k not in pinned]
        if not free:
            return None

        def rank(key: int) -> tuple[float, float]:
            return self.rule.plain_rank(self.experts[key], self.home(key), self.now)

        for home in self.layers:
            home.slots = self.num_slots
        lowest = min(free, key=rank)
        oldest = min(free, key=lambda key: self.experts[key].last_use)
        is_bet = self.rule.forecasts and lowest != oldest
        self.offer = (lowest, oldest) if is_bet else None
        return oldest if is_bet and self.balance < -5 else lowest


def as_stateful(rule: Any) -> Any:
    """Return an eviction that hears of all that the cache does, whatever its kind."""
    return RankedAlone(rule) if isinstance(rule, RankedEviction) else rule

"""`hazard` in numpy, event by event, with its duels in a class: the oracle of the compiled one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Sequence
from typing import ClassVar

import numpy as np

from lm_eval_moecache.algorithms.eviction.base import EvictionAlgorithm
from lm_eval_moecache.records.event import DROPPED, Event
from lm_eval_moecache.records.geometry import Geometry

_DECAYS = np.array([[0.6], [0.9], [0.98]])
"""Per turn of an expert's own layer: what the last two, ten and fifty tokens needed."""
_PRIOR = 0.02
"""Hazard of an expert that was never needed: no wait is forecast beyond fifty turns."""


class VictimComparator:
    """Which of two rules names better victims: where they differ, the one needed first was wrong.

    One duel per key at a time; one that both keys leave in the same event is a draw. O(1) a call.
    """

    def __init__(self, memory: int, slack: int = 5) -> None:
        self._keep = 1 - 1 / memory
        self._slack = slack
        self._balance = 0.0
        self._rival: dict[int, int] = {}
        self._bets: set[int] = set()
        """Keys that the first rule would have let go."""
        self._offer: tuple[int, int] | None = None

    @property
    def lost(self) -> bool:
        """Whether the first rule has lost more than it won, the latest duels counting most.

        By more than a few: the first duels of a run say little.
        """
        return self._balance < -self._slack

    def offer(self, first: int, second: int) -> None:
        """Note whom each rule would let go now; nothing is decided by it."""
        self._offer = None if first == second else (first, second)

    def begin(self, evicted: int) -> None:
        """Let the last offer become a duel, if its victim is the one that was evicted."""
        offer, self._offer = self._offer, None
        if offer is None or evicted not in offer:
            return
        first, second = offer
        if first not in self._rival and second not in self._rival:
            self._rival[first], self._rival[second] = second, first
            self._bets.add(first)

    def settle(self, needed: Sequence[int]) -> None:
        """End the duels of the keys that an event needs."""
        for key in needed:
            rival = self._rival.pop(key, None)
            if rival is None:
                continue
            del self._rival[rival]
            right = key not in self._bets
            self._bets -= {key, rival}
            if rival not in needed:
                self._balance = self._keep * self._balance + (1 if right else -1)


class SlowHazard(EvictionAlgorithm):
    """As `algorithms.eviction.hazard` has it, key by key from dicts, sets and rows."""

    source: ClassVar[str] = "ours; the decayed rates after ds4#636, the bound in moe-cache-eval"

    def __init__(
        self, geometry: Geometry, *, seed: int = 0, nearness: float = 2.0, memory: int = 200
    ) -> None:
        super().__init__(geometry, seed=seed)
        if nearness < 0:
            raise ValueError(f"eviction.nearness={nearness} must be 0 or more.")
        if memory < 1:
            raise ValueError(f"eviction.memory={memory} must be 1 or more.")
        layers, experts = geometry.num_layers, geometry.num_experts
        self._nearness = nearness
        self._rates = np.zeros((layers, 3, experts))
        self._wait = np.full((layers, experts), 1 / _PRIOR)
        self._near = np.full((layers, experts), -np.inf)
        """The wait of what is resident, -inf for the others."""
        self._longest = np.full(layers, -np.inf)
        self._choice = np.zeros(layers, dtype=np.int64)
        self._stale: set[int] = set()
        """Layers whose longest wait has to be looked up again."""
        self._foretold: set[int] = set()
        """Layers with predictions for their coming turn."""
        turns = (np.arange(layers)[None, :] - np.arange(layers)[:, None] - 1) % layers + 1
        self._ahead = nearness * turns / layers
        self._order: OrderedDict[int, None] = OrderedDict()
        self._duels = VictimComparator(memory)

    def on_insert(self, key: int, prefetched: bool) -> None:
        layer, expert = divmod(key, self.geometry.num_experts)
        self._order[key] = None
        self._near[layer, expert] = self._wait[layer, expert]
        self._stale.add(layer)
        if prefetched:
            self.on_predicted(key)

    def on_predicted(self, key: int) -> None:
        layer, expert = divmod(key, self.geometry.num_experts)
        if layer not in self._foretold:
            self._foretold.add(layer)
            self._wait[layer] += 1
            self._near[layer] += 1
        self._near[layer, expert] = 0.0
        self._stale.add(layer)

    def on_event(self, event: Event) -> None:
        layer, order = event.layer, self._order
        for key in event.keys:
            if key in order:
                order.move_to_end(key)
        self._duels.settle(event.keys)
        self._count(event)
        wait, near = self._wait[layer], self._near[layer]
        np.divide(1, self._rates[layer].mean(axis=0) + _PRIOR, out=wait)
        np.copyto(near, wait, where=near > -np.inf)
        self._stale.add(layer)
        self._foretold.discard(layer)

    def on_evict(self, key: int) -> None:
        layer, expert = divmod(key, self.geometry.num_experts)
        del self._order[key]
        self._near[layer, expert] = -np.inf
        self._stale.add(layer)
        self._duels.begin(key)

    def victim(self, pinned: Container[int], layer: int) -> int | None:
        oldest = next((key for key in self._order if key not in pinned), None)
        if oldest is None:
            return None
        furthest = self._furthest(pinned, layer)
        self._duels.offer(furthest, oldest)
        return oldest if self._duels.lost else furthest

    def _furthest(self, pinned: Container[int], layer: int) -> int:
        unknown, self._stale = self._stale, set()
        for place in unknown:
            self._look_up(place, pinned)
        waits = self._longest + self._ahead[layer]
        while True:
            place = int(waits.argmax())
            key = place * self.geometry.num_experts + int(self._choice[place])
            if key not in pinned:
                return key
            self._look_up(place, pinned)
            waits[place] = self._longest[place] + self._ahead[layer, place]

    def _look_up(self, layer: int, pinned: Container[int]) -> None:
        """Find a layer's longest wait among what may be evicted."""
        row = self._near[layer]
        base = layer * self.geometry.num_experts
        expert = int(row.argmax())
        if base + expert in pinned:
            row = row.copy()
            while row[expert] > -np.inf and base + expert in pinned:
                row[expert] = -np.inf
                expert = int(row.argmax())
            # Known for these pinned keys only.
            self._stale.add(layer)
        self._longest[layer], self._choice[layer] = row[expert], expert

    def _count(self, event: Event) -> None:
        rates, decays = self._rates[event.layer], _DECAYS
        num_experts = self.geometry.num_experts
        if not len(event.experts) or event.num_tokens == 1:
            rates *= decays
            rates[:, [key % num_experts for key in event.keys]] += 1 - decays
            return
        live = event.experts != DROPPED
        ages = np.repeat(np.arange(event.num_tokens)[::-1, None], live.shape[1], axis=1)[live]
        for row, decay in zip(rates, decays[:, 0], strict=True):
            row *= decay**event.num_tokens
            row += (1 - decay) * np.bincount(event.experts[live], decay**ages, num_experts)

"""Hazard against its slow form, and against LRU, its fallback where the forecast fails."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any, ClassVar

import numpy as np
import pytest

from lm_eval_moecache.algorithms.eviction.base import StatefulEviction
from lm_eval_moecache.engine.replay import replay
from lm_eval_moecache.records.event import DROPPED, Event
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.trace.future import Future
from lm_eval_moecache.trace.trace import Trace
from tests.engine.traces import decode_trace, draw_trace, figures, misses, setting_for

DECAYS = (0.6, 0.9, 0.98)
"""Per turn of an expert's own layer: averages over about the last two, ten and fifty tokens."""
PRIOR = 0.02
"""Hazard of an expert that was never needed: no wait is forecast beyond fifty turns."""


class SlowHazard(StatefulEviction):
    """Recomputes everything for each victim; a duel bets one key against another."""

    source: ClassVar[str] = "eviction=hazard, slowly"

    def __init__(
        self, geometry: Geometry, *, seed: int = 0, nearness: float = 2.0, memory: int = 200
    ) -> None:
        super().__init__(geometry, seed=seed)
        self.nearness, self.keep = nearness, 1 - 1 / memory
        self.rates = {key: [0.0] * 3 for key in range(geometry.num_layers * geometry.num_experts)}
        self.residents: list[int] = []
        """The least recently used first."""
        self.predicted: set[int] = set()
        self.predicted_layers: set[int] = set()
        self.duels: list[tuple[int, int]] = []
        """The victim by the forecast and the victim by LRU."""
        self.offer: tuple[int, int] | None = None
        self.balance = 0.0

    def layer_of(self, key: int) -> int:
        return key // self.geometry.num_experts

    def on_insert(self, key: int, prefetched: bool) -> None:
        self.residents.append(key)
        if prefetched:
            self.on_predicted(key)

    def on_predicted(self, key: int) -> None:
        self.predicted.add(key)
        self.predicted_layers.add(self.layer_of(key))

    def on_event(self, event: Event) -> None:
        for key in event.keys:
            if key in self.residents:
                self.residents.remove(key)
                self.residents.append(key)
            for duel in [duel for duel in self.duels if key in duel]:
                self.duels.remove(duel)
                if not set(duel) <= set(event.keys):  # else it is a draw
                    self.balance = self.keep * self.balance + (1 if key == duel[1] else -1)
        num_experts = self.geometry.num_experts
        layer_keys = range(event.layer * num_experts, (event.layer + 1) * num_experts)
        tokens = [event.keys]
        if len(event.experts) > 1:
            tokens = [
                [layer_keys[e] for e in row if e != DROPPED] for row in event.experts.tolist()
            ]
        for key in layer_keys:
            for place, decay in enumerate(DECAYS):
                for token_keys in tokens:
                    self.rates[key][place] *= decay
                    self.rates[key][place] += (1 - decay) * (key in token_keys)
        self.predicted -= set(layer_keys)
        self.predicted_layers.discard(event.layer)

    def on_evict(self, key: int) -> None:
        self.residents.remove(key)
        self.predicted.discard(key)
        duelling = {duellist for duel in self.duels for duellist in duel}
        if self.offer is not None and key in self.offer and not duelling & {*self.offer}:
            self.duels.append(self.offer)
        self.offer = None

    def victim(self, pinned: Container[int], layer: int) -> int | None:
        free = [key for key in self.residents if key not in pinned]
        if not free:
            return None
        furthest = min(free, key=lambda key: (-self.wait(key, layer), key))
        self.offer = None if furthest == free[0] else (furthest, free[0])
        return free[0] if self.balance < -5 else furthest

    def wait(self, key: int, layer: int) -> float:
        home, num_layers = self.layer_of(key), self.geometry.num_layers
        wait = 1 / (sum(self.rates[key]) / 3 + PRIOR) + (home in self.predicted_layers)
        if key in self.predicted:
            wait = 0.0
        return wait + self.nearness * ((home - layer - 1) % num_layers + 1) / num_layers


def test_favourites_stay_where_lru_loses_them() -> None:
    """A cycle larger than the cache: LRU hits nothing, a forecast keeps the favourites."""
    rng = np.random.default_rng(0)
    skewed = [[rng.choice(16, 2, replace=False, p=SKEW) for _ in range(3)] for _ in range(200)]
    trace = decode_trace(np.array(skewed), 16)
    lru, hazard, bound = (misses(trace, name, 5) for name in ("lru", "hazard", "belady"))
    assert bound < hazard < lru
    assert (lru - hazard) / (lru - bound) > 0.25


SKEW = np.array([8.0] * 2 + [1.0] * 14) / 30


def test_it_falls_back_to_lru_where_its_forecast_does_worse() -> None:
    """Four experts for a long time, then pairs that come twice and never again: forecasts fail."""
    rng = np.random.default_rng(0)
    experts: list[int] = []
    for _ in range(20):
        favourites = rng.choice(64, 4, replace=False).tolist()
        experts += favourites * 20
        for _ in range(6):
            experts += 2 * rng.choice(64, 2, replace=False).tolist()
    trace = decode_trace(np.array(experts)[:, None, None], 64)
    lru, hazard = misses(trace, "lru", 4), misses(trace, "hazard", 4)
    # With a memory of one duel it never falls back.
    forced = misses(trace, "hazard", 4, axes={"eviction.memory": 1})
    # 0.3 points of hit rate is the bar.
    assert (hazard - lru) / trace.num_passes <= 0.003 < (forced - lru) / trace.num_passes


@pytest.mark.parametrize("prefetch", ["none", "next_gate", "frequency", "oracle"])
@pytest.mark.parametrize("capacity", ["1experts", "7experts", "50%", "2/layer"])
@pytest.mark.parametrize("memory", [1, 20])
def test_it_is_its_slow_form(prefetch: str, capacity: str, memory: int) -> None:
    trace = draw_trace(memory)
    parameters = {"prefetch": prefetch, "eviction.memory": memory, "eviction.nearness": memory / 10}
    for link in ("priority", "fifo"):
        assert_as_slow(trace, capacity, link, parameters)


def assert_as_slow(trace: Trace, capacity: str, link: str, parameters: Mapping[str, Any]) -> None:
    runs = []
    for eviction in ("hazard", f"{__name__}.SlowHazard"):
        setting = setting_for(trace, capacity, {"eviction": eviction, **parameters}, link=link)
        engine = replay(trace, setting, future=Future(trace), cache_reset="request")
        runs.append(figures(engine))
    assert runs[0] == runs[1]

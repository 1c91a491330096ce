"""Hazard against its slow form, and against LRU, its fallback where the forecast fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest

from lm_eval_moecache.algorithms.eviction.base import StatefulEviction
from lm_eval_moecache.algorithms.eviction.rankings import Hazard
from lm_eval_moecache.engine.replay import replay
from lm_eval_moecache.trace.future import Future
from lm_eval_moecache.trace.trace import Trace
from tests.engine.features import RankedAlone
from tests.engine.traces import decode_trace, figures, misses, setting_for


def test_favourites_stay_where_lru_loses_them() -> None:
    """A cycle larger than the cache: LRU hits nothing, a forecast keeps the favourites."""
    rng = np.random.default_rng(0)
    skewed = [[rng.choice(16, 2, replace=False, p=SKEW) for _ in range(3)] for _ in range(200)]
    trace = decode_trace(np.array(skewed), 16)
    lru, hazard, bound = (misses(trace, name, 5) for name in ("lru", "hazard", "belady"))
    assert bound < hazard < lru
    assert (lru - hazard) / (lru - bound) > 0.25


SKEW = np.array([8.0] * 2 + [1.0] * 14) / 30


def failing(top_k: int) -> Trace:
    """Four experts for a long time, then pairs that come twice and never again: forecasts fail."""
    rng = np.random.default_rng(0)
    experts: list[int] = []
    for _ in range(20):
        experts += rng.choice(64, 4, replace=False).tolist() * 20
        for _ in range(6):
            experts += 2 * rng.choice(64, 2, replace=False).tolist()
    return decode_trace(np.array(experts).reshape(-1, 1, top_k), 64)


def test_it_falls_back_to_lru_where_its_forecast_does_worse() -> None:
    trace = failing(1)
    lru, hazard = misses(trace, "lru", 4), misses(trace, "hazard", 4)
    # With a memory of one duel it never falls back.
    forced = misses(trace, "hazard", 4, axes={"eviction.memory": 1})
    # 0.3 points of hit rate is the bar.
    assert (hazard - lru) / trace.num_passes <= 0.003 < (forced - lru) / trace.num_passes


def slowly(name: str) -> Callable[..., Any]:
    return lambda self, *given: getattr(self.slow, name)(*given)


@dataclass(eq=False)
class SlowHazard(StatefulEviction):
    """Hazard by the slow form of its features."""

    source: ClassVar[str] = "eviction=hazard, slowly"
    nearness: float = 2.0
    memory: int = 200
    on_pass, on_insert, on_predicted = map(slowly, ("on_pass", "on_insert", "on_predicted"))
    on_event, on_evict, victim = map(slowly, ("on_event", "on_evict", "victim"))

    def __post_init__(self) -> None:
        own = {"nearness": self.nearness, "memory": self.memory}
        self.slow = RankedAlone(Hazard(self.geometry, **own))


def assert_as_slow(trace: Trace, capacity: str, link: str = "priority", **own: Any) -> None:
    runs = []
    for eviction in ("hazard", f"{__name__}.SlowHazard"):
        axes = {"eviction": eviction, **{key.replace("__", "."): own[key] for key in own}}
        setting = setting_for(trace, capacity, axes, link=link)
        runs.append(figures(replay(trace, setting, future=Future(trace))))
    assert runs[0] == runs[1]


@pytest.mark.parametrize(("top_k", "memory"), [(1, 200), (2, 9)])
def test_its_duels_are_those_of_its_slow_form(top_k: int, memory: int) -> None:
    assert_as_slow(failing(top_k), "4experts", eviction__memory=memory)

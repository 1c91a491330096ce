"""Hazard against its slow form, and against LRU, its fallback where the forecast fails."""

from __future__ import annotations

import numpy as np
import pytest

from lm_eval_moecache.trace.future import Future
from lm_eval_moecache.trace.trace import Trace
from tests.engine.drawn import Case, compare
from tests.engine.traces import decode_trace, misses, setting_for


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


@pytest.mark.parametrize(("top_k", "memory"), [(1, 200), (2, 9)])
def test_its_duels_are_those_of_its_slow_form(top_k: int, memory: int) -> None:
    trace = failing(top_k)
    setting = setting_for(trace, "4experts", {"eviction": "hazard", "eviction.memory": memory})
    compare(Case(trace, setting, Future(trace), "request", None, set()), "failing")

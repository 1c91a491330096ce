"""Hazard against its slow form, and against LRU, which it is again where its forecast fails."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lm_eval_moecache.algorithms.registry import find_algorithm
from lm_eval_moecache.engine.replay import replay
from lm_eval_moecache.records.event import DECODE, PREFILL, Event
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.testing.streams import make_geometry
from lm_eval_moecache.trace.future import Future
from lm_eval_moecache.trace.importers import load_trace
from lm_eval_moecache.trace.trace import Trace
from tests.engine.slow_hazard import SlowHazard
from tests.engine.test_belady import decode_trace, misses
from tests.engine.test_compiled import draw_trace, figures
from tests.engine.traces import setting_for

TRACES = Path(__file__).resolve().parents[2] / "traces"


def test_favourites_stay_where_lru_loses_them() -> None:
    """A cycle larger than the cache: LRU hits nothing, a forecast keeps what recurs most."""
    rng = np.random.default_rng(0)
    skewed = [[rng.choice(16, 2, replace=False, p=SKEW) for _ in range(3)] for _ in range(200)]
    trace = decode_trace(np.array(skewed), 16)
    lru, ours, bound = (misses(trace, name, 5) for name in ("lru", "hazard", "belady"))
    assert bound < ours < lru
    assert (lru - ours) / (lru - bound) > 0.25


SKEW = np.array([8.0] * 2 + [1.0] * 14) / 30


def phases(num_phases: int = 20, hot: int = 80, short: int = 24) -> np.ndarray:
    """Four experts for long, then pairs that come twice and never again: forecasts fail."""
    rng = np.random.default_rng(0)
    experts: list[int] = []
    for _ in range(num_phases):
        favourites = rng.choice(64, 4, replace=False)
        experts += [int(favourites[i % 4]) for i in range(hot)]
        for _ in range(short // 4):
            experts += 2 * rng.choice(64, 2, replace=False).tolist()
    return np.array(experts)[:, None, None]


def test_it_falls_back_to_lru_where_its_forecast_does_worse() -> None:
    trace = decode_trace(phases(), 64)
    lru, ours = misses(trace, "lru", 4), misses(trace, "hazard", 4)
    # 0.3 points of hit rate is the bar.
    assert (ours - lru) / trace.num_passes <= 0.003


def test_without_the_fallback_it_would_lose_more() -> None:
    """The trace of the test above can fail it: a memory of one duel never falls back."""
    trace = decode_trace(phases(), 64)
    forced = misses(trace, "hazard", 4, parameters={"eviction.memory": 1})
    assert (forced - misses(trace, "lru", 4)) / trace.num_passes > 0.003


def geometry() -> Geometry:
    return make_geometry(num_layers=2, num_experts=4, top_k=2)


def test_a_prefill_counts_token_by_token() -> None:
    """Expert 3 serves three of four tokens, expert 0 the first one alone."""
    eviction = find_algorithm("eviction", "hazard")(geometry())
    for key in (0, 3, 1, 2):
        eviction.on_insert(key, False)
    experts = np.array([[0, 1], [3, 1], [3, 2], [3, 2]])
    eviction.on_event(Event(0, 0, PREFILL, 4, [0, 1, 3, 2], experts))
    one_by_one = find_algorithm("eviction", "hazard")(geometry())
    for token, row in enumerate(experts.tolist()):
        one_by_one.on_event(Event(token, 0, DECODE, 1, row))
    order = []
    while (key := eviction.victim(set(order), 1)) is not None:
        order.append(key)
    assert order == [0, 1, 2, 3]
    for key in range(4):
        one_by_one.on_insert(key, False)
    one_by_one.victim(set(), 1)
    for kind in ("fast", "middle", "slow"):
        rates = (
            [getattr(known, kind) for known in own._features.forecasts[:4]]
            for own in (eviction, one_by_one)
        )
        np.testing.assert_allclose(*rates)


def test_what_is_predicted_for_a_coming_layer_stays() -> None:
    eviction = find_algorithm("eviction", "hazard")(geometry())
    for key in (4, 5, 6):
        eviction.on_insert(key, False)
    eviction.on_event(Event(0, 1, DECODE, 1, [4, 5]))
    assert eviction.victim(set(), 0) == 6
    eviction.on_predicted(6)
    assert eviction.victim(set(), 0) in (4, 5)
    eviction.on_event(Event(1, 1, DECODE, 1, [4, 5]))
    assert eviction.victim(set(), 0) == 6


@pytest.mark.parametrize("prefetch", ["none", "next_gate", "frequency", "oracle"])
@pytest.mark.parametrize("capacity", ["1", "7", "50%", "2/layer"])
@pytest.mark.parametrize("memory", [1, 20])
def test_it_is_its_slow_form(prefetch: str, capacity: str, memory: int) -> None:
    trace = draw_trace(memory, 4, 6, 2)
    parameters = {"prefetch": prefetch, "eviction.memory": memory}
    for link in ("priority", "fifo"):
        assert_as_slow(trace, capacity, link, parameters)


def test_it_is_its_slow_form_on_real_routing() -> None:
    trace = load_trace(str(TRACES / "olmoe-1b-7b.parquet"))
    assert_as_slow(trace, "6.25%", "priority", {"prefetch": "frequency"})


def assert_as_slow(trace: Trace, capacity: str, link: str, parameters: Mapping[str, Any]) -> None:
    found = []
    for eviction in ("hazard", f"{SlowHazard.__module__}.{SlowHazard.__name__}"):
        setting = setting_for(trace, capacity, {"eviction": eviction, **parameters}, link=link)
        engine = replay(trace, setting, future=Future(trace), cache_reset="request")
        assert bool(engine.uncompiled) == (eviction != "hazard")
        found.append(figures(engine))
    assert found[0] == found[1]

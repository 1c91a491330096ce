"""Miss algorithms on a ladder of precisions: worked by hand, and against slow versions."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm_eval_moecache.algorithms.registry import find_algorithm
from lm_eval_moecache.records.arrays import softmax
from lm_eval_moecache.records.event import DROPPED, Event, Fetch
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.testing.streams import laddered, make_event, make_geometry

GEOMETRY = laddered(make_geometry(num_layers=2, num_experts=6, top_k=4))
# The first four's softmax scores, as shares of their sum: 0.5, 0.25, 0.15, 0.1.
LOGITS = np.log([0.4, 0.2, 0.12, 0.08, 0.01, 0.005]).tolist()
SIZES = {"expert_bytes": ((100, 50),), "precision": ("int8", "int4")}
TWO = dataclasses.replace(make_geometry(num_layers=1, num_experts=6, top_k=4), **SIZES)


def make(name: str, geometry: Geometry = GEOMETRY, **parameters: Any) -> Any:
    return find_algorithm("miss", name)(geometry, **parameters)


def levels(resolution: Any) -> dict[int, int]:
    assert all(isinstance(fetch, Fetch) for fetch in resolution.fetch)
    return {fetch.key: fetch.level for fetch in resolution.fetch}


def fetched(
    name: str,
    absent: list[int],
    resident: dict[int, int] | None = None,
    geometry: Geometry = GEOMETRY,
    **parameters: Any,
) -> dict[int, int]:
    """Return the level of each key that is loaded for a token of LOGITS."""
    event = make_event(geometry, 0, 0, [LOGITS])
    return levels(make(name, geometry, **parameters).resolve(event, absent, resident or {}))


def test_fetch_lowest_loads_what_is_absent_at_the_lowest_and_prefetches_at_the_best() -> None:
    assert fetched("fetch_lowest", [1, 3], {0: 2, 2: 0}) == {1: 2, 3: 2}
    event = make_event(GEOMETRY, 0, 0, [LOGITS], predicted={1: [LOGITS]})
    assert make("fetch_lowest").prefetch_levels(event, 1, [6, 7]) == [0, 0]


def test_fetch_priority_degrades_the_bottom_60th_percentile_of_a_tokens_ranks() -> None:
    """The last ceil(0.6 x 3) = 2 of four ranks: rank 2 at int4, rank 3 at int2."""
    assert fetched("fetch_priority", [0, 1, 2, 3]) == {0: 0, 1: 0, 2: 1, 3: 2}
    assert fetched("fetch_priority", [0, 1, 3], geometry=TWO, h=1) == {0: 0, 1: 1, 3: 1}
    weights = np.array([0.5, 0.25, 0.15, 0.1])
    assert (weights < np.percentile(weights, 60)).tolist() == [False, False, True, True]


def test_fetch_priority_prefetches_by_the_rank_in_the_predicted_gate() -> None:
    event = make_event(GEOMETRY, 0, 0, [LOGITS], predicted={1: [LOGITS[::-1]]})
    miss = make("fetch_priority")
    # The prediction for layer 1 is 5, 4, 3, 2 in that order, without 0.
    assert miss.prefetch_levels(event, 1, [8, 11, 9, 6]) == [2, 0, 1, 2]
    # Without a prediction, the order of the proposals serves as ranks.
    assert miss.prefetch_levels(event, 0, [3, 1, 2, 0, 5]) == [0, 0, 1, 2, 2]


def test_cascade_goes_by_the_weight_that_stands_before_an_expert() -> None:
    """The experts before each hold 0, 0.5, 0.75, 0.9 of the weight; int8 to t1, int2 above t2."""
    assert fetched("cascade", [0, 1, 2, 3], t1=0.6, t2=0.8) == {0: 0, 1: 0, 2: 1, 3: 2}
    assert fetched("cascade", [1, 3], t1=0.45, t2=0.95) == {1: 1, 3: 1}
    assert fetched("cascade", [0, 1, 2, 3], geometry=TWO) == {0: 0, 1: 0, 2: 1, 3: 1}


def test_cascade_leaves_dropped_experts_out_of_the_weight() -> None:
    event = make_event(GEOMETRY, 0, 0, [LOGITS])
    event = event._replace(experts=np.array([[DROPPED, 1, 2, 3]]))
    # Of 0.25 + 0.15 + 0.1, the experts before each hold 0, 0.5 and 0.8.
    fetched_levels = levels(make("cascade", t1=0.6, t2=0.9).resolve(event, [1, 2, 3], {}))
    assert fetched_levels == {1: 0, 2: 0, 3: 1}


def test_cascade_prefetches_by_the_predicted_gate_or_at_the_best() -> None:
    event = make_event(GEOMETRY, 0, 0, [LOGITS], predicted={1: [LOGITS]})
    miss = make("cascade", t1=0.6, t2=0.8)
    assert miss.prefetch_levels(event, 1, [9, 8, 6, 10]) == [2, 1, 0, 2]
    assert miss.prefetch_levels(event, 0, [3, 4]) == [0, 0]


def test_drop_cascade_drops_what_is_absent_beyond_the_last_threshold() -> None:
    """Thresholds on three levels: 0.45, 0.575, 0.7. At 0.5 an expert is int4, at 0.75 dropped."""
    event = make_event(GEOMETRY, 0, 0, [LOGITS])
    miss = make("drop_cascade", t1=0.45, t2=0.7)
    resolution = miss.resolve(event, [0, 1, 2], {3: 2})
    assert levels(resolution) == {0: 0, 1: 1}
    assert resolution.selection.keep.tolist() == [[True, True, False, True]], "3 is resident"
    assert make("drop_cascade").resolve(event, [0, 1], {2: 0, 3: 0}).selection is None


@pytest.mark.parametrize(
    ("name", "geometry", "parameters", "message"),
    [
        ("fetch_priority", GEOMETRY, {"percentile": 0.6}, "percentile=0.6.*one at least.*not 0.6"),
        ("fetch_priority", GEOMETRY, {"h": 4}, "h from 1 to 3"),
        ("fetch_priority", GEOMETRY, {"h": 2, "percentile": 50.0}, "no effect with miss.h=2"),
        ("cascade", GEOMETRY, {"t1": 0.9, "t2": 0.5}, "0 < t1 <= t2 < 1"),
        ("cascade", TWO, {"t2": 0.9}, "miss.t2=0.9 has no effect with the two levels"),
        ("drop_cascade", GEOMETRY, {"t1": 0.9}, "0 < t1 < t2 < 1"),
        ("cascade", make_geometry(), {}, "'cascade' loads at lower precisions, but precision="),
        ("fetch_lowest", make_geometry(), {}, "precision=int8:int4:int2"),
    ],
)
def test_what_makes_no_sense_is_refused(
    name: str, geometry: Geometry, parameters: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make(name, geometry, **parameters)


# --- slow versions: token by token, in plain lists ----------------------------------------------


def wishes(name: str, event: Event, token: int, t1: float, t2: float, h: int) -> dict[int, int]:
    """Expert -> the level that one token demands; 3 means dropping."""
    experts = event.experts[token].tolist()
    scores = softmax(event.logits)[token].tolist()
    total = sum(scores[e] for e in experts)
    demands = {}
    for rank, expert in enumerate(experts):
        before = sum(scores[e] for e in experts[:rank]) / total
        light = rank - h
        if name == "fetch_priority":
            demands[expert] = 0 if light < 0 else 1 + math.floor(light * 2 / (len(experts) - h))
        elif name == "cascade":
            demands[expert] = (before > t1) + (before > t2)
        else:
            demands[expert] = (before > t1) + (before > (t1 + t2) / 2) + (before > t2)
    return demands


NUMBER = st.floats(-3, 3).map(lambda x: round(x, 2))


@settings(max_examples=120)
@given(
    name=st.sampled_from(["fetch_priority", "cascade", "drop_cascade"]),
    logits=st.lists(st.lists(NUMBER, min_size=6, max_size=6), min_size=1, max_size=3),
    resident=st.dictionaries(st.integers(0, 5), st.integers(0, 2), max_size=5),
    steps=st.tuples(st.sampled_from([0.31, 0.57]), st.sampled_from([0.73, 0.89])),
    h=st.integers(1, 3),
    upgrade=st.booleans(),
)
def test_ladder_algorithms_agree_with_their_slow_versions(
    name: str,
    logits: list[list[float]],
    resident: dict[int, int],
    steps: tuple[float, float],
    h: int,
    upgrade: bool,
) -> None:
    t1, t2 = steps
    event = make_event(GEOMETRY, 0, 0, logits)
    parameters: dict[str, Any] = {"h": h} if name == "fetch_priority" else {"t1": t1, "t2": t2}
    if name != "drop_cascade":
        parameters["upgrade"] = upgrade
    absent = [key for key in event.keys if key not in resident]
    expected: dict[int, int] = {}
    keep = np.ones(event.experts.shape, dtype=bool)
    for token, experts in enumerate(event.experts.tolist()):
        for expert, level in wishes(name, event, token, t1, t2, h).items():
            if level == 3:
                keep[token, experts.index(expert)] = expert in resident
            elif expert not in resident or (parameters.get("upgrade") and level < resident[expert]):
                expected[expert] = min(level, expected.get(expert, 9))
    resolution = make(name, **parameters).resolve(event, absent, resident)
    assert levels(resolution) == expected
    resolved_keep = keep | True if resolution.selection is None else resolution.selection.keep
    assert resolved_keep.tolist() == keep.tolist()

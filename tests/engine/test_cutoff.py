"""The cutoff solver: by hand, against trying every depth, and as inequalities."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm_eval_moecache.engine.cutoff import Overlap, load_times, solve_cutoff
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.testing.streams import make_hardware as stream_hardware
from tests.engine.scripted import make_geometry, make_hardware


def overlap(**given_: Any) -> Overlap:
    """Eight layers of 1 s; loading takes 1 s and 10 bytes a layer; nothing is short."""
    usual: dict[str, Any] = {
        "draft_layers": 8,
        "draft_layer_s": 1.0,
        "load_layer_s": (1.0,) * 8,
        "prefetched_bytes": (10,) * 8,
        "capacity_bytes": (1000,),
        "other_bytes": 0,
        "memory_bytes": 1e9,
    }
    return Overlap(**{**usual, **given_})


@pytest.mark.parametrize(
    ("given_", "by_time", "by_memory"),
    [
        ({}, 8, 8),  # loading is hidden layer by layer: all of them
        ({"load_layer_s": (0.1,) * 8}, 8, 8),
        ({"load_layer_s": (2.0,) * 8}, 4, 8),  # 4 x 2 s in 8 s
        ({"load_layer_s": (3.0,) * 8}, 2, 8),  # 2 x 3 s; a third would end at 9 s
        ({"load_layer_s": (9.0,) * 8}, 0, 8),
        ({"load_layer_s": (0.5,) * 4 + (4.0,) * 4}, 5, 8),  # 4 x 1 s of compute, then 4 s
        ({"capacity_bytes": (35,)}, 8, 3),
        ({"capacity_bytes": (10, 10, 9, 10, 10, 10, 10, 10)}, 8, 2),  # a cache per layer
        ({"memory_bytes": 100, "other_bytes": 55}, 8, 4),
        ({"memory_bytes": 100, "other_bytes": 200}, 8, 0),
    ],
)
def test_by_hand(given_: dict[str, Any], by_time: int, by_memory: int) -> None:
    answer = solve_cutoff(overlap(**given_))
    assert (answer.by_time, answer.by_memory) == (by_time, by_memory)
    assert answer.cutoff == min(by_time, by_memory)


@given(
    loads=st.lists(st.integers(0, 9), min_size=1, max_size=8),
    sizes=st.integers(0, 9),
    layers=st.integers(1, 8),
    capacity=st.integers(0, 60),
    other=st.integers(0, 30),
)
def test_it_is_the_largest_depth_that_satisfies_both_constraints(
    loads: list[int], sizes: int, layers: int, capacity: int, other: int
) -> None:
    asked = overlap(
        draft_layers=layers,
        load_layer_s=tuple(map(float, loads)),
        prefetched_bytes=(sizes,) * len(loads),
        capacity_bytes=(capacity,),
        other_bytes=other,
        memory_bytes=50,
    )
    allowed = [
        depth
        for depth in range(len(loads) + 1)
        if sum(max(1, load) for load in loads[:depth]) <= layers
        and depth * sizes <= capacity
        and (depth == 0 or depth * sizes + other <= 50)
    ]
    assert solve_cutoff(asked).cutoff == max(allowed)


def test_equal_loading_and_computing_cover_every_layer_whatever_the_last_digits() -> None:
    for layer_s in (0.1, 1 / 3, 2.2524358607160372e-4):
        answer = solve_cutoff(overlap(draft_layer_s=layer_s, load_layer_s=(layer_s,) * 8))
        assert answer.by_time == 8


def test_loading_a_layer_in_a_batch_has_one_latency() -> None:
    geometry: Geometry = make_geometry()
    assert load_times(geometry, make_hardware(), 3, batched=True) == (13.0,) * 3
    assert load_times(geometry, make_hardware(), 3, batched=False) == (15.0,) * 3
    assert load_times(geometry, stream_hardware(), 1, batched=True) == pytest.approx((0.41,) * 3)

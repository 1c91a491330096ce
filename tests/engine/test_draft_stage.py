"""The cutoff of drafting by hand and against every depth; `test_oracle.py` has drafting itself."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm_eval_moecache.algorithms.prefetch.draft import DraftPrefetch
from lm_eval_moecache.engine.draft_stage import solve_cutoff
from lm_eval_moecache.records.geometry import Draft
from tests.engine.scripted import Always, ScriptedPolicy, make_engine, make_geometry


def test_the_solvers_inputs_and_answer_are_told() -> None:
    """Of a draft with the target's sizes on the machine of `scripted.py`."""
    prefetch = Always(lambda geometry: DraftPrefetch(geometry, cutoff="auto", critical=2))
    draft = Draft(geometry=make_geometry(), nbytes=1000)
    engine = make_engine(ScriptedPolicy(prefetch=prefetch), 12, draft=draft)
    assert engine.draft_stage is not None
    solution = engine.draft_stage.solution
    assert solution is not None
    # A draft layer takes 4 s, loading two experts 1 + 8 s: 12 s of drafting hide one layer's load.
    assert (solution["asked"], solution["used"], solution["by_time"], solution["by_memory"]) == (
        "auto",
        1,
        1,
        3,
    )
    assert (solution["draft_layer_ms"], solution["load_layer_ms"]) == (4000.0, [9000.0] * 3)
    assert solution["other_bytes"] == 600 + 1000


def test_a_draft_stage_prefetcher_without_a_draft_is_refused() -> None:
    with pytest.raises(ValueError, match=r"prefetch='draft' works while.*a live run with draft="):
        make_engine(ScriptedPolicy(prefetch=Always(DraftPrefetch)))


# --- the cutoff solver ---


def solved(**given_: Any) -> tuple[int, int]:
    """Solve for eight layers of 1 s, each 1 s and 10 bytes to load, with memory to spare."""
    defaults: dict[str, Any] = {
        "draft_layers": 8,
        "draft_layer_s": 1.0,
        "load_layer_s": (1.0,) * 8,
        "prefetched_bytes": (10,) * 8,
        "capacity_bytes": (1000,),
        "other_bytes": 0,
        "memory_bytes": 1e9,
    }
    return solve_cutoff(**{**defaults, **given_})


@pytest.mark.parametrize(
    ("given_", "by_time", "by_memory"),
    [
        ({}, 8, 8),  # every layer hides one layer's load
        ({"load_layer_s": (2.0,) * 8}, 4, 8),  # 4 x 2 s in 8 s
        ({"load_layer_s": (3.0,) * 8}, 2, 8),  # 2 x 3 s; a third would end at 9 s
        ({"load_layer_s": (0.5,) * 4 + (4.0,) * 4}, 5, 8),  # 4 x 1 s of compute, then 4 s
        ({"capacity_bytes": (35,)}, 8, 3),
        ({"capacity_bytes": (10, 10, 9, 10, 10, 10, 10, 10)}, 8, 2),  # a cache per layer
        ({"memory_bytes": 100, "other_bytes": 55}, 8, 4),
        ({"memory_bytes": 100, "other_bytes": 200}, 8, 0),
    ],
)
def test_by_hand(given_: dict[str, Any], by_time: int, by_memory: int) -> None:
    assert solved(**given_) == (by_time, by_memory)


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
    depths = solved(
        draft_layers=layers,
        load_layer_s=tuple(map(float, loads)),
        prefetched_bytes=(sizes,) * len(loads),
        capacity_bytes=(capacity,),
        other_bytes=other,
        memory_bytes=50,
    )
    feasible = [
        depth
        for depth in range(len(loads) + 1)
        if sum(max(1, load) for load in loads[:depth]) <= layers
        and depth * sizes <= capacity
        and (depth == 0 or depth * sizes + other <= 50)
    ]
    assert min(depths) == max(feasible)


def test_equal_loading_and_computing_cover_every_layer_whatever_the_last_digits() -> None:
    for layer_s in (0.1, 1 / 3, 2.2524358607160372e-4):
        assert solved(draft_layer_s=layer_s, load_layer_s=(layer_s,) * 8)[0] == 8

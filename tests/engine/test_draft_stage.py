"""Drafting against hand calculations; the cutoff solver by hand and against every depth.

The machine of `scripted.py`: a dense part takes 2 s, an expert 1 s, a transfer 1 s latency + 4 s;
keys 0-3 lie in layer 0, 4-7 in layer 1, 8-11 in layer 2. The draft has the target's sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm_eval_moecache.algorithms.prefetch.gates import DraftPrefetch
from lm_eval_moecache.engine.draft_stage import solve_cutoff
from lm_eval_moecache.engine.engine import Engine as VirtualEngine
from lm_eval_moecache.records.event import VERIFY
from lm_eval_moecache.records.geometry import Draft
from tests.engine.scripted import decode, make_engine, make_geometry

DRAFT = Draft(geometry=make_geometry(), nbytes=1000)
verify = partial(decode, phase=VERIFY)


def make_drafting(capacity: int = 12, **parameters: Any) -> VirtualEngine:
    prefetch = partial(DraftPrefetch, **{"cutoff": 3, "critical": 2, **parameters})
    return make_engine(None, capacity, draft=DRAFT, prefetch=prefetch)


def draft(engine: VirtualEngine, *experts_by_layer: Sequence[int]) -> None:
    """Draft one token with two experts a layer; the gates predict `experts_by_layer`."""
    stage = engine.begin_draft()
    for layer, experts in enumerate(experts_by_layer):
        stage.dense(layer, 1)
        if stage.wants(layer):
            logits = np.zeros((1, engine.geometry.num_experts), dtype=np.float32)
            logits[0, list(experts)] = range(len(experts), 0, -1)
            stage.predict(layer, logits)
        stage.experts(layer, 2, 1)
        engine.check_integrity()


def test_drafting_is_time_of_the_pass_that_verifies_and_the_link_works_meanwhile() -> None:
    engine = make_drafting()
    draft(engine, [0, 1], [], [])
    # Drafting: 3 layers of 2 + 2 = 4 s each: 0-12. Keys 0, 1 are issued at 2 and move as one
    # batch 2-7 and 7-11. Layers 1 and 2 predict experts 0, 1 too (ties): 4 11-16, then demands.
    # Verification: dense 12-14; both are resident: no stall; two experts 14-16.
    figures = "start_s=0 draft_s=12 end_s=16 stall_s=0 hits=2 prefetch_hits=2"
    verify(engine, [0, 1], says=figures)


@pytest.mark.parametrize(("io", "loaded_at"), [("batched", 11.0), ("per_expert", 12.0)])
def test_batched_io_pays_one_latency_for_a_layer(io: str, loaded_at: float) -> None:
    engine = make_drafting(cutoff=1, io=io)
    draft(engine, [0, 1], [], [])
    verify(engine, [0, 1])
    assert engine.memory.run.busy_until == loaded_at  # 2 + 1 + 4 + 4, or one latency more
    assert engine.memory.run.transfers == 2


def test_vanilla_waits_after_each_layer_for_what_it_asked_for() -> None:
    engine = make_drafting(cutoff=2, trigger="vanilla", io="per_expert")
    draft(engine, [0, 1], [0, 1], [])
    # Layer 0: dense 0-2, keys 0, 1 move 2-7-12, experts 2-4, wait 4-12. Layer 1: dense 12-14, keys
    # 4, 5 move 14-19-24, experts 14-16, wait 16-24. Layer 2: 24-28. Verification: 2 + 1 a layer.
    verify(engine, [0], [4], says="draft_s=28 stall_s=8+8 end_s=34 hits=2")


def test_a_worker_hides_what_drafting_covers_and_the_rest_is_late() -> None:
    engine = make_drafting(cutoff=2, io="per_expert")
    draft(engine, [0, 1], [0, 1], [])
    # Keys 0, 1 move 2-7-12; key 4, issued at 6, 12-17; drafting ends at 12; dense 12-14, expert
    # 14-15, dense 15-17: key 4 has just landed; key 5, due to start at 17, is withdrawn and
    # demanded: 17-22; two experts 22-24.
    figures = "draft_s=12 end_s=24 stall_s=5 hits=2 late=1 misses=0"
    verify(engine, [0], [4, 5], says=figures)


def test_the_solvers_inputs_and_answer_are_told() -> None:
    solution: Any = make_drafting(cutoff="auto").draft_stage.solution  # type: ignore[union-attr]
    # A draft layer takes 4 s, loading two experts 1 + 8 s: 12 s of drafting hide one layer's load.
    expected = {"asked": "auto", "used": 1, "by_time": 1, "by_memory": 3, "other_bytes": 600 + 1000}
    expected |= {"draft_layer_ms": 4000.0, "load_layer_ms": [9000.0] * 3}
    assert {name: solution[name] for name in expected} == expected


def test_a_draft_stage_prefetcher_without_a_draft_is_refused() -> None:
    with pytest.raises(ValueError, match=r"prefetch='draft' works while.*a live run with draft="):
        make_engine(prefetch=DraftPrefetch)


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

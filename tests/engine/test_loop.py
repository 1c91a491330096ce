"""Batches of passes, and machine code, give the figures of single events to the last digit."""

from __future__ import annotations

import dataclasses
from collections.abc import Container
from typing import Any

import pytest

from lm_eval_moecache.algorithms.eviction.textbook import Clock
from lm_eval_moecache.algorithms.policy import load_policy
from lm_eval_moecache.algorithms.ranked import RankedEviction, compiled_rank
from lm_eval_moecache.algorithms.registry import algorithm_names, find_algorithm
from lm_eval_moecache.engine.replay import replay
from lm_eval_moecache.engine.setting import Setting
from lm_eval_moecache.engine.virtual import loop
from lm_eval_moecache.engine.virtual.engine import VirtualEngine
from lm_eval_moecache.engine.virtual.loop import MODULES
from lm_eval_moecache.engine.virtual.together import Together
from lm_eval_moecache.records.errors import AlgorithmError
from lm_eval_moecache.records.event import DECODE
from lm_eval_moecache.records.jit import column, is_kept
from lm_eval_moecache.testing.streams import fresh, make_geometry, make_hardware, make_stream, run
from lm_eval_moecache.trace.future import Future
from lm_eval_moecache.trace.importers import load_trace
from lm_eval_moecache.trace.trace import Drafted, Trace
from tests.engine import drawn, traces
from tests.engine.drawn import draw
from tests.engine.traces import draw_trace, one_by_one, setting_for

LAYERS = (1000, 1500, 1000, 1500, 1500, 1000)


def figures(engine: VirtualEngine) -> dict[str, Any]:
    """Everything a report is made from, and the final state of the caches and the link."""
    engine.check_integrity()
    return {
        "passes": engine.ledger.passes,
        "requests": [[p.index for p in r.passes] for r in engine.ledger.requests],
        "now": engine.clock.now,
        "held": [(pool.resident, pool.arriving) for pool in engine.pools],
        "unused": column(engine.state.slots, "unused").tolist(),
        "counted": [
            (pool.loads, pool.evictions, pool.warmed, pool.lifetime_tokens, pool.peak_bytes)
            for pool in engine.pools
        ],
        "link": (engine.link.busy_s, engine.link.bytes_moved, engine.link.transfers),
    }


def assert_equal(trace: Trace, setting: Setting, cache_reset: str = "never") -> VirtualEngine:
    future = Future(trace)
    slow = replay(trace, setting, future=future, cache_reset=cache_reset, on_engine=one_by_one)
    fast = replay(trace, setting, future=future, cache_reset=cache_reset)
    assert figures(fast) == figures(slow)
    return fast


def check(seed: int) -> None:
    case = draw(seed)
    assert_equal(case.trace, case.setting, case.reset)


def test_random_settings() -> None:
    for seed in range(60):
        check(seed)


@pytest.mark.slow
def test_five_hundred_random_settings_in_machine_code(machine_code: None) -> None:
    for seed in range(60, 560):
        check(seed)


def test_compiled_by_numba(machine_code: None) -> None:
    trace = draw_trace(7, LAYERS, 16, 3)
    for policy, axes in (
        ("on_demand", {}),
        ("specmd", {}),
        ("on_demand", {"eviction": "score", "eviction.history": "decayed"}),
        ("on_demand", {"eviction": "belady", "miss": "fetch_cached_first"}),
        ("specmd", {"eviction": "hazard", "eviction.memory": 1}),
        ("on_demand", {"eviction": "arc"}),
        ("specmd", {"eviction": "s3_fifo"}),
        ("specmd", {"eviction": "importance"}),
    ):
        assert assert_equal(trace, setting_for(trace, "30%", axes, policy)).loop.is_compiled
    assert is_kept(MODULES, "step")


def test_what_rules_decide_is_served_by_machine_code(
    machine_code: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = 0

    def counted(self: Together, *given: Any, **more: Any) -> Any:
        nonlocal served
        served += 1
        return run_layer(self, *given, **more)

    run_layer = Together.run
    monkeypatch.setattr(Together, "run", counted)
    trace = draw_trace(7, LAYERS, 16, 3, 30)
    for axes in (
        {"routing": "cache_prior"},
        {"routing": "max_rank", "prefetch": "next_gate"},
        {"routing": "cumsum", "miss": "drop", "prefetch": "score", "eviction": "score"},
        {"miss": "substitute_score", "prefetch": "next_gate", "prefetch.depth": 2},
    ):
        before = served
        engine = assert_equal(trace, setting_for(trace, "30%", axes))
        assert engine.loop.is_compiled
        decoded = sum(record.phase == DECODE for record in engine.ledger.passes)
        assert served - before == decoded * len(LAYERS) > 0


class Tired(Clock):
    """Evicts as CLOCK does, for a while."""

    rest: int = 20

    def victim(self, pinned: Container[int], layer: int) -> int | None:
        self.rest -= 1
        if not self.rest:
            raise ZeroDivisionError("tired")
        return super().victim(pinned, layer)


def test_what_an_eviction_raises_in_the_midst_of_machine_code_is_raised(machine_code: None) -> None:
    trace = draw_trace(7, LAYERS, 16, 3)
    for capacity in ("2experts", "30%", "5/layer"):
        with pytest.raises(AlgorithmError, match=r"Tired\.victim at layer \d raised .* tired"):
            tired = setting_for(trace, capacity, {"eviction": f"{__name__}.Tired"})
            replay(trace, tired, cache_reset="never")


@pytest.mark.parametrize("first", [0, 100, 200])
def test_the_oracle_agrees_with_machine_code(machine_code: None, first: int) -> None:
    for seed in range(first, first + 40):
        drawn.check(seed)


def test_every_ranking_compiles(machine_code: None) -> None:
    for name in algorithm_names("eviction"):
        algorithm = find_algorithm("eviction", name)
        if issubclass(algorithm, RankedEviction):
            compiled_rank(algorithm(make_geometry()).plain_rank)


def test_lossy_and_laddered_events_in_machine_code(
    machine_code: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    geometry = make_geometry(4, 16, 3)
    for axes in (
        {"routing": "cache_prior", "prefetch": "next_gate"},
        {"miss": "fetch_lowest", "prefetch": "next_gate", "eviction": "lhu"},
        {"miss": "drop", "routing": "swap_rank", "eviction": "score"},
        {"miss": "fetch_lowest", "prefetch": "next_gate", "eviction": "slru"},
    ):
        policy = load_policy("on_demand", axes)
        fast = run(policy, geometry, "30%")
        assert fast.engine.loop.is_compiled  # type: ignore[attr-defined]
        with monkeypatch.context() as patch:
            patch.setattr(loop.Loop, "expect", lambda *_, **__: None)
            assert run(policy, geometry, "30%").figures == fast.figures


@pytest.mark.parametrize("breaks", [False, True])
def test_plain_python_can_go_on_where_machine_code_was(machine_code: None, breaks: bool) -> None:
    """It also does after a pass that breaks off at its second event."""
    geometry = make_geometry(3, 8, 2)
    passes, runs = make_stream(geometry), []
    for leaves in (False, True):
        setting = setting_for(geometry, "30%", {"prefetch": "next_gate"}, hardware=make_hardware())
        engine = VirtualEngine(geometry, setting)
        for events in passes:
            is_pass_5 = events[0].pass_index == 5
            if leaves and is_pass_5:
                engine.loop.leave()
            engine.begin_pass(events[0].phase, events[0].num_tokens)
            for event in events[:1] if breaks and is_pass_5 else events:
                engine.enter(event.layer, event.num_tokens)
                engine.run(fresh(event, engine.depth))
            if not (breaks and is_pass_5):
                engine.end_pass()
        assert engine.loop.is_compiled == (not leaves and not breaks)
        runs.append(figures(engine))
    assert runs[0] == runs[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen.route.csv", "trace_olmoe_299.jsonl"])
def test_published_traces(name: str) -> None:
    trace = load_trace(str(traces.published(name)))
    for eviction, capacity in (("lru", "25%"), ("least_stale", "4experts"), ("belady", "8/layer")):
        axes = {"eviction": eviction, "prefetch": "frequency"}
        assert_equal(trace, setting_for(trace, capacity, axes))


def test_what_became_of_drafts() -> None:
    trace = draw_trace(7)
    trace = dataclasses.replace(trace, drafted=Drafted(settled={2: (3, 1), 5: (2, 2)}))
    passes = assert_equal(trace, setting_for(trace, "50%")).ledger.passes
    assert [(p.index, p.drafted, p.accepted) for p in passes if p.drafted] == [(2, 3, 1), (5, 2, 2)]

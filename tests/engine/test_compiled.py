"""The compiled replay gives the engine's figures to the last digit, whatever the setting."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lm_eval_moecache.algorithms import features, ranked
from lm_eval_moecache.algorithms.policy import load_policy
from lm_eval_moecache.engine import compiled
from lm_eval_moecache.engine.compiled import _MODULES
from lm_eval_moecache.engine.core import Count
from lm_eval_moecache.engine.engine import Setting, VirtualEngine
from lm_eval_moecache.engine.replay import replay
from lm_eval_moecache.records.artifact import UseProfile
from lm_eval_moecache.records.event import PREFILL
from lm_eval_moecache.records.jit import Upgrade, has_numba, is_kept
from lm_eval_moecache.records.ledger import COUNTED
from lm_eval_moecache.records.sizes import parse_capacity
from lm_eval_moecache.testing.streams import fresh, make_geometry, make_hardware, make_stream
from lm_eval_moecache.trace.future import Future
from lm_eval_moecache.trace.importers import load_trace
from lm_eval_moecache.trace.trace import Drafted, Trace
from tests.engine import traces
from tests.engine.traces import HARDWARE, draw_trace, setting_for

PLAIN = "lru fifo lfu belady lfru layered_lru shallow_first".split()
RULES: dict[str, list[dict[str, Any]]] = {
    **{name: [{}] for name in PLAIN},
    "hazard": [{}, {"nearness": 0, "memory": 1}],
    "fld": [{"distance": "absolute"}, {"distance": "forward"}],
    "frequency_layer": [{"layer": "forward"}, {"layer": "index"}],
    "score": [{"history": "sum"}, {"history": "mean"}, {"history": "decayed"}],
    "least_stale": [
        {"protect": protect, "order": order}
        for protect in ("coming", "none")
        for order in ("last_use", "fifo")
    ],
}
PREFETCHERS: dict[str, list[dict[str, Any]]] = {
    "none": [{}],
    "next_gate": [{}, {"overfetch": 1.5, "depth": 2}, {"issue": "after_layer"}],
    "score": [{}, {"scope": "token", "percentile": 50}],
    "frequency": [{"lookahead": 2}],
    "history": [{}],
    "expert_map": [{}],
    "oracle": [{"horizon": 3}, {"horizon": 2, "recall": 0.7, "precision": 0.5}],
}
LAYERS = (1000, 1500, 1000, 1500, 1500, 1000)


def figures(engine: VirtualEngine) -> dict[str, Any]:
    """Everything a report is made from, and the final state of the caches and the link."""
    engine.check_integrity()
    return {
        "passes": [dataclasses.asdict(record) for record in engine.ledger.passes],
        "requests": [[p.index for p in r.passes] for r in engine.ledger.requests],
        "now": engine.clock.now,
        "resident": [set(pool.resident) for pool in engine.pools],
        "arriving": [set(pool.arriving) for pool in engine.pools],
        "unused": [set(pool.unused_prefetches) for pool in engine.pools],
        "counted": [
            (pool.loads, pool.evictions, pool.warmed, pool.lifetime_tokens, pool.peak_bytes)
            for pool in engine.pools
        ],
        "link": (engine.link.busy_s, engine.link.bytes_moved, engine.link.transfers),
    }


def assert_equal(trace: Trace, setting: Setting, cache_reset: str = "never") -> VirtualEngine:
    future = Future(trace)
    slow = replay(trace, setting, future=future, cache_reset=cache_reset, compiled=False)
    fast = replay(trace, setting, future=future, cache_reset=cache_reset)
    assert fast.uncompiled == "" and slow.uncompiled
    expected, actual = figures(slow), figures(fast)
    for name in expected:
        assert actual[name] == expected[name], name
    return fast


def overrides(axis: str, forms: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the overrides that choose each algorithm of an axis in each of its forms."""
    return [
        {axis: name, **{f"{axis}.{key}": value for key, value in variant.items()}}
        for name, variants in forms.items()
        for variant in variants
    ]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.data())
def test_random_traces(data: st.DataObject) -> None:
    check_a_random_trace(data)


@pytest.mark.slow
def test_five_hundred_random_traces_in_machine_code(machine_code: None) -> None:
    settings(max_examples=500, deadline=None, derandomize=True)(
        given(st.data())(check_a_random_trace)
    )()


def check_a_random_trace(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.sampled_from([1000, 1500]), min_size=1, max_size=5))
    layers, experts = len(sizes), data.draw(st.integers(2, 9))
    form = {"top_k": min(experts, 3), "last_alone": data.draw(st.booleans())}
    trace = draw_trace(data.draw(st.integers(0, 999)), sizes, experts, **form)
    axes = data.draw(st.sampled_from(overrides("eviction", RULES)))
    axes |= data.draw(st.sampled_from(overrides("prefetch", PREFETCHERS)))
    try:
        policy = load_policy("on_demand", axes)
        policy.prefetch.build(trace.geometry, 0)
    except ValueError:
        assume(False)  # looks further ahead than there are layers
    capacity = str(data.draw(st.integers(1, layers * experts)))
    if not policy.eviction.algorithm.compares_layers and data.draw(st.booleans()):
        capacity = f"{data.draw(st.integers(1, experts))}/layer"
    times = st.sampled_from([0.0, 1e-6, 1e-4, 1e-2])
    hardware = dataclasses.replace(
        HARDWARE,
        link_latency_s=data.draw(times),
        kernel_overhead_s=data.draw(times),
        wait_overhead_s=data.draw(times),
        link_bytes_per_s=data.draw(st.sampled_from([1e6, 1e7, 1e9])),
        # The low figure makes the arithmetic of a token take time.
        peak_flops=data.draw(st.sampled_from([HARDWARE.peak_flops, 1e6])),
    )
    miss = data.draw(st.sampled_from(["fetch", "fetch_cached_first"]))
    counts = tuple(tuple(range(experts)) for _ in range(layers))
    setting = setting_for(
        trace,
        capacity,
        {**axes, "miss": miss},
        hardware=hardware,
        link=data.draw(st.sampled_from(["priority", "fifo"])),
        warm=data.draw(st.sampled_from([None, UseProfile(model="", counts=counts)])),
    )
    fast = assert_equal(trace, setting, data.draw(st.sampled_from(["never", "request"])))
    assert sum(p.token_requests for p in fast.ledger.passes) == trace.columns.experts.size


@pytest.fixture
def machine_code(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compile at once the loop that runs as plain Python in the other tests (conftest)."""
    numba = pytest.importorskip("numba")
    monkeypatch.setattr(numba.config, "DISABLE_JIT", False)
    monkeypatch.setattr(compiled, "UPGRADE", Upgrade(_MODULES, "run", load=0, make=0))
    has_numba.cache_clear()
    yield
    has_numba.cache_clear()


def test_compiled_by_numba(machine_code: None) -> None:
    trace = draw_trace(7, LAYERS, 16, 3)
    for policy, axes in (
        ("on_demand", {}),
        ("specmd", {}),
        ("on_demand", {"eviction": "score", "eviction.history": "decayed"}),
        ("on_demand", {"eviction": "belady", "miss": "fetch_cached_first"}),
        ("specmd", {"eviction": "hazard", "eviction.memory": 1}),
    ):
        for capacity in ("2", "30%", "5/layer"):
            for link in ("priority", "fifo"):
                assert_equal(trace, setting_for(trace, capacity, axes, policy, link=link))
    assert is_kept(_MODULES, "run")


def test_a_live_rule_that_is_compiled_in_between(
    machine_code: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = draw_trace(7, LAYERS, 16, 3)
    for axes in ({"eviction": "least_stale"}, {"eviction": "score"}, {"eviction": "hazard"}):
        setting = setting_for(trace, "30%", {**axes, "prefetch": "next_gate"})
        never = Upgrade((features,), "play", load=10**9, make=10**9)
        monkeypatch.setattr(ranked, "UPGRADE", never)
        plain = replay(trace, setting, compiled=False)
        soon = Upgrade((features,), "play", load=20, make=20)
        monkeypatch.setattr(ranked, "UPGRADE", soon)
        assert figures(replay(trace, setting, compiled=False)) == figures(plain)


def test_live_passes(machine_code: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "is_compiled", lambda: True)
    geometry = make_geometry(4, 16, 3)
    passes = make_stream(geometry)
    for axes in ({"eviction": "score"}, {"prefetch": "score"}, {"eviction": "hazard"}):
        for capacity, link in (("2", "priority"), ("30%", "fifo"), ("5/layer", "priority")):
            setting = Setting(
                policy=load_policy("on_demand", {"prefetch": "next_gate", **axes}),
                capacity=parse_capacity(capacity, geometry),
                hardware=make_hardware(),
                link=link,
            )
            reference, compiled_engine = (
                VirtualEngine(geometry, setting),
                compiled.live_engine(geometry, setting),
            )
            assert not compiled_engine.uncompiled
            for engine in (reference, compiled_engine):
                for events in passes:
                    if events[0].phase == PREFILL:
                        engine.reset_cache()
                    engine.begin_pass(events[0].phase, events[0].num_tokens)
                    for event in events:
                        engine.enter(event.layer, event.num_tokens)
                        engine.run(fresh(event, engine.depth))
                    engine.end_pass()
                engine.check_integrity()
            assert compiled_engine.ledger.passes == reference.ledger.passes


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen.route.csv", "trace_olmoe_299.jsonl"])
def test_published_traces(name: str) -> None:
    trace = load_trace(str(traces.published(name)))
    for eviction, capacity in (("lru", "25%"), ("least_stale", "4"), ("belady", "8/layer")):
        axes = {"eviction": eviction, "prefetch": "frequency"}
        assert_equal(trace, setting_for(trace, capacity, axes))


def test_what_became_of_drafts() -> None:
    trace = draw_trace(7)
    trace = dataclasses.replace(trace, drafted=Drafted(settled={2: (3, 1), 5: (2, 2)}))
    passes = assert_equal(trace, setting_for(trace, "50%")).ledger.passes
    assert [(p.index, p.drafted, p.accepted) for p in passes if p.drafted] == [(2, 3, 1), (5, 2, 2)]


def test_what_is_not_compiled_says_why() -> None:
    trace = draw_trace(7)

    def reason(policy: str, **axes: str) -> str:
        return replay(trace, setting_for(trace, "50%", axes, policy)).uncompiled

    assert "Random" in reason("on_demand", eviction="random")
    assert "lossy" in reason("mixture_cache")
    assert "host" in reason("on_demand", miss="host")


def test_every_count_is_of_the_compiled_loop_or_of_what_never_runs_there() -> None:
    """A count missing from the loop would read 0, and for lossless policies alone."""
    lossy = {"dropped", "unfaithful", "substituted", "low_precision", "avoided", "lost_weight"}
    uncompiled = lossy | {"weighed_tokens", "host_executed", "host_s", "host_wait_s", "draft_s"}
    from_trace = {"token_requests", "drafted", "accepted"}
    counted = {field.name for field in dataclasses.fields(Count)}
    assert not counted & (uncompiled | from_trace)
    missing = set(COUNTED) - counted - uncompiled - from_trace
    assert not missing, f"{missing}: count it in engine/core.py (and its Count), too"

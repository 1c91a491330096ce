"""The wall clock does as the virtual one; `tests/test_equality.py` has its lossless policies."""

from __future__ import annotations

import gc
import itertools
import threading
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch

from lm_eval_moecache.engine.replay import replay
from lm_eval_moecache.engine.wall.engine import WallEngine
from lm_eval_moecache.harness.lm import MoECacheLM
from lm_eval_moecache.model.hook import WrappedModel
from lm_eval_moecache.model.moe_layers import find_moe_layers
from lm_eval_moecache.model.store import GroupedCall
from lm_eval_moecache.model.wall import store
from lm_eval_moecache.model.wall.store import WorkOnPool
from lm_eval_moecache.records.event import DECODE
from lm_eval_moecache.trace.importers import load_trace
from tests.conftest import Checkpoint
from tests.engine.scripted import experts_of, run_layer
from tests.harness import answers
from tests.model.wrapped import (
    HOST,
    assert_same,
    counts,
    logits_of,
    of_tokens,
    wrap_virtual,
    wrap_wall,
)
from tests.models import FAMILY_CASES, random_model, sizes_of


def test_a_whole_layer_in_slots_runs_as_one_grouped_product(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A prefill with every expert resident costs what it costs transformers."""
    model = random_model("olmoe")
    prompt = torch.arange(2, 34)[None]
    with torch.no_grad():
        expected = model(prompt).logits
        wrapped = wrap_wall(model, "on_demand", "100%")
        model(prompt)
        monkeypatch.setattr(store, "GroupedCall", None)
        logits = model(prompt).logits
    wrapped.unwrap()
    assert torch.equal(logits, expected)


LADDER = "int8:int4:int2"
TIMELESS: list[dict[str, str]] = [
    {"capacity": "25%"},
    {"miss": "drop", "miss.h": "1"},
    {"miss": "substitute_score"},
    {"miss": "substitute_random"},
    {"routing": "cache_prior"},
    *(
        {"capacity": "30%", "precision": LADDER, "miss": miss}
        for miss in ("fetch_lowest", "fetch_priority", "cascade", "drop_cascade")
    ),
    # These keep two experts of a token: they change nothing where a router chooses two.
    {"policy": "pruning"},
    {"policy": "mixture_cache"},
    {"miss": "drop"},
]


@pytest.mark.parametrize("family", FAMILY_CASES)
def test_answers_and_counts_are_the_virtual_clocks_where_nothing_depends_on_time(
    family: str,
) -> None:
    """Dropped experts keep their index with weight 0: slots have to pass over them."""
    model = random_model(family, **sizes_of(family))
    for changes in TIMELESS if family == "olmoe" else TIMELESS[:9]:
        setting = {"policy": "on_demand", "capacity": "5/layer", **changes}
        policy, capacity = setting.pop("policy"), setting.pop("capacity")
        wrapped = wrap_virtual(model, policy, capacity, **setting)
        expected, expected_passes = logits_of(model, wrapped), wrapped.engine.ledger.passes
        changed = sum(
            p.dropped + p.substituted + p.unfaithful + p.low_precision for p in expected_passes
        )
        assert (changed > 0) == (changes != TIMELESS[0])
        for seed in range(2):
            wrapped = wrap_wall(model, policy, capacity, seed=seed, longest_s=1e-4, **setting)
            assert_same(expected, logits_of(model, wrapped), f"{changes}, {seed}")
            assert counts(wrapped.engine.ledger.passes) == counts(expected_passes)


def interrupted(*args: Any) -> None:
    raise KeyboardInterrupt


def answered(wrapped: WrappedModel) -> list[torch.Tensor]:
    return of_tokens(logits_of(wrapped.model))


def test_an_interrupted_pass_leaves_no_thread_and_the_model_answers_as_before() -> None:
    model, threads_before = random_model("olmoe"), set(threading.enumerate())
    wrapped = wrap_virtual(model, "specmd", "25%")
    expected = answered(wrapped)
    wrapped.unwrap()
    wrapped = wrap_wall(model, "specmd", "25%", longest_s=0.002)
    for layer in find_moe_layers(model)[:2]:
        handle = layer.experts.register_forward_pre_hook(interrupted)
        with pytest.raises(KeyboardInterrupt):
            answered(wrapped)
        handle.remove()
        assert all(map(torch.equal, expected, answered(wrapped)))
    wrapped.unwrap()
    assert all(map(torch.equal, expected, answered(wrapped))), "unwrapped"
    del wrapped
    gc.collect()
    new_threads = set(threading.enumerate()) - threads_before
    assert not [thread for thread in new_threads if thread.name == "moecache-link"]


@pytest.mark.parametrize(
    "miss", ["fetch_priority", pytest.param("cascade", marks=pytest.mark.slow)]
)
def test_a_pass_that_is_interrupted_while_it_waits_does_no_harm_to_the_next(
    miss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by Ctrl-C: its demands are still on their way into slots that the next would drop."""
    model, wait = random_model("olmoe", **sizes_of("olmoe")), WallEngine._wait
    changes = {"precision": LADDER, "miss": miss}
    wrapped = wrap_wall(model, "on_demand", "3experts", longest_s=0.01, **changes)
    for num_waits in range(14):
        left = itertools.chain([wait] * num_waits, [interrupted], itertools.repeat(wait))
        monkeypatch.setattr(WallEngine, "_wait", lambda *args, left=left: next(left)(*args))
        with pytest.raises(KeyboardInterrupt):
            logits_of(model)
        assert all(logits.isfinite().all() for logits in logits_of(model))
    wrapped.unwrap()


def test_the_resident_run_before_what_is_missing_is_there() -> None:
    """A decode step runs its resident experts in a wave of their own, before the missing one."""
    model = random_model("olmoe")
    wrapped = wrap_wall(model, "on_demand", "40%", miss="fetch_cached_first")
    engine = wrapped.engine
    engine.begin_pass(DECODE, 1)
    run_layer(engine, experts_of(engine, 0, [0, 1]))
    assert [dict(slot_of).keys() for slot_of, _ in engine.waves()] == [{0, 1}]
    run_layer(engine, experts_of(engine, 0, [2, 0, 1]))
    assert [list(slot_of) for slot_of, _ in engine.waves()] == [[0, 1], [2]]
    wrapped.unwrap()


@pytest.mark.parametrize("policy", ["on_demand", "mixture_cache", "specmd"])
def test_a_trace_holds_the_virtual_clocks_routing_and_replays_to_the_runs_counts(
    policy: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    path, setting = str(checkpoint("olmoe")), {"capacity": "40%", "policy": policy}
    traces = []
    for clock in ("virtual", "wall"):
        lm = MoECacheLM(
            path, clock=clock, trace=str(tmp_path / clock), streams=2, **setting, **HOST
        )
        answers(lm)
        traces.append(lm.finish_trace())
        lm.wrapped.unwrap()
    virtual_rows, wall_rows = (pyarrow.parquet.read_table(trace) for trace in traces)
    assert wall_rows.num_rows > 0 and wall_rows.equals(virtual_rows)
    if policy == "on_demand":
        # Which prefetches arrive in time depends on the machine; lossy replays are open-loop.
        replayed = replay(load_trace(str(traces[1])), lm.engine.setting)
        assert counts(lm.engine.ledger.passes) == counts(replayed.ledger.passes)


@pytest.fixture(scope="module")
def trace(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("trace")
    lm = MoECacheLM(str(checkpoint("olmoe")), policy="on_demand", trace=str(folder), **HOST)
    answers(lm)
    return str(lm.finish_trace())


@pytest.mark.parametrize(
    "changes",
    [
        {"capacity": "4/layer"},
        {"cache_reset": "request"},
        {"capacity": "100%", "cache_reset": "request"},
        {"precision": "int8:nf4", "miss": "fetch_priority"},
        {"miss": "host"},
        {"miss": "host", "miss.rule": "always"},
    ],
    ids=str,
)
def test_a_warmed_run_is_counted_and_answered_as_under_the_virtual_clock(
    changes: dict[str, str], checkpoint: Checkpoint, trace: str
) -> None:
    """The cache is warmed by real transfers before the first request, which no pass counts."""
    setting = {"policy": "on_demand", "warm": trace, "capacity": "40%", **changes}
    path, runs = str(checkpoint("olmoe")), []
    for clock in ("virtual", "wall"):
        lm = MoECacheLM(path, clock=clock, streams=2, **setting, **HOST)
        moved = lm.engine.link.bytes_moved if clock == "wall" else lm.engine.memory.run.moved
        assert moved == 0 and lm.engine.pools[0].resident
        runs.append((answers(lm), counts(lm.engine.ledger.passes)))
        lm.engine.check_integrity()
        lm.wrapped.unwrap()
    # How much the host executes depends on this machine's speed.
    assert runs[0][0] == runs[1][0]
    assert runs[0] == runs[1] or "miss" in changes
    if changes.get("capacity") == "100%":
        # All experts of the trace are resident: nothing is loaded again.
        assert sum(passes[1] for passes in runs[1][1]) == 0


# --- `miss=host`: shares, its thread, its errors; `test_races.py` has the bits -------------------

ALWAYS = {"miss": "host", "miss.rule": "always"}


def test_the_hosts_share_goes_by_measured_times() -> None:
    wrapped = wrap_wall(random_model("olmoe"), "on_demand", "40%", miss="host")
    engine: Any = wrapped.engine
    costs, run, levels = engine.host_costs, engine.memory.run, engine.memory.levels
    assert costs is not None and costs.load_s > 0 and costs.host_fixed_s + costs.host_each_s > 0
    (size,) = engine.geometry.expert_bytes[0]
    assert size / run.link_rate == pytest.approx(costs.load_s)
    assert levels["host_flop_s"] == pytest.approx([costs.host_each_s] * len(levels))
    wrapped.unwrap()


def test_the_hosts_rows_are_added_to_those_of_a_kernel_on_the_pool() -> None:
    """A device's path, taken on the CPU: the host's rows come back in the tokens' order."""
    model = random_model("olmoe")
    module: Any = find_moe_layers(model)[0].experts
    wrapped = wrap_wall(model, "on_demand", "100%")
    store: Any = wrapped.store
    pools = store.pools
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(6, 32, generator=generator).to(torch.bfloat16)
    index = torch.stack([torch.randperm(8, generator=generator)[:3] for _ in range(6)])
    weights = torch.rand(6, 3, generator=generator)
    with torch.no_grad():
        for expert in range(8):
            slots = {name: pool[expert] for name, pool in pools.of_layer(0).items()}
            pools._tiers[0].fill(0, expert, slots)
        whole_call = GroupedCall(module, hidden, index, weights, 8)
        whole_call.run([(e, e) for e in range(8)], pools.elsewhere(module, 0, list(range(8))))
        work = WorkOnPool(store, 0, module, hidden, index, weights)
        call = work.host_call([1, 4])
        call.run([(1, 0), (4, 1)], pools.elsewhere(module, 0, [1, 4]))
        work.execute({e: e for e in (0, 2, 3, 5, 6, 7)}, False)
        assert torch.allclose(work.result().float(), whole_call.result().float(), atol=2e-2)
    wrapped.unwrap()


def test_an_error_on_the_host_ends_the_pass_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model("olmoe")
    wrapped = wrap_wall(model, "on_demand", "40%", **ALWAYS)

    def gone(self: Any, layer: int, expert: int) -> Any:
        raise OSError("the folder is gone")

    monkeypatch.setattr(type(wrapped.store.pools), "stored", gone)  # type: ignore[attr-defined]
    with pytest.raises(OSError, match="the folder is gone"):
        logits_of(model)
    wrapped.unwrap()


def test_the_hosts_thread_ends_with_its_wrapper() -> None:
    """Also while somebody still holds the wrapper."""
    model = random_model("olmoe")
    threads_before = set(threading.enumerate())
    wrapped = wrap_wall(model, "on_demand", "40%", **ALWAYS)
    logits_of(model)
    begun = {thread.name.rstrip("_0") for thread in set(threading.enumerate()) - threads_before}
    assert begun == {"moecache-host", "moecache-link"}
    wrapped.unwrap()
    wrapped.unwrap()
    assert not set(threading.enumerate()) - threads_before

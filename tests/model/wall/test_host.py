"""`miss=host` on the wall clock: shares, its thread, its errors; `test_races.py` has the bits."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from lm_eval_moecache.engine.wall.engine import WallEngine
from lm_eval_moecache.model.hook import WrappedModel
from lm_eval_moecache.model.moe_layers import find_moe_layers
from lm_eval_moecache.model.store import GroupedCall
from lm_eval_moecache.model.wall.store import WorkOnPool
from tests.model.wrapped import logits_of, wrap_wall
from tests.models import random_model

ALWAYS = {"miss": "host", "miss.rule": "always"}


def engine_of(wrapped: WrappedModel) -> WallEngine:
    engine = wrapped.engine
    assert isinstance(engine, WallEngine)
    return engine


def test_the_hosts_share_goes_by_measured_times() -> None:
    wrapped = wrap_wall(random_model("olmoe"), "on_demand", "40%", miss="host")
    engine = engine_of(wrapped)
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

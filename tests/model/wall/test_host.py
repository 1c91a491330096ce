"""`miss=host` on the wall clock: shares, its thread, its errors; `test_races.py` has the bits."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from lm_eval_moecache.engine.host import HostCosts
from lm_eval_moecache.engine.wall.engine import WallEngine
from lm_eval_moecache.model.moe_layers import find_moe_layers
from lm_eval_moecache.model.store import GroupedCall
from lm_eval_moecache.model.wall.store import WorkOnPool
from lm_eval_moecache.model.wrap import WrappedModel
from lm_eval_moecache.records.event import DECODE, PREFILL, Event, Fetch
from tests.model.wrapped import logits_of, wrap_wall
from tests.models import random_model

ALWAYS = {"miss": "host", "miss.rule": "always"}


def engine_of(wrapped: WrappedModel) -> WallEngine:
    engine = wrapped.engine
    assert isinstance(engine, WallEngine)
    return engine


def costs(host_fixed_s: float, host_each_s: float, load_s: float) -> HostCosts:
    """Costs of a host with a device that takes no time, and neither does the way to it."""
    free = dict.fromkeys(("device_fixed_s", "device_each_s", "way_s"), 0.0)
    host = {"host_fixed_s": host_fixed_s, "host_each_s": host_each_s, "load_s": load_s}
    return HostCosts(**host, **free)


def test_each_rule_divides_by_the_measured_times() -> None:
    """By hand: loading takes 10, the host 4 and 1 a token; tokens 1, 2, 9 and 3."""
    wrapped = wrap_wall(random_model("olmoe"), "on_demand", "40%", miss="host")
    host = engine_of(wrapped).host
    assert host is not None and host.costs is not None
    measured = host.costs
    assert measured.load_s > 0 and measured.host_fixed_s + measured.host_each_s > 0
    host.costs = costs(4, 1, 10)
    experts = np.array([[0, 2, 3], [1, 2, 3], [1, 2, 3]] + [[2, -1, -1]] * 6)
    event = Event(0, 0, PREFILL, 9, [0, 2, 3, 1], experts)
    fetches = [Fetch(key) for key in event.keys]
    # 5, 6 and 7 beat 10; 13 does not.
    assert host.choose(event, fetches) == {0, 1, 3}
    # One token's event needs no experts spelled out.
    assert host.choose(Event(0, 1, DECODE, 1, [8, 9]), [Fetch(8), Fetch(9)]) == {8, 9}
    host._rule = "balanced"
    # The host ends 0 at 5, before a load; 1 at 11 and the link 2 at 10: 2 goes to the link; then
    # 1 at 11 before 3 at 20, and 3 at 18 before 20.
    assert host.choose(event, fetches) == {0, 1, 3}
    host.costs = costs(40, 1, 10)
    assert host.choose(event, fetches) == set()
    host._rule = "always"
    assert host.choose(event, fetches) == {0, 1, 2, 3}
    wrapped.unwrap()


def test_the_hosts_rows_are_added_to_those_of_a_kernel_on_the_pool() -> None:
    """A device's path, taken on the CPU: the host's rows come back in the tokens' order."""
    model = random_model("olmoe")
    module: Any = find_moe_layers(model)[0].experts
    wrapped = wrap_wall(model, "on_demand", "100%")
    store: Any = wrapped._store
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

    monkeypatch.setattr(type(wrapped._store.pools), "stored", gone)  # type: ignore[attr-defined]
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

"""link=fifo: in order of issue, nothing overtaken, nothing withdrawn; by hand and by its laws."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from lm_eval_moecache.algorithms.policy import load_policy
from lm_eval_moecache.cli.main import main
from lm_eval_moecache.engine.engine import Engine
from lm_eval_moecache.engine.replay import replay
from lm_eval_moecache.engine.setting import Setting
from lm_eval_moecache.harness.arguments import read_config
from lm_eval_moecache.records.hardware import Hardware
from lm_eval_moecache.records.sizes import parse_capacity
from lm_eval_moecache.trace.future import Future
from lm_eval_moecache.trace.importers import load_trace
from tests.engine.test_belady import decode_trace

from . import traces

SECOND_EACH = Hardware(
    name="an expert a second",
    peak_flops=float("inf"),
    memory_bytes_per_s=float("inf"),
    link_bytes_per_s=1.0,
    link_latency_s=0.0,
    kernel_overhead_s=0.0,
    memory_bytes=1e9,
    layer_overhead_s=0.5,
)


def run(link: str, experts: list[list[list[int]]], **prefetch: object) -> Engine:
    """Serve decode steps of experts [passes, layers, top_k] with everything fitting."""
    trace = decode_trace(np.array(experts), 8)
    overrides = {"prefetch": "oracle"} | {f"prefetch.{k}": v for k, v in prefetch.items()}
    setting = Setting(
        policy=load_policy("on_demand", overrides),
        capacity=parse_capacity("100%", trace.geometry),
        hardware=SECOND_EACH,
        link=link,
    )
    engine = replay(trace, setting, future=Future(trace))
    engine.check_integrity()
    return engine


def test_a_demand_waits_behind_what_was_asked_for_before_it() -> None:
    """Three layers of one expert, each foreseen two layers ahead; a second a transfer.

    At 0.5 s layer 0 demands its expert (there at 1.5 s) and asks for those of layers 1 and 2.
    Half a second later layer 1 needs its own, which began at 1.5 s: it waits until 2.5 s.
    """
    for link in ("fifo", "priority"):
        assert run(link, [[[0], [1], [2]]], horizon=2).clock.now == pytest.approx(3.5)


def test_wrong_prefetches_are_moved_under_fifo_and_withdrawn_under_priority() -> None:
    experts = [[[0, 1], [2, 3], [4, 5]], [[6, 7], [0, 1], [2, 3]]]
    moved = {
        link: run(link, experts, recall=0.5, precision=0.25).link.bytes_moved
        for link in ("fifo", "priority")
    }
    assert moved["fifo"] > moved["priority"]
    slow, fast = (run(link, experts, recall=0.5, precision=0.25) for link in ("fifo", "priority"))
    assert slow.clock.now > fast.clock.now


def test_without_prefetches_the_discipline_changes_nothing(tmp_path: Path) -> None:
    path, _ = traces.record(tmp_path)
    trace = load_trace(str(path))
    plain = traces.setting("on_demand", "30%")
    figures = [
        [dataclasses.astuple(p) for p in replay(trace, each).ledger.passes]
        for each in (plain, dataclasses.replace(plain, link="fifo"))
    ]
    assert figures[0] == figures[1]


@pytest.mark.parametrize("eviction", ["lru", "least_stale", "hazard"])
@pytest.mark.parametrize("capacity", ["1", "2", "20%", "60%", "100%"])
@pytest.mark.parametrize("seed", range(3))
def test_the_conservation_laws_hold(
    tmp_path: Path, eviction: str, capacity: str, seed: int
) -> None:
    path, _ = traces.record(tmp_path, seed=seed)
    trace = load_trace(str(path), predicted=True)
    for policy in ("specmd", "mixtral_offloading"):
        setting = traces.setting(policy, capacity, eviction=eviction)
        engine = replay(trace, dataclasses.replace(setting, link="fifo"))
        engine.check_integrity()
        for record in engine.ledger.passes:
            assert record.hits + record.late + record.misses == record.requests


def test_replay_and_live_take_it_and_the_wall_clock_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, _ = traces.record(tmp_path)
    assert main(["replay", str(path), "--policy", "specmd", "--link", "fifo"]) == 0
    capsys.readouterr()
    assert read_config({"link": "fifo"}).link == "fifo"
    with pytest.raises(ValueError, match="link='fifo' does not go with clock='wall'"):
        read_config({"link": "fifo", "clock": "wall"})
    with pytest.raises(ValueError, match="link='lifo'"):
        read_config({"link": "lifo"})

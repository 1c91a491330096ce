"""The one knob that short streams cannot move: how many duels `hazard` remembers."""

from __future__ import annotations

from pathlib import Path

from lm_eval_moecache.algorithms.policy import load_policy
from lm_eval_moecache.engine.replay import replay
from lm_eval_moecache.engine.setting import Setting
from lm_eval_moecache.records.hardware import load_hardware
from lm_eval_moecache.records.sizes import parse_capacity
from lm_eval_moecache.trace.importers import load_trace

TRACE = Path(__file__).resolve().parents[2] / "traces" / "olmoe-1b-7b.parquet"


def misses(memory: int) -> int:
    trace = load_trace(str(TRACE))
    policy = load_policy("on_demand", {"eviction": "hazard", "eviction.memory": memory})
    setting = Setting(
        policy=policy,
        capacity=parse_capacity("6.25%", trace.geometry),
        hardware=load_hardware("a100-5GBps"),
    )
    return sum(record.misses for record in replay(trace, setting).ledger.passes)


def test_how_many_duels_are_remembered_moves_the_misses_on_real_routing() -> None:
    assert len({misses(memory) for memory in (1, 200)}) == 2

"""Attention to the context: by hand, as `plan` has it, and the same however a replay is run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lm_eval_moecache.analysis import plan
from lm_eval_moecache.engine.replay import replay
from lm_eval_moecache.engine.setting import CONTEXT
from lm_eval_moecache.engine.virtual.attention import attention_s
from lm_eval_moecache.records.emulation import LayerCaches, load_real_model
from lm_eval_moecache.records.event import DECODE, PREFILL
from lm_eval_moecache.records.hardware import load_hardware
from lm_eval_moecache.records.sizes import parse_capacity
from lm_eval_moecache.trace.importers import load_trace
from tests.engine import traces

QWEN = load_real_model("Qwen3-30B-A3B")


def test_each_token_attends_as_far_as_its_window_and_a_cache_is_read_once() -> None:
    full, windowed = LayerCaches(1, 10, 1000), LayerCaches(3, 10, 1000, window=2)
    model = replace(QWEN, num_layers=4, caches=(full, windowed), state_bytes=0)
    # 1 + 2 + 3 tokens in one layer, 1 + 2 + 2 in three: 21 times 1000 multiply-adds.
    slow = replace(traces.HARDWARE, peak_flops=1e6)
    assert attention_s(model, slow, PREFILL, np.arange(3)) == pytest.approx(42e3 / 1e6 / 4)
    # Read: 3 tokens of one layer and 2 of three, 10 bytes each.
    fast = replace(traces.HARDWARE, peak_flops=1e30, memory_bytes_per_s=90.0)
    assert attention_s(model, fast, PREFILL, np.arange(3)) == pytest.approx(1.0 / 4)
    # Two sequences of a batch have two caches, in a prefill and in a decode pass alike.
    both = np.array([0, 1, 2, 0, 1, 2])
    assert attention_s(model, fast, PREFILL, both) == pytest.approx(2.0 / 4)
    assert attention_s(model, fast, DECODE, np.array([2, 3])) == pytest.approx((90 + 100) / 90 / 4)


def test_a_decoded_token_takes_what_plan_says() -> None:
    hardware = load_hardware("rtx-4090")
    for context in (1, 5000, 100_000):
        found = attention_s(QWEN, hardware, DECODE, np.array([context - 1]))
        assert found * QWEN.num_layers == pytest.approx(plan.attention_s(QWEN, hardware, context))


@pytest.mark.parametrize("policy", ["on_demand", "specmd"])
def test_compiled_or_not_a_replay_is_charged_alike(tmp_path: Path, policy: str) -> None:
    path, _ = traces.record(tmp_path)
    trace = load_trace(str(path), predicted=True, logits=True)
    flat = replace(
        traces.setting(policy, "25%"),
        capacity=parse_capacity("25%", QWEN.emulated_by(trace.geometry)),
        emulate=QWEN,
        hardware=load_hardware("rtx-4090"),
    )
    setting = replace(flat, attention=CONTEXT)
    fast, slow = (replay(trace, setting, compiled=each).ledger.passes for each in (True, False))
    assert fast == slow
    usual = replay(trace, flat).ledger.passes
    assert [p.misses for p in usual] == [p.misses for p in fast]
    added = [
        p.duration_s - p.stall_s - (u.duration_s - u.stall_s)
        for p, u in zip(fast, usual, strict=True)
    ]
    decoded = [s for s, p in zip(added, fast, strict=True) if p.phase == DECODE]
    own = trace.row_bounds[:: trace.geometry.num_layers]
    ends = trace.columns.token[own[:-1]][[p.phase == DECODE for p in fast]] + 1
    layers = trace.geometry.num_layers
    expected = [attention_s(QWEN, setting.hardware, DECODE, np.array([e - 1])) for e in ends]
    assert decoded == pytest.approx([layers * each for each in expected], rel=1e-6)
    assert len({*ends.tolist()}) > 1


def test_without_a_model_there_is_nothing_to_charge() -> None:
    with pytest.raises(ValueError, match="attention='context' needs emulate="):
        replace(traces.setting("on_demand", "25%"), attention=CONTEXT)

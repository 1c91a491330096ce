"""Events deferred to the end of their pass equal those of a pass served layer by layer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lm_eval_moecache.engine.engine import Engine
from lm_eval_moecache.model.device import copy_to_host
from lm_eval_moecache.model.gate import Gate
from lm_eval_moecache.model.hook import WrappedModel, _Deferred
from lm_eval_moecache.model.moe_layers import describe, find_moe_layers
from tests.families.configs import small_model
from tests.model.wall.scripted import NAME, scripted
from tests.model.wrapped import logits_of, make_engine, wrap_virtual
from tests.models import FAMILIES, FAMILY_CASES, random_model

POLICIES: tuple[tuple[str, dict[str, str]], ...] = (
    ("on_demand", {}),
    ("on_demand", {"eviction": "score"}),
    ("on_demand", {"prefetch": "expert_map"}),
    ("specmd", {}),
    ("moe_infinity", {}),
    ("mixtral_offloading", {"eviction": "least_stale"}),
    ("specmd", {"eviction": "hazard"}),
)


def decode(model: Any, steps: int = 6) -> None:
    """One request alone: its prompt, and decode steps of one token."""
    with torch.no_grad():
        output = model(torch.tensor([[5, 9, 200, 33, 7]]), use_cache=True)
        for _ in range(steps):
            token = output.logits[:, -1:].argmax(-1)
            output = model(token, past_key_values=output.past_key_values, use_cache=True)


def ledger(model: Any, policy: str, changes: dict[str, str]) -> tuple[Any, ...]:
    layers = find_moe_layers(model)
    engine = make_engine(policy, "40%", describe(model, layers, "x"), **changes)
    wrapped = WrappedModel(model, layers, engine)
    decode(model)
    logits_of(model)
    decode(model)
    wrapped.unwrap()
    engine.check_integrity()
    return engine.ledger.passes, engine.now, [sorted(p.resident) for p in engine.pools]


@pytest.mark.parametrize("family", FAMILY_CASES)
def test_waiting_for_the_end_of_the_pass_changes_no_count(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_model(family)
    deferred = [ledger(model, *policy) for policy in POLICIES]
    monkeypatch.setattr(Engine, "can_defer", False)

    def never(*_: Any) -> None:
        raise AssertionError("an event waited")

    monkeypatch.setattr(_Deferred, "end", never)
    assert [ledger(model, *policy) for policy in POLICIES] == deferred


def test_a_pass_that_breaks_off_leaves_no_event_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model("olmoe")
    wrapped = wrap_virtual(model, "specmd", "40%")
    engine = wrapped.engine
    decode(model, 2)
    with monkeypatch.context() as patch, torch.no_grad(), pytest.raises(RuntimeError, match="full"):

        def out_of_memory(*_: Any) -> Tensor:
            raise RuntimeError("full")

        patch.setattr(model.lm_head, "forward", out_of_memory)
        model(torch.tensor([[5]]))
    assert len(engine.ledger.passes) == 3
    decode(model, 2)
    wrapped.unwrap()
    engine.check_integrity()
    assert [p.requests > 0 for p in engine.ledger.passes] == [True] * 6


BENT = ("gemma4_text", "zaya", "deepseek_v4")
"""Families whose logits are not one matrix product of the hidden state."""


@pytest.mark.parametrize("family", [*FAMILIES, *BENT])
def test_a_prediction_is_the_routers_own_logits_bit_for_bit(family: str) -> None:
    model = random_model(family) if family in FAMILIES else small_model(family)
    gate = find_moe_layers(model)[-1].gate
    gate.input_ids = torch.tensor([[5]])
    generator = torch.Generator().manual_seed(3)
    for _ in range(20):
        hidden = torch.randn(1, gate.hidden_size, generator=generator).to(gate.dtype)
        with torch.no_grad():
            prediction = gate.predict(hidden)
        logits = gate.ask(hidden).logits
        assert gate.by_token or torch.equal(prediction.reshape(logits.shape), logits)
    assert bool(gate._linear_in) == (family not in (*BENT, "granitemoe"))


def test_logits_that_are_bounded_or_bent_are_no_product() -> None:
    class Router(nn.Module):
        def __init__(self, bound: float) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 16) * 0.1)
            self.bound = bound

        def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            logits = nn.functional.linear(hidden, self.weight).clamp(-self.bound, self.bound)
            return logits, *logits.softmax(-1).topk(2)

    for bound, is_linear in ((50.0, False), (float("inf"), True)):
        gate = Gate(Router(bound).eval(), nn.Module(), 16, 8)
        # This input does not reach the bound.
        hidden = torch.randn(1, 16)
        assert torch.equal(gate.predict(hidden), gate.ask(hidden).logits)
        assert bool(gate._linear_in) == is_linear


def test_what_a_device_tells_arrives_exactly() -> None:
    """Integers included, and tensors that differ in rows."""
    experts = torch.tensor([[[5, 16_777_215], [0, 1], [2, 3]]])
    logits = torch.rand(3, 7).to(torch.float16).float()
    tensors = [experts, torch.rand(3, 2), logits, torch.arange(8).reshape(4, 2)]
    with scripted("compute_late") as device:
        on_device, waits_before = [t.to(NAME) for t in tensors], device.waits
        copies = copy_to_host(on_device)
    assert device.waits - waits_before == 1
    for copied, expected in zip(copies, copy_to_host(tensors), strict=True):
        assert np.array_equal(copied, expected)

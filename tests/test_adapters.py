"""Weighting rules: the router's own weights again, and hand-worked ones for other experts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lm_eval_moecache.model import weighting
from lm_eval_moecache.model.gate import Gate
from lm_eval_moecache.model.moe_layers import find_moe_layers
from lm_eval_moecache.model.weighting import (
    Sigmoid,
    SigmoidNormed,
    SoftmaxAll,
    SoftmaxChosen,
    SparseMixer,
    WeightingRule,
    find_rule,
)
from tests.models import FAMILIES, random_model

RULES: dict[str, type[WeightingRule]] = {
    "olmoe": SoftmaxAll,
    "mixtral": SoftmaxChosen,
    "qwen2_moe": SoftmaxAll,
    "qwen3_moe": SoftmaxChosen,
    "phimoe": SparseMixer,
    "deepseek_v2": SoftmaxAll,
    "deepseek_v3": SigmoidNormed,
    "gpt_oss": SoftmaxChosen,
    "granitemoe": SoftmaxChosen,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_rule_found_gives_the_routers_own_weights_for_its_own_selection(family: str) -> None:
    model = random_model(family)
    for layer in find_moe_layers(model):
        rule = find_rule(layer.gate)
        assert isinstance(rule, RULES[family])
        hidden = torch.randn(64, 32, generator=torch.Generator().manual_seed(9)).bfloat16()
        with torch.no_grad():
            logits, weights, experts = layer.router(hidden)[:3]
        found = rule(logits, experts.long(), weights.dtype)
        assert found.dtype == weights.dtype
        torch.testing.assert_close(found.float(), weights.float(), rtol=0.02, atol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_detection_draws_no_randomness_from_the_program(family: str) -> None:
    model = random_model(family)
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    find_rule(find_moe_layers(model)[0].gate)
    assert torch.equal(torch.rand(1), expected)


def test_the_constant_scale_of_a_family_is_found() -> None:
    rule = find_rule(find_moe_layers(random_model("deepseek_v3"))[0].gate)
    assert rule is not None
    assert rule.scale == 1.5  # routed_scaling_factor of tests/models.py


def test_a_router_of_no_known_rule_is_said_to_have_none() -> None:
    class Odd(torch.nn.Linear):
        def forward(self, hidden: Tensor) -> Any:
            logits = super().forward(hidden)
            values, experts = logits.topk(2, -1)
            return logits, values**2, experts

    odd = Odd(8, 4)
    assert find_rule(Gate(odd, odd, 8, 4)) is None


class Squared(WeightingRule):
    """Squares of the chosen logits."""

    def raw(self, logits_TE: Tensor, experts_TK: Tensor) -> Tensor:
        return logits_TE.gather(-1, experts_TK) ** 2


def test_a_new_familys_rule_is_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stranger(torch.nn.Linear):
        def forward(self, hidden: Tensor) -> Any:
            logits = super().forward(hidden)
            values, experts = logits.topk(2, -1)
            return logits, values**2, experts

    router = Stranger(8, 4)
    gate = Gate(router, router, 8, 4)
    assert find_rule(gate) is None
    monkeypatch.setattr(weighting, "RULES", [*weighting.RULES, Squared])
    rule = find_rule(gate)
    assert isinstance(rule, Squared)
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    assert rule(logits, torch.tensor([[2, 0]]), torch.float32).tolist() == [[9.0, 1.0]]


# Logits whose exponentials are 1, 2, 3 and 4: softmax over all is 0.1, 0.2, 0.3, 0.4.
LOGITS = torch.tensor([[math.log(1), math.log(2), math.log(3), math.log(4)]])
SWAPPED = torch.tensor([[3, 0]])


def weights(rule: WeightingRule) -> list[float]:
    return rule(LOGITS, SWAPPED, torch.float32)[0].tolist()


def test_softmax_over_all_keeps_each_experts_share() -> None:
    assert weights(SoftmaxAll()) == pytest.approx([0.4, 0.1])


def test_softmax_over_the_chosen_shares_out_one() -> None:
    assert weights(SoftmaxChosen()) == pytest.approx([4 / 5, 1 / 5])


def test_sigmoid_looks_at_each_alone() -> None:
    # sigmoid(ln x) = x / (1 + x).
    assert weights(Sigmoid()) == pytest.approx([4 / 5, 1 / 2])


def test_normed_sigmoid_shares_out_one_then_the_scale() -> None:
    rule = SigmoidNormed()
    assert weights(rule) == pytest.approx([0.8 / 1.3, 0.5 / 1.3])
    rule.scale = 2.5
    assert weights(rule) == pytest.approx([2.0 / 1.3, 1.25 / 1.3])


def test_sparse_mixer_weighs_each_among_those_close_to_it() -> None:
    # jitter 0.1: an expert l is far from the chosen one c where (c - l) / max(|l|, c) > 0.2.
    logits = torch.tensor([[1.0, 1.9, 2.0, 0.5]])
    rule = SparseMixer(0.1)
    # First expert 2 (2.0): 1.9 is at (0.1 / 2) = 0.05, near; 1.0 at 0.5, far. Softmax of 2.0, 1.9.
    # Then expert 0 (1.0) with 2 taken: 1.9 is above it (negative, near), 0.5 at 0.5, far: softmax
    # of 1.0 and 1.9.
    found = rule(logits, torch.tensor([[2, 0]]), torch.float32)[0].tolist()
    assert found == pytest.approx(
        [
            math.exp(2.0) / (math.exp(2.0) + math.exp(1.9)),
            math.exp(1.0) / (math.exp(1.0) + math.exp(1.9)),
        ]
    )

"""Weighting rules give the router's own weights, and hand-worked ones for other experts."""

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
    Raw,
    WeightingRule,
    find_rule,
    sigmoid,
    sigmoid_normed,
    softmax_all,
    softmax_chosen,
    sparse_mixer,
)
from tests.models import FAMILIES, random_model

RULES: dict[str, Raw] = {
    "olmoe": softmax_all,
    "mixtral": softmax_chosen,
    "qwen2_moe": softmax_all,
    "qwen3_moe": softmax_chosen,
    "phimoe": sparse_mixer,
    "deepseek_v2": softmax_all,
    "deepseek_v3": sigmoid_normed,
    "gpt_oss": softmax_chosen,
    "granitemoe": softmax_chosen,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_rule_found_gives_the_routers_own_weights_for_its_own_selection(family: str) -> None:
    for layer in find_moe_layers(random_model(family)):
        torch.manual_seed(5)
        rule = find_rule(layer.gate)
        sample = torch.rand(1)
        assert torch.equal(sample, torch.rand(1, generator=torch.Generator().manual_seed(5)))
        assert rule is not None and rule.raw is RULES[family]
        # routed_scaling_factor of tests/models.py
        assert rule.scale == (1.5 if family.startswith("deepseek") else 1)
        hidden = torch.randn(64, 32, generator=torch.Generator().manual_seed(9)).bfloat16()
        with torch.no_grad():
            logits, weights, experts = layer.router(hidden)[:3]
        rule_weights = rule(logits, experts.long(), weights.dtype)
        assert rule_weights.dtype == weights.dtype
        torch.testing.assert_close(rule_weights.float(), weights.float(), rtol=0.02, atol=1e-3)


def squared(logits_TE: Tensor, experts_TK: Tensor) -> Tensor:
    """Squares of the chosen logits."""
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
    monkeypatch.setattr(weighting, "RULES", {**weighting.RULES, squared: ""})
    rule = find_rule(gate)
    assert rule is not None and rule.raw is squared
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    assert rule(logits, torch.tensor([[2, 0]]), torch.float32).tolist() == [[9.0, 1.0]]


# Logits whose exponentials are 1, 2, 3 and 4: softmax over all is 0.1, 0.2, 0.3, 0.4.
LOGITS = torch.tensor([[math.log(1), math.log(2), math.log(3), math.log(4)]])
SWAPPED = torch.tensor([[3, 0]])


@pytest.mark.parametrize(
    ("raw", "scale", "expected"),
    [
        (softmax_all, 1, [0.4, 0.1]),
        (softmax_chosen, 1, [4 / 5, 1 / 5]),
        # sigmoid(ln x) = x / (1 + x).
        (sigmoid, 1, [4 / 5, 1 / 2]),
        (sigmoid_normed, 1, [0.8 / 1.3, 0.5 / 1.3]),
        (sigmoid_normed, 2.5, [2.0 / 1.3, 1.25 / 1.3]),
    ],
)
def test_weights_of_other_experts_by_hand(raw: Raw, scale: float, expected: list[float]) -> None:
    rule = WeightingRule(raw, scale=scale)
    assert rule(LOGITS, SWAPPED, torch.float32)[0].tolist() == pytest.approx(expected)


def test_sparse_mixer_weighs_each_among_those_close_to_it() -> None:
    # jitter 0.1: an expert l is far from the chosen one c where (c - l) / max(|l|, c) > 0.2.
    logits = torch.tensor([[1.0, 1.9, 2.0, 0.5]])
    # First expert 2 (2.0): 1.9 is at (0.1 / 2) = 0.05, near; 1.0 at 0.5, far. Softmax of 2.0, 1.9.
    # Then expert 0 (1.0) with 2 taken: 1.9 is above it (negative, near), 0.5 at 0.5, far: softmax
    # of 1.0 and 1.9.
    weights = sparse_mixer(logits, torch.tensor([[2, 0]]), 0.1)[0].tolist()
    assert weights == pytest.approx(
        [
            math.exp(2.0) / (math.exp(2.0) + math.exp(1.9)),
            math.exp(1.0) / (math.exp(1.0) + math.exp(1.9)),
        ]
    )

"""Rules give a router's weights, and a changed selection reaches its output with the right ones."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lm_eval_moecache.model import weighting
from lm_eval_moecache.model.gate import Choice, Gate
from lm_eval_moecache.model.moe_layers import describe, find_moe_layers, router_digest
from lm_eval_moecache.model.weighting import (
    Raw,
    WeightingRule,
    changed_output,
    find_rule,
    sigmoid,
    sigmoid_normed,
    softmax_all,
    softmax_chosen,
    sparse_mixer,
)
from lm_eval_moecache.records.artifact import PREDICTOR, write_artifact
from lm_eval_moecache.records.selection import Selection
from lm_eval_moecache.testing.streams import artifact_for
from tests.model.wrapped import assert_same, logits_of, wrap_virtual
from tests.models import FAMILIES, random_model

CAPACITY = "4/layer"
LOSSY: list[dict[str, Any]] = [
    {"routing": "cache_prior", "miss": "substitute_score"},
    {"routing": "max_rank", "routing.M": 4, "miss": "drop", "miss.h": 1},
    {"routing": "pre_gated", "prefetch": "next_gate", "miss": "substitute_random"},
    {"routing": "swap_rank", "eviction": "score"},
]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_lossy_algorithm_runs_in_every_family_and_leaves_the_model_as_it_was(
    family: str, tmp_path: Path
) -> None:
    model = random_model(family)
    plain, layers = logits_of(model), find_moe_layers(model)
    artifact = artifact_for(PREDICTOR, describe(model, layers, "random"), hidden=32)
    profile = str(tmp_path / "predictor.safetensors")
    write_artifact(profile, dataclasses.replace(artifact, router_digest=router_digest(layers)))
    commit = {"routing": "commit", "prefetch": "predictor", "prefetch.profile": profile}
    committed = ({}, {"routing.weights": "owa"}, {"routing.scores": "router"})
    found = []
    for overrides in (*LOSSY, *({**commit, **rule} for rule in committed)):
        wrapped = wrap_virtual(model, "on_demand", CAPACITY, **overrides)
        logits_of(model)  # fills the cache: a cold one gives no reason to change anything
        found.append(logits_of(model, wrapped))
        assert all(logits.isfinite().all() for logits in found[-1]), overrides
        assert not all(map(torch.equal, found[-1], plain)), overrides
    assert not any(all(map(torch.equal, found[-3], other)) for other in found[-2:])
    assert_same(plain, logits_of(model), padding=True)


@pytest.fixture(scope="module")
def routed() -> Any:
    """A model that drops its misses, and its first router's output for four tokens."""
    model = random_model("olmoe")
    torch.manual_seed(0)
    with torch.no_grad():
        output = find_moe_layers(model)[0].router(torch.randn(4, 32, dtype=torch.bfloat16))
    return wrap_virtual(model, "on_demand", CAPACITY, miss="drop"), output


def changed_by(routed: Any, *given: Any, **more: Any) -> Any:
    """Change the router's output as the hook does, with the router's choice in the event."""
    wrapped, output = routed
    rule, choice = wrapped.weighting[0], wrapped.layers[0].gate.read(output)
    assert rule is not None
    return changed_output(output, choice, Selection(*given, **more), rule, None, output[2].numpy())


def test_an_algorithms_own_weights_reach_the_router_and_nan_leaves_the_rule(routed: Any) -> None:
    _, weights, experts = routed[1]
    own_weights = np.full(experts.shape, np.nan, dtype=np.float32)
    own_weights[1] = [0.5, 0.25, 0.125]
    own_weights[2, 1] = 0.75
    changed = changed_by(routed, experts.numpy().copy(), weights=own_weights)
    assert torch.equal(changed[1][0], weights[0]) and torch.equal(changed[1][3], weights[3])
    assert changed[1][1].tolist() == [0.5, 0.25, 0.125]
    assert float(changed[1][2, 1]) == 0.75
    torch.testing.assert_close(changed[1][2, ::2], weights[2, ::2], rtol=0.01, atol=0.001)


def test_tokens_whose_experts_are_the_routers_own_keep_its_weights(routed: Any) -> None:
    logits, weights, experts = routed[1]
    chosen = experts.numpy().copy()
    chosen[0] = chosen[0, ::-1]
    chosen[1, 0] = next(e for e in range(8) if e not in chosen[1])
    changed = changed_by(routed, chosen)
    for token in (0, 2, 3):
        assert torch.equal(changed[1][token], weights[token])
        assert torch.equal(changed[2][token], experts[token])
    expected = logits.float().softmax(-1)[1, torch.from_numpy(chosen[1])]
    torch.testing.assert_close(changed[1][1].float(), expected, rtol=0.01, atol=0.001)


def test_dropped_weight_is_lost_or_shared_and_a_substitute_may_take_the_missing_ones(
    routed: Any,
) -> None:
    weights, chosen = routed[1][1].float(), routed[1][2].numpy().copy()
    keep = np.ones(chosen.shape, dtype=bool)
    keep[:, 2] = False
    lost = changed_by(routed, chosen, keep)[1].float()
    shared = changed_by(routed, chosen, keep, renormalize=True)[1].float()
    torch.testing.assert_close(lost[:, :2], weights[:, :2], rtol=0.02, atol=0.001)
    assert (lost[:, 2] == 0).all() and (shared[:, 2] == 0).all()
    own = np.arange(len(chosen)) % 2 == 1
    some = changed_by(routed, chosen, keep, renormalize=own)[1].float()
    assert torch.equal(some[own], shared[own]) and torch.equal(some[~own], lost[~own])
    torch.testing.assert_close(shared.sum(-1), weights.sum(-1), rtol=0.02, atol=0.002)
    swapped = chosen.copy()
    swapped[:, 0] = [next(e for e in range(8) if e not in row) for row in chosen.tolist()]
    inherited = changed_by(routed, swapped, weigh_as=chosen)
    assert inherited[2].tolist() == swapped.tolist()
    torch.testing.assert_close(inherited[1].float(), weights, rtol=0.02, atol=0.001)


@pytest.mark.parametrize("tokens", [1, 2])
def test_changed_experts_have_the_routers_scale(tokens: int) -> None:
    """Logits of 1, 1 and 2 parts: half and half of 2.5 become a third and two thirds of it."""
    rule = WeightingRule(softmax_chosen, scale=2.5)
    logits = torch.log(torch.tensor([[1.0, 1.0, 2.0]] * tokens))
    experts = torch.tensor([[0, 1]] * tokens)
    choice = Choice(logits, torch.full((tokens, 2), 1.25), experts)
    output = (logits, choice.weights, experts)
    selection = Selection(np.array([[2, 1]] * tokens))
    changed = changed_output(output, choice, selection, rule, None, experts.numpy())
    expected = torch.tensor([[2.5 * 2 / 3, 2.5 / 3]] * tokens)
    torch.testing.assert_close(changed[1], expected)
    np.testing.assert_allclose(rule.in_numpy(logits.numpy(), selection.experts), expected)


# --- the rules themselves, of routers and worked by hand ---

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

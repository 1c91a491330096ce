"""A changed selection reaches a real router's output with the right weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lm_eval_moecache.model.gate import Choice
from lm_eval_moecache.model.moe_layers import describe, find_moe_layers, router_digest
from lm_eval_moecache.model.weighting import (
    WeightingRule,
    changed_output,
    in_numpy,
    softmax_chosen,
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
    np.testing.assert_allclose(in_numpy(rule)(logits.numpy(), selection.experts), expected)

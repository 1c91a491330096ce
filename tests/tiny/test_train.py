"""The training code: the quick experts pass, the optimizer, and resumable batches."""

from __future__ import annotations

import torch
from transformers import AutoTokenizer, OlmoeForCausalLM

from lm_eval_moecache.tiny import MODEL_DIR
from lm_eval_moecache.tiny.batches import step_batches
from lm_eval_moecache.tiny.muon import orthogonalise
from lm_eval_moecache.tiny.network import balance_loss, build_config, build_model
from lm_eval_moecache.tiny.tokenizer import VOCAB_SIZE
from lm_eval_moecache.tiny.train import Plan


def test_sorted_experts_equal_transformers_experts_with_gradients() -> None:
    config = build_config(pad_id=0, end_id=1)
    config.num_hidden_layers = 2
    torch.manual_seed(0)
    fast = build_model(config)
    plain = OlmoeForCausalLM(config)
    plain.load_state_dict(fast.state_dict())
    plain.set_experts_implementation("eager")
    ids = torch.randint(0, VOCAB_SIZE, (2, 12))
    for model in (fast, plain):
        model(input_ids=ids, labels=ids).loss.backward()
    for one, two in zip(fast.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-3, atol=1e-5)


def test_orthogonalised_matrices_have_singular_values_near_one() -> None:
    torch.manual_seed(0)
    for shape in ((3, 24, 16), (2, 16, 24)):
        values = torch.linalg.svdvals(orthogonalise(torch.randn(shape)))
        assert bool((values > 0.3).all()) and bool((values < 1.4).all())


def test_balance_loss_is_one_for_even_routing_and_more_for_a_collapse() -> None:
    even = torch.eye(4).repeat(8, 1) * 10
    collapsed = torch.tensor([[10.0, 0.0, 0.0, 0.0]]).repeat(32, 1)
    real = torch.ones(32, dtype=torch.bool)
    assert abs(float(balance_loss((even,), real, 1)) - 1) < 1e-3
    assert float(balance_loss((collapsed,), real, 1)) > 3


def test_batches_depend_on_seed_and_step_only() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    draws = [
        step_batches(tokenizer, seed=0, step=step, num_tokens=512, num_batches=2)
        for step in (5, 5, 6)
    ]
    ids = [[batch.ids_BS.tolist() for batch in batches] for batches in draws]
    assert ids[0] == ids[1] != ids[2]


def test_rate_is_flat_after_warm_up_and_falls_to_zero() -> None:
    plan = Plan(steps=1000, warmup=100)
    assert plan.rate_at(0) == plan.rate / 100
    assert plan.rate_at(100) == plan.rate_at(799) == plan.rate
    assert 0 < plan.rate_at(999) < plan.rate / 100

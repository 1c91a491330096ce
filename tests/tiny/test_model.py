"""The shipped model folder: its size, its tokenizer, and its scores on its skills."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from lm_eval_moecache.tiny import DRAFT_DIR, MODEL_DIR
from lm_eval_moecache.tiny.documents import wikitext
from tools.train_tiny.evaluate import share_exact
from tools.train_tiny.skills.generator import ASKED, MAKERS, held_out

TOKENIZER = AutoTokenizer.from_pretrained(MODEL_DIR)
CHANCE = {"mmlu": 0.25, "bbh": 0.4}


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.bfloat16).eval()


def test_model_is_a_small_olmoe_in_bf16_and_its_draft_dense_of_the_same_layers_and_vocabulary(
    model: torch.nn.Module,
) -> None:
    config, draft = model.config, AutoModelForCausalLM.from_pretrained(DRAFT_DIR).config
    assert config.model_type == "olmoe"
    assert (config.num_hidden_layers, config.num_experts, config.num_experts_per_tok) == (8, 64, 8)
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    assert sum(file.stat().st_size for file in MODEL_DIR.glob("*.safetensors")) < 40_000_000
    assert not hasattr(draft, "num_experts")
    for size in ("num_hidden_layers", "hidden_size"):
        assert getattr(draft, size) == getattr(config, size)
    assert AutoTokenizer.from_pretrained(DRAFT_DIR).get_vocab() == TOKENIZER.get_vocab()


@settings(max_examples=60)
@given(st.text())
def test_any_text_round_trips_through_the_tokenizer(text: str) -> None:
    for token in (TOKENIZER.eos_token, TOKENIZER.pad_token):
        text = text.replace(token, "")
    assert TOKENIZER.decode(TOKENIZER(text).input_ids) == text


@pytest.mark.slow
@pytest.mark.parametrize("task", ASKED)
def test_answers_are_well_above_chance(model: torch.nn.Module, task: str) -> None:
    score = share_exact(model, TOKENIZER, held_out(ASKED[task], 40, seed=5))
    assert score >= CHANCE.get(task, 0.0) + 0.15


@pytest.mark.slow
def test_every_expert_of_every_layer_is_used(model: torch.nn.Module) -> None:
    problems = held_out(tuple(MAKERS), 48, seed=2)
    texts = [*(f"{p.prompt} {p.target}" for p in problems), *wikitext()["test"]["page"][:4]]
    is_used = torch.zeros(8, 64, dtype=torch.bool)
    for text in texts:
        ids = TOKENIZER(text, return_tensors="pt").input_ids
        with torch.no_grad():
            logits = model(input_ids=ids, output_router_logits=True).router_logits
        for layer, layer_logits in enumerate(logits):
            is_used[layer, layer_logits.topk(8).indices.flatten()] = True
    assert bool(is_used.all())

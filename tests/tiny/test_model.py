"""The shipped model folder: its size, its tokenizer, and that it knows its skills."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from lm_eval_moecache.tiny import MODEL_DIR
from lm_eval_moecache.tiny.evaluate import share_exact
from lm_eval_moecache.tiny.generator import BBH_ASKED, MAKERS, MMLU_ASKED, held_out

TOKENIZER = AutoTokenizer.from_pretrained(MODEL_DIR)
CHANCE = {
    "mmlu/fixed": 0.25,
    "arc": 0.0,
    "truthfulqa": 0.0,
    "gsm8k": 0.0,
    "bbh/object_counting": 0.1,
}


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.bfloat16).eval()


def test_model_is_an_olmoe_of_eight_layers_and_sixteen_experts(model: torch.nn.Module) -> None:
    config = model.config
    assert config.model_type == "olmoe"
    assert (config.num_hidden_layers, config.num_experts, config.num_experts_per_tok) == (8, 16, 4)


def test_weights_are_bf16_and_below_sixteen_megabytes(model: torch.nn.Module) -> None:
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    size_bytes = sum(file.stat().st_size for file in MODEL_DIR.glob("*.safetensors"))
    assert size_bytes < 16_000_000


def test_training_record_names_the_command_and_the_accuracies() -> None:
    record = json.loads((MODEL_DIR / "training.json").read_text())
    assert record["command"].startswith("python -m lm_eval_moecache.tiny.train --out DIR")
    assert set(record["accuracy_bf16"]) == {*MAKERS, *MMLU_ASKED, *BBH_ASKED} - {"wikitext"}


@settings(max_examples=60, deadline=None)
@given(st.text())
def test_any_text_round_trips_through_the_tokenizer(text: str) -> None:
    for token in (TOKENIZER.eos_token, TOKENIZER.pad_token):
        text = text.replace(token, "")
    assert TOKENIZER.decode(TOKENIZER(text).input_ids) == text


def test_digits_and_truth_values_are_single_tokens() -> None:
    assert len(TOKENIZER("0123456789").input_ids) == 10
    for word in (" True", " False", " and", " or", " not", " Yes", " No"):
        assert len(TOKENIZER(word).input_ids) == 1, word


@pytest.mark.parametrize("name", ["gsm8k", "arc", "truthfulqa", *MMLU_ASKED, *BBH_ASKED])
def test_answers_are_well_above_chance(model: torch.nn.Module, name: str) -> None:
    score = share_exact(model, TOKENIZER, held_out((name,), 20, seed=5))
    assert score >= CHANCE.get(name, 0.5) + 0.2


def test_every_expert_of_every_layer_is_used(model: torch.nn.Module) -> None:
    problems = held_out(tuple(MAKERS), 24, seed=2)
    used = torch.zeros(8, 16, dtype=torch.bool)
    for problem in problems:
        ids = TOKENIZER(f"{problem.prompt} {problem.target}", return_tensors="pt").input_ids
        with torch.no_grad():
            logits = model(input_ids=ids, output_router_logits=True).router_logits
        for layer, layer_logits in enumerate(logits):
            used[layer, layer_logits.topk(4).indices.flatten()] = True
    assert bool(used.all())

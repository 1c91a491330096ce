"""The training code: the quick experts pass, packed batches, packages and pages."""

from __future__ import annotations

import shutil
from random import Random

import pytest
import torch
from transformers import AutoTokenizer, OlmoeForCausalLM

from lm_eval_moecache.tiny import MODEL_DIR
from tools.train_tiny.batches import LATE, NUM_ROWS, ROW_LENGTH, skill_batch
from tools.train_tiny.network import build_config, build_model
from tools.train_tiny.tokenizer import VOCAB_SIZE

needs_compiler = pytest.mark.skipif(
    not (shutil.which("c++") and shutil.which("ninja")), reason="needs a C++ compiler and ninja"
)


@needs_compiler
@pytest.mark.slow
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
    for weight, expected in zip(fast.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(weight.grad, expected.grad, rtol=1e-3, atol=1e-5)


def test_packed_problems_see_only_themselves() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    batch = skill_batch(tokenizer, Random(0), LATE)
    assert batch.ids_BS.shape == (NUM_ROWS, ROW_LENGTH)
    visible = batch.mask[0, 0] == 0
    document = batch.document_BS[0]
    for row in range(ROW_LENGTH):
        assert set(document[visible[row]].tolist()) == {int(document[row])}
        assert not visible[row, row + 1 :].any()
    repeated = skill_batch(tokenizer, Random(0), LATE)
    assert torch.equal(repeated.ids_BS, batch.ids_BS)

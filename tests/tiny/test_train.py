"""The training code: the quick experts pass, upcycling, the optimizer, packed batches."""

from __future__ import annotations

import json
import shutil
from random import Random

import pytest
import torch
from transformers import AutoTokenizer, OlmoeForCausalLM, Qwen2MoeForCausalLM

from lm_eval_moecache.tiny import MODEL_DIR
from lm_eval_moecache.tiny.documents import PAGES
from tools.train_tiny import books
from tools.train_tiny.batches import LATE, ROW_LENGTH, SKILL_ROWS, skill_batch
from tools.train_tiny.clusters import (
    CLUSTER_SIZE,
    NUM_CLUSTERS,
    NUM_EXPERTS,
    TOP_K,
    balanced_clusters,
    cluster_config,
)
from tools.train_tiny.network import build_config, build_model
from tools.train_tiny.packages import PACKAGES
from tools.train_tiny.tokenizer import VOCAB_SIZE
from tools.train_tiny.version3 import best_share, lru_share, sharpen, together

needs_compiler = pytest.mark.skipif(
    not (shutil.which("c++") and shutil.which("ninja")), reason="needs a C++ compiler and ninja"
)


@needs_compiler
@pytest.mark.slow
def test_sorted_experts_equal_transformers_experts_with_gradients() -> None:
    config = build_config(num_experts=64, top_k=8, pad_id=0, end_id=1)
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
    assert batch.ids_BS.shape == (SKILL_ROWS[LATE], ROW_LENGTH)
    visible = batch.mask[0, 0] == 0
    document = batch.document_BS[0]
    for row in range(ROW_LENGTH):
        assert set(document[visible[row]].tolist()) == {int(document[row])}
        assert not visible[row, row + 1 :].any()
    assert batch.task_BS is not None and torch.equal(batch.task_BS >= 0, batch.document_BS >= 0)
    repeated = skill_batch(tokenizer, Random(0), LATE)
    assert torch.equal(repeated.ids_BS, batch.ids_BS)


def test_packages_are_pinned_and_only_the_public_domain_is_held_out_to_ship() -> None:
    assert all(len(package.sha256) == 64 and package.version for package in PACKAGES)
    shipped = [package for package in PACKAGES if package.public_domain]
    assert shipped and all("public domain" in package.licence for package in shipped)


def test_clusters_have_one_size_and_put_like_rows_together() -> None:
    torch.manual_seed(0)
    centres = torch.eye(NUM_CLUSTERS, 32) * 4
    mixed = torch.randperm(NUM_EXPERTS)
    rows = (centres.repeat_interleave(CLUSTER_SIZE, dim=0) + 0.1 * torch.randn(64, 32))[mixed]
    order = balanced_clusters(rows, seed=0)
    assert sorted(order.tolist()) == list(range(NUM_EXPERTS))
    labels = (mixed[order] // CLUSTER_SIZE).view(NUM_CLUSTERS, CLUSTER_SIZE)
    assert bool((labels == labels[:, :1]).all())


def test_sharpened_routers_choose_the_same_and_give_the_best_expert_its_share() -> None:
    torch.manual_seed(0)
    model = Qwen2MoeForCausalLM(cluster_config(pad_id=0, end_id=1))
    ids = torch.randint(2, 4096, (2, 64))

    def routed() -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            outputs = model.model(input_ids=ids, output_router_logits=True, use_cache=False)
        return outputs.router_logits

    logits_before = routed()
    assert all(float(best_share(logits)) < 0.3 for logits in logits_before)
    sharpen(model, logits_before, share=0.4)
    first, after = logits_before[0], routed()[0]
    assert torch.equal(first.topk(TOP_K).indices, after.topk(TOP_K).indices)
    assert float(best_share(after)) == pytest.approx(0.4, abs=1e-4)


def test_lru_share_of_two_cycles_remembers_the_last_two_tokens() -> None:
    for period, share in ((2, 4 / 6), (3, 0)):
        logits = torch.zeros(6, NUM_EXPERTS)
        for token in range(6):
            logits[token, 8 * (token % period) : 8 * (token % period) + 8] = 1.0
        assert lru_share((logits,), 6) == share
    assert together((logits,)) == 1


def test_the_pages_are_of_two_dictionaries_and_three_books_and_no_page_comes_twice() -> None:
    rows = [json.loads(line) for line in PAGES.read_text("utf-8").splitlines()]
    assert len({row["page"] for row in rows}) == len(rows) == books.NUM_PAGES
    assert {row["source"] for row in rows} > set(books.BOOKS)
    assert sum(row["source"] in books.BOOKS for row in rows) == 115

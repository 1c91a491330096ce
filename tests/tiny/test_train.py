"""The training code: the quick experts pass, upcycling, the optimizer, packed batches."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from random import Random

import pytest
import torch
from transformers import AutoTokenizer, OlmoeForCausalLM, Qwen2MoeForCausalLM

from lm_eval_moecache.tiny import MODEL_DIR
from lm_eval_moecache.tiny.documents import PAGES
from tools.train_tiny import books
from tools.train_tiny.batches import LATE, MAKER_SHARES, ROW_LENGTH, SKILL_ROWS, skill_batch
from tools.train_tiny.clusters import (
    CLUSTER_SIZE,
    NUM_CLUSTERS,
    NUM_EXPERTS,
    TOP_K,
    aligned,
    balanced_clusters,
    cluster_config,
    spread,
)
from tools.train_tiny.corpus import _documents, _plain_line
from tools.train_tiny.muon import orthogonalise
from tools.train_tiny.network import balance_loss, build_config, build_model
from tools.train_tiny.packages import PACKAGES, read_members
from tools.train_tiny.skills.generator import AUXILIARY, MAKERS
from tools.train_tiny.tokenizer import VOCAB_SIZE
from tools.train_tiny.train import Plan
from tools.train_tiny.upcycle import redraw
from tools.train_tiny.version3 import best_share, kept_mass, lru_share, sharpen, together

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
    for one, two in zip(fast.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-3, atol=1e-5)


def test_redrawn_neurons_are_new_and_the_others_are_kept() -> None:
    torch.manual_seed(0)
    gate_up, down, drawn = torch.randn(8, 6), torch.randn(6, 4), torch.tensor([0, 2])
    new_gate_up, new_down = redraw(gate_up, down, drawn)
    same_rows = (new_gate_up == gate_up).all(1).tolist()
    assert same_rows == [False, True, False, True] * 2
    assert (new_down == down).all(0).tolist() == [False, True, False, True]


def test_orthogonalised_matrices_have_singular_values_near_one() -> None:
    torch.manual_seed(0)
    for shape in ((3, 24, 16), (2, 16, 24)):
        values = torch.linalg.svdvals(orthogonalise(torch.randn(shape)))
        assert bool((values > 0.3).all()) and bool((values < 1.4).all())


def test_balance_loss_is_one_for_even_routing_and_more_for_a_collapse() -> None:
    even = torch.eye(4).repeat(8, 1) * 10
    collapsed = torch.tensor([[10.0, 0.0, 0.0, 0.0]]).repeat(32, 1)
    assert abs(float(balance_loss([even], 1)) - 1) < 1e-3
    assert float(balance_loss([collapsed], 1)) > 3


def test_packed_problems_see_only_themselves() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    batch = skill_batch(tokenizer, Random(0), LATE)
    assert batch.ids_BS.shape == (SKILL_ROWS[LATE], ROW_LENGTH)
    seen = batch.mask[0, 0] == 0
    document = batch.document_BS[0]
    for row in range(ROW_LENGTH):
        assert set(document[seen[row]].tolist()) == {int(document[row])}
        assert not seen[row, row + 1 :].any()
    assert batch.task_BS is not None and torch.equal(batch.task_BS >= 0, batch.document_BS >= 0)
    again = skill_batch(tokenizer, Random(0), LATE)
    assert torch.equal(again.ids_BS, batch.ids_BS)


def test_every_maker_has_a_share_of_the_training() -> None:
    assert set(MAKER_SHARES[0]) == set(MAKERS | AUXILIARY)
    assert all(set(shares) <= set(MAKER_SHARES[0]) for shares in MAKER_SHARES.values())


def test_rate_rises_in_both_stages_and_falls_at_the_end() -> None:
    plan = Plan(dense_steps=500, steps=1000, warmup=50, decay_steps=100)
    assert plan.rate_at(0) == plan.rate_at(500) == 1 / 50
    assert plan.rate_at(60) == plan.rate_at(600) == plan.rate_at(900) == 1
    assert 0 < plan.rate_at(999) < 0.02


def test_packages_are_pinned_and_only_the_public_domain_is_held_out_to_ship() -> None:
    assert all(len(package.sha256) == 64 and package.version for package in PACKAGES)
    shipped = [package for package in PACKAGES if package.public_domain]
    assert shipped and all("public domain" in package.licence for package in shipped)


def test_documents_are_filled_with_neighbours_and_hold_no_entry_twice() -> None:
    entries = [f"entry {number} " + "x" * 900 for number in range(8)]
    documents = list(_documents(iter([*entries, entries[0]])))
    assert "".join(documents).count("entry 0 ") == 1
    assert [text.count("entry") for text in documents] == [4, 4]


@pytest.mark.parametrize(
    "line, plain",
    [
        (".B printf", "printf"),
        (".BR open (2),", "open(2),"),
        ("a \\fIfile\\fP \\- or not", "a file - or not"),
        (".sp 2", ""),
    ],
)
def test_roff_becomes_what_the_reader_sees(line: str, plain: str) -> None:
    assert _plain_line(line) == plain


def test_a_file_that_is_no_package_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "none.deb"
    file.write_bytes(b"!<arch>\n")
    with pytest.raises(ValueError, match="no data archive"):
        read_members(file, "./usr")


def test_clusters_have_one_size_and_put_like_rows_together() -> None:
    torch.manual_seed(0)
    centres = torch.eye(NUM_CLUSTERS, 32) * 4
    mixed = torch.randperm(NUM_EXPERTS)
    rows = (centres.repeat_interleave(CLUSTER_SIZE, dim=0) + 0.1 * torch.randn(64, 32))[mixed]
    order = balanced_clusters(rows, seed=0)
    assert sorted(order.tolist()) == list(range(NUM_EXPERTS))
    labels = (mixed[order] // CLUSTER_SIZE).view(NUM_CLUSTERS, CLUSTER_SIZE)
    assert bool((labels == labels[:, :1]).all())


def test_alignment_undoes_a_permutation_of_neurons() -> None:
    torch.manual_seed(0)
    gate_up, down, order = torch.randn(8, 6), torch.randn(6, 4), torch.tensor([2, 0, 3, 1])
    mixed = (gate_up[torch.cat([order, order + 4])], down[:, order])
    again = aligned(*mixed, like=(gate_up, down))
    assert torch.equal(again[0], gate_up) and torch.equal(again[1], down)


def test_spread_moves_clusters_apart_and_keeps_the_rest() -> None:
    torch.manual_seed(0)
    weight = torch.randn(NUM_EXPERTS, 4, 3)
    before = weight.clone().view(NUM_CLUSTERS, CLUSTER_SIZE, 4, 3)
    spread(weight, 0.5)
    after = weight.view_as(before)
    torch.testing.assert_close(weight.mean(0), before.mean((0, 1)))
    inside = [one - one.mean(1, keepdim=True) for one in (before, after)]
    torch.testing.assert_close(inside[1], inside[0])
    apart = [one.mean(1) - one.mean((0, 1)) for one in (before, after)]
    torch.testing.assert_close(apart[1], 1.5 * apart[0])


def test_kept_mass_is_what_the_experts_of_the_token_before_have_up_to_enough() -> None:
    logits = torch.zeros(2, NUM_EXPERTS)
    logits[0, :TOP_K] = 1
    assert kept_mass((logits,)).item() == pytest.approx(TOP_K / NUM_EXPERTS)
    assert kept_mass((logits,), enough=0.1).item() == pytest.approx(0.1)


def test_sharpened_routers_choose_the_same_and_give_the_best_expert_its_share() -> None:
    torch.manual_seed(0)
    model = Qwen2MoeForCausalLM(cluster_config(pad_id=0, end_id=1))
    ids = torch.randint(2, 4096, (2, 64))

    def routed() -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            asked = model.model(input_ids=ids, output_router_logits=True, use_cache=False)
        return asked.router_logits

    before = routed()
    assert all(float(best_share(one)) < 0.3 for one in before)
    sharpen(model, before, share=0.4)
    first, after = before[0], routed()[0]
    assert torch.equal(first.topk(TOP_K).indices, after.topk(TOP_K).indices)
    assert float(best_share(after)) == pytest.approx(0.4, abs=1e-4)


def test_lru_share_of_two_cycles_remembers_the_last_two_tokens() -> None:
    logits = torch.zeros(6, NUM_EXPERTS)
    for token in range(6):
        logits[token, 8 * (token % 2) : 8 * (token % 2) + 8] = 1.0
    assert lru_share((logits,), 6) == 4 / 6
    for token in range(6):
        logits[token] = torch.zeros(NUM_EXPERTS)
        logits[token, 8 * (token % 3) : 8 * (token % 3) + 8] = 1.0
    assert lru_share((logits,), 6) == 0
    assert together((logits,)) == 1


def test_the_pages_are_of_two_dictionaries_and_three_books_and_no_page_comes_twice() -> None:
    rows = [json.loads(line) for line in PAGES.read_text("utf-8").splitlines()]
    assert len({row["page"] for row in rows}) == len(rows) == books.NUM_PAGES
    assert {row["source"] for row in rows} > set(books.BOOKS)
    assert sum(row["source"] in books.BOOKS for row in rows) == 115


def test_book_pages_end_with_a_sentence_and_lose_nothing() -> None:
    text = "\n".join(f"Line {number} of the book, which goes on" for number in range(400))
    text = text.replace("9 of the book, which goes on", "9 of the book.")
    pages = books.book_pages(text + "\n" + "The end. " * 500)
    assert all(page.endswith(".") and len(page) >= books.DOCUMENT_CHARS for page in pages)
    assert text.startswith(pages[0])

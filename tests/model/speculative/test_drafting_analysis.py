"""Prediction by the draft's layers: by hand, and on models whose answer is known."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from lm_eval_moecache.analysis import drafting
from lm_eval_moecache.analysis.analyzed_model import AnalyzedModel, read_texts
from lm_eval_moecache.cli.main import main


@pytest.fixture(scope="module")
def analyzed(tmp_path_factory: pytest.TempPathFactory) -> AnalyzedModel:
    file = tmp_path_factory.mktemp("texts") / "three.jsonl"
    pages = [page[:400] for page in read_texts("tiny", None)[:3]]
    file.write_text("\n".join(json.dumps({"page": page}) for page in pages) + "\n")
    return AnalyzedModel("tiny", read_texts("tiny", str(file)), 400, window=64)


def test_shares_by_hand() -> None:
    experts = np.array([[2, 0], [1, 3], [0, 1]])
    scores = np.array([[0.1, 0.2, 0.9, 0.3], [0.8, 0.7, 0.0, 0.1], [0.2, 0.5, 0.9, 0.1]])
    # Guesses: [2, 3], [0, 1], [2, 1]: first right once of 3; of the six experts 2, 1 and 1.
    first, every = drafting._shares(experts, scores, 2)
    assert (first.mean(), every.mean()) == (pytest.approx(1 / 3), pytest.approx(3 / 6))


def test_frequency_knows_the_tokens_before_only() -> None:
    counts = drafting._counts_before(np.array([[0, 1], [1, 2], [1, 3]]), 4)
    assert counts.tolist() == [[0, 0, 0, 0], [1, 1, 0, 0], [1, 2, 1, 0]]


def test_neighbours_are_counted_inside_a_text() -> None:
    chosen = np.array([[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]], dtype=bool)
    one, two, three = drafting._neighbours([chosen, chosen[:1]])
    assert (one["activated"], one["common"], one["any_common"]) == (0.5, 1.0, 1.0)
    assert two == {
        **{"tokens": 2, "activated": 0.75, "if_independent": 0.75},
        **{"common": 0.5, "any_common": 1.0},
    }
    assert (three["activated"], three["if_independent"], three["any_common"]) == (1, 0.875, 0)


def test_entropy_of_a_sure_and_of_an_even_choice() -> None:
    assert drafting._entropy(np.array([[0.0, 0.0, 0.0, 0.0]])) == pytest.approx(2.0)
    assert drafting._entropy(np.array([[50.0, 0.0, 0.0, 0.0]])) == pytest.approx(0.0, abs=1e-6)


def test_the_model_as_its_own_draft_is_always_right(analyzed: AnalyzedModel) -> None:
    for row in drafting.analyze(analyzed, "tiny")["drafting"]:
        # But for ties of two gate logits in bfloat16, which the router and the sort break
        # differently; among 64 experts they are not rare.
        assert min(row["draft_top1"], row["draft_topk"]) > 0.98
        assert row["cosine"] == pytest.approx(1.0, abs=1e-2)
        assert row["draft_entropy"] == row["router_entropy"]


@pytest.mark.slow
def test_less_precision_foretells_worse_and_better_than_chance(analyzed: AnalyzedModel) -> None:
    fine, coarse = (drafting.analyze(analyzed, f"self:{p}")["drafting"] for p in ("int8", "int2"))
    for better, worse in list(zip(fine, coarse, strict=True))[1:]:
        assert better["draft_topk"] > worse["draft_topk"] > worse["random_topk"]
        assert better["next_gate_topk"] == worse["next_gate_topk"]


def test_the_texts_figures_are_those_of_the_layers_divided_anew(analyzed: AnalyzedModel) -> None:
    tables = drafting.analyze(analyzed, "self:int4")
    texts, sizes = tables["drafting_texts"], Counter[int]()
    for text, window in zip(analyzed.text_of, analyzed.windows, strict=True):
        sizes[text] += len(window)
    assert [row["text"] for row in texts] == list(sizes) == [0, 1, 2]
    for name in ("draft_topk", "frequency_top1", "cosine", "frequency_entropy"):
        by_layer = np.mean([row[name] for row in tables["drafting"]])
        weights = list(sizes.values())
        assert np.average([row[name] for row in texts], weights=weights) == pytest.approx(by_layer)


def test_the_command_writes_its_tables_and_refuses_what_does_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["analyze", "drafting", "--max_tokens", "60"]
    assert main([*few, "--draft", "self:int8", "--out", str(tmp_path), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [row["layer"] for row in shown["rows"]] == list(range(8))
    assert json.loads((tmp_path / "drafting.json").read_text()) == shown
    assert (tmp_path / "drafting.svg").is_file()
    assert main([*few, "--draft", "self:int9"]) != 0
    assert "self:int9" in capsys.readouterr().err
    assert main(["analyze", "locality", "--draft", "tiny"]) != 0
    assert "analyze drafting" in capsys.readouterr().err

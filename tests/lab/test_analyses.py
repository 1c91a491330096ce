"""`moecache analyze`: each analysis against trials by hand, its command, and its refusals."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM

from lm_eval_moecache.algorithms.learned.buddies import Coactivation
from lm_eval_moecache.model.moe_layers import find_moe_layers
from lm_eval_moecache.model.predictor.training import PREDICTOR
from lm_eval_moecache.testing.streams import make_event, make_geometry
from moecache_lab import logit_range
from moecache_lab.analyses import coactivation, divergence, drafting
from moecache_lab.analyses.cache_conditional import ForcedExpert, optimal_expert
from moecache_lab.analyses.divergence import Reading, compare, figures
from moecache_lab.analyses.predictability import RouterCapture, _by_layer
from moecache_lab.analyzed_model import AnalyzedModel, read_texts
from tests.conftest import Checkpoint, Moecache
from tests.families.check import save

TEXT = "One, two, three, four, five."


LAYERS = ("layer", [0, 1, 2])
ROUTINGS = ("routing", ["standard", "cache_prior (lambda 0.5)"])
POLICIES = ("policy", ["unmodified", "on_demand", "mixture_cache"])
COMPARED = ("--policies=on_demand,mixture_cache", "--capacity=4/layer")


@pytest.mark.parametrize(
    ("analysis", "tokens", "options", "column"),
    [
        ("optimal_expert", 6, (), LAYERS),
        ("divergence", 20, COMPARED, POLICIES),
        ("coactivation", 20, ("--sample_tokens=8", "--layer=2"), LAYERS),
        ("sensitivity", 6, ("--seeds=1",), ("rank", [0, 1, 2, 3])),
        ("locality", 20, ("--capacity=4/layer",), ROUTINGS),
        ("drafting", 20, ("--draft=self:int8",), LAYERS),
    ],
)
def test_the_command_writes_table_and_pictures(
    analysis: str,
    tokens: int,
    options: tuple[str, ...],
    column: tuple[str, list[Any]],
    checkpoint: Checkpoint,
    tmp_path: Path,
    moecache: Moecache,
) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    out, model = tmp_path / "out", f"--pretrained={checkpoint('olmoe')}"
    arguments = [model, f"--text={tmp_path / 'text.txt'}", f"--max_tokens={tokens}", *options]
    rows = moecache.json("analyze", analysis, *arguments, "--out", out)["rows"]
    assert [row[column[0]] for row in rows] == column[1]
    assert all(0 <= row.get("agreement", 0) <= 1 for row in rows)
    names = {path.name for path in out.iterdir() if path.stem == analysis}
    assert names == {f"{analysis}.{end}" for end in ("json", "md", "svg", "png")}
    assert json.loads((out / f"{analysis}.json").read_text())["rows"] == rows


def test_the_rows_say_how_uneven_pairs_are_and_whether_buddies_do_the_same() -> None:
    counts = Coactivation(make_geometry(num_layers=1, num_experts=3, top_k=2))
    counts.activations[0] = [6, 3, 1]
    counts.pairs[0] = [[0, 3, 1], [3, 0, 0], [1, 0, 0]]
    cosines = np.array([[[1, 0.5, 0.2], [0.5, 1, 0.1], [0.2, 0.1, 1]]], dtype=np.float32)
    (row,) = coactivation.analyze(counts, cosines, alpha=0.75, k_max=2)
    # The lists are 0: 1; 1: 0; 2: 0, as 3/4 of expert 0's mass is on expert 1.
    assert row["most_active_share"] == pytest.approx(0.6)
    assert row["least_active_share"] == pytest.approx(0.1)
    assert row["mean_list_size"] == 1.0
    assert row["similarity_of_pairs"] == pytest.approx((0.5 + 0.2 + 0.1) / 3)
    assert row["similarity_of_buddies"] == pytest.approx((0.5 + 0.5 + 0.2) / 3)
    q, similarities = [0.75, 0.25, 1, 0, 1, 0], [0.5, 0.2, 0.5, 0.1, 0.2, 0.1]
    assert row["correlation"] == pytest.approx(np.corrcoef(q, similarities)[0, 1], rel=1e-5)


def reading(shares: list[list[float]], experts: list[list[list[int]]]) -> Reading:
    """A text of three tokens, a vocabulary of two; the last token's routes predict nothing."""
    return Reading(
        tokens_T=torch.tensor([0, 1, 0]),
        logits_TV=torch.tensor(shares).log(),
        experts_LTK=tuple(map(torch.tensor, experts)),
    )


def test_two_readings_are_compared_by_hand() -> None:
    plain = reading([[0.5, 0.5], [0.25, 0.75]], [[[0, 1]] * 3, [[2, 3]] * 3])
    other = reading([[0.25, 0.75], [0.5, 0.5]], [[[1, 0]] * 3, [[2, 0], [0, 1], [0, 1]]])
    window = compare(plain, other)
    assert window["tokens"] == 2
    # The text goes on with word 1 (0.75), then with word 0 (0.5).
    assert window["loss"] == pytest.approx(-math.log(0.75) - math.log(0.5))
    first = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    second = 0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5)
    assert window["kl"] == pytest.approx(first + second)
    # The top words are 0 against 1, then 1 against 0: of two equal shares, 0's comes first.
    assert window["same_top"] == 0
    # Token 0 keeps all experts in one layer and half in the other, token 1 all and none.
    assert window["routes"] == pytest.approx((1 + 0.5) / 2 + (1 + 0) / 2)


def test_figures_divide_by_all_tokens_and_the_error_is_over_windows() -> None:
    windows = [
        {"tokens": 1, "loss": 1.0, "kl": 0.3, "same_top": 1, "routes": 1.0},
        {"tokens": 3, "loss": 3.0, "kl": 0.1, "same_top": 2, "routes": 1.5},
    ]
    row = figures(windows)
    assert row["tokens"] == 4 and row["perplexity"] == pytest.approx(math.e)
    assert row["kl"] == pytest.approx(0.1) and row["top1_agreement"] == 0.75
    assert row["route_agreement"] == pytest.approx(2.5 / 4)
    # Residuals 0.3 - 0.1 x 1 and 0.1 - 0.1 x 3, each 0.2; two windows.
    assert row["kl_stderr"] == pytest.approx(math.sqrt(0.08 * 2) / 4)
    assert figures(windows[:1])["kl_stderr"] is None


def test_only_a_lossy_policy_moves_the_output(checkpoint: Checkpoint) -> None:
    analyzed = AnalyzedModel(str(checkpoint("olmoe")), [TEXT, "Six."], 40)
    policies = {"exact": {"policy": "on_demand"}, "drop": {"miss": "drop", "miss.h": 2}}
    unmodified, exact, drop = divergence.analyze(analyzed, policies, "3/layer")
    assert unmodified["kl"] == exact["kl"] == 0.0
    assert exact["top1_agreement"] == exact["route_agreement"] == exact["routing_fidelity"] == 1.0
    assert exact["perplexity"] == unmodified["perplexity"]
    assert drop["kl"] > 0 and drop["routing_fidelity"] < 1 and drop["route_agreement"] < 1
    assert drop["bytes_per_token"] < exact["bytes_per_token"]


def test_a_forced_expert_takes_its_rank_unless_the_token_has_it_already() -> None:
    routing = ForcedExpert(make_geometry(num_experts=5, top_k=3), rank=2)
    logits = [[5, 4, 3, 2, 1], [1, 2, 3, 4, 5], [5, 1, 4, 2, 3]]
    event = make_event(routing.geometry, 0, 1, logits)
    assert routing.choose(event) is None
    routing.layer, routing.wanted = 1, np.asarray([0, 0, 4])
    selection = routing.choose(event)
    assert selection is not None
    # Experts 0, 1, 2 have 0 first; 4, 3, 2 get 0 in the place of 3; 0, 2, 4 have 4 last.
    assert selection.experts.tolist() == [[0, 1, 2], [4, 0, 2], [0, 2, 4]]


def test_one_tokens_search_is_the_least_loss_of_all_trials(checkpoint: Checkpoint) -> None:
    """With one token to predict, the loss depends on that token's experts alone."""
    analyzed = AnalyzedModel(str(checkpoint("olmoe")), ["ab"], 2)
    analyzed.windows = [window[:2] for window in analyzed.windows[:1]]
    [window], rank = analyzed.windows, 2
    rows = optimal_expert(analyzed, {"rank": rank}).tables["optimal_expert"]
    plain = float(analyzed.losses(window)[0])
    for layer, row in enumerate(rows):
        losses = tried_by_hand(analyzed, window, layer, rank)
        assert row["perplexity"] == pytest.approx(math.exp(plain), rel=1e-4)
        assert row["oracle"] == pytest.approx(math.exp(min([*losses, plain])), rel=1e-4)
        assert row["agreement"] == float(plain <= min(losses))


def tried_by_hand(analyzed: AnalyzedModel, window: Any, layer: int, rank: int) -> list[float]:
    """The token's loss with each expert that it did not choose, by a hook on the router alone."""
    losses = []
    for tried in range(analyzed.geometry.num_experts):

        def swap(module: Any, args: Any, output: Any, tried: int = tried) -> Any:
            scores, weights, experts = (part.clone() for part in output)
            if tried in experts[0]:
                return None
            place = experts[0].tolist().index(scores[0].argsort(descending=True)[rank - 1])
            experts[0, place] = tried
            probabilities = torch.softmax(scores.float(), -1).gather(-1, experts)[0]
            weights[0] = (
                probabilities / probabilities.sum() if module.norm_topk_prob else probabilities
            )
            return scores, weights, experts

        handle = analyzed.layers[layer].router.register_forward_hook(swap)
        losses.append(float(analyzed.losses(window)[0]))
        handle.remove()
    # A trial of an expert that was chosen anyway leaves the loss as it was.
    plain = float(analyzed.losses(window)[0])
    return [loss for loss in losses if loss != plain]


def test_predictability_gives_figure_2_and_table_1_of_what_tasks_generate(
    tmp_path: Path, moecache: Moecache
) -> None:
    words = ["analyze", "predictability", "--tasks", "tiny_bbh", "--limit", "4", "--json"]
    tables = moecache.json(*words, "--out", str(tmp_path))
    assert [row["right"] for row in tables["certainty"]] == list(range(9))
    tokens = sum(row["tokens"] for row in tables["certainty"])
    assert tokens == sum(row["tokens"] for row in tables["layers"]) > 0
    assert sum(row["share"] for row in tables["certainty"]) == pytest.approx(1.0)
    for row in tables["layers"]:
        assert 0.6 < row["predictor"] <= 1.0
    for row in tables["correlations"]:
        # With so few tokens one side may be constant: no correlation.
        assert row["set_by_gap"] is None or -1 <= row["set_by_gap"] <= 1
    assert any(row["set_by_certainty"] is not None for row in tables["correlations"])
    assert [row["prompt"] for row in tables["documents"]] == [0, 1, 2, 3]
    assert sum(row["tokens"] for row in tables["documents"]) == tokens
    (table,) = tables["replacement"]
    assert table["task"] == "tiny_bbh" and table["metric"].startswith("exact_match")
    assert table["original"] == table["replaced"] == 1.0
    for name in ("certainty.json", "layers.md", "replacement.md", "predictability.svg"):
        assert (tmp_path / name).stat().st_size > 0


@pytest.fixture(scope="module")
def analyzed(tmp_path_factory: pytest.TempPathFactory) -> AnalyzedModel:
    file = tmp_path_factory.mktemp("texts") / "three.jsonl"
    pages = [page[:400] for page in read_texts("tiny", None)[:3]]
    file.write_text("\n".join(json.dumps({"page": page}) for page in pages) + "\n")
    return AnalyzedModel("tiny", read_texts("tiny", str(file)), 400, window=64)


def drafted(analyzed: AnalyzedModel, draft: str) -> Any:
    return drafting.drafting(analyzed, {"draft": draft}).tables


def test_frequency_knows_the_tokens_before_only() -> None:
    chosen = drafting._chosen(np.array([[0, 1], [1, 2], [1, 3]]), 4)
    assert drafting._counts_before(chosen).tolist() == [[0, 0, 0, 0], [1, 1, 0, 0], [1, 2, 1, 0]]


def test_neighbours_are_counted_inside_a_text() -> None:
    chosen = np.array([[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]], dtype=bool)
    single, pair, triple = drafting._neighbours([chosen, chosen[:1]])
    assert (single["activated"], single["common"], single["any_common"]) == (0.5, 1.0, 1.0)
    assert pair == {
        **{"tokens": 2, "activated": 0.75, "if_independent": 0.75},
        **{"common": 0.5, "any_common": 1.0},
    }
    assert (triple["activated"], triple["if_independent"], triple["any_common"]) == (1, 0.875, 0)


def test_the_model_as_its_own_draft_is_always_right(analyzed: AnalyzedModel) -> None:
    for row in drafted(analyzed, "tiny")["drafting"]:
        # Not 1: the router and the sort break ties of bfloat16 gate logits differently, and
        # among 64 experts ties are not rare.
        assert min(row["draft_top1"], row["draft_topk"]) > 0.98
        assert row["cosine"] == pytest.approx(1.0, abs=1e-2)
        assert row["draft_entropy"] == row["router_entropy"]


def test_the_next_gate_reads_the_layer_before_and_the_draft_its_own(
    analyzed: AnalyzedModel,
) -> None:
    gate, generator = analyzed.layers[1].gate, torch.Generator().manual_seed(0)
    before, own = torch.randn(2, 16, gate.hidden_size, generator=generator).to(gate.dtype)
    found = drafting._layer_metrics(analyzed, 1, [before, own], [before, own])
    assert found["draft_topk"].mean() > 0.98 > 0.5 > found["next_gate_topk"].mean()
    found = drafting._layer_metrics(analyzed, 1, [own, own], [own, before])
    assert found["next_gate_topk"].mean() > 0.98 > 0.5 > found["draft_topk"].mean()


@pytest.mark.slow
def test_less_precision_predicts_worse_and_better_than_chance(analyzed: AnalyzedModel) -> None:
    fine, coarse = (drafted(analyzed, f"self:{p}")["drafting"] for p in ("int8", "int2"))
    for better, worse in list(zip(fine, coarse, strict=True))[1:]:
        assert better["draft_topk"] > worse["draft_topk"] > worse["random_topk"]
        assert better["next_gate_topk"] == worse["next_gate_topk"]


def test_the_texts_figures_are_those_of_the_layers_divided_anew(analyzed: AnalyzedModel) -> None:
    tables = drafted(analyzed, "self:int4")
    texts, sizes = tables["drafting_texts"], Counter[int]()
    for text, window in zip(analyzed.text_of, analyzed.windows, strict=True):
        sizes[text] += len(window)
    assert [row["text"] for row in texts] == list(sizes) == [0, 1, 2]
    for name in ("draft_topk", "frequency_top1", "cosine", "frequency_entropy"):
        by_layer = np.mean([row[name] for row in tables["drafting"]])
        weights = list(sizes.values())
        assert np.average([row[name] for row in texts], weights=weights) == pytest.approx(by_layer)


@pytest.mark.parametrize("family", ["gemma4_text", "inkling_text", "deepseek_v4"])
def test_routers_with_other_outputs_or_inputs_are_read_as_by_the_cache(
    family: str, tmp_path: Path
) -> None:
    """Probabilities for logits; a fourth output; a choice by token ids."""
    analyzed = AnalyzedModel(str(save(tmp_path, family)), [TEXT], 20)
    observed, ranges = coactivation.observe(analyzed, 100), logit_range.measure(analyzed)
    for layer, hidden, top, mean in zip(
        analyzed.layers, observed.hidden, observed.top_logits, ranges, strict=True
    ):
        choice = layer.gate.ask(hidden)
        logits, spread = choice.logits.float(), choice.logits.float().aminmax(dim=-1)
        expected = logits.gather(-1, choice.experts).numpy()
        np.testing.assert_allclose(np.sort(top), np.sort(expected), atol=0.05)
        assert mean == pytest.approx(float((spread.max - spread.min).mean()), rel=0.02)
    for row in drafted(analyzed, "self:bf16")["drafting"]:
        # Gemma 4's router reads what its dense part does not, so a draft's inputs are near it only.
        assert row["draft_topk"] > (0.5 if family == "gemma4_text" else 0.98)
    (_, same) = divergence.analyze(analyzed, {"on_demand": {}}, "4/layer")
    assert (same["kl"], same["route_agreement"]) == (0, 1)


def test_what_a_router_cannot_give_is_refused_before_the_model_reads(tmp_path: Path) -> None:
    single = AnalyzedModel(str(save(tmp_path / "a", "zaya")), [TEXT], 20)
    with pytest.raises(ValueError, match="one expert per token"):
        coactivation.observe(single)
    by_token = AnalyzedModel(str(save(tmp_path / "b", "deepseek_v4")), [TEXT], 20)
    with pytest.raises(ValueError, match="chooses by token ids"):
        RouterCapture(by_token.model, by_token.layers)


def test_captured_are_the_decode_steps_of_each_prompt(checkpoint: Checkpoint) -> None:
    """Row t of a prompt is the pass that read its generated token t."""
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint("olmoe")).eval()
    layers, options = find_moe_layers(model), {"max_new_tokens": 5, "do_sample": False}
    with torch.no_grad(), RouterCapture(model, layers) as capture:
        outputs = [
            model.generate(torch.tensor([ids]), min_new_tokens=5, **options)
            for ids in ([5, 6, 7], [9, 6])
        ]
    samples = capture.samples
    assert samples.prompts.tolist() == [0] * 4 + [1] * 4
    whole: list[Any] = []
    handle = layers[1].router.register_forward_hook(lambda m, a, o: whole.append((a[0], o[0])))
    with torch.no_grad():
        model(outputs[0][:, :-1])
    handle.remove()
    for rows, expected in zip((samples.hidden[1], samples.logits[1]), whole[0], strict=True):
        recorded = torch.from_numpy(rows[:4]).float()
        torch.testing.assert_close(recorded, expected[3:].float(), rtol=0.05, atol=0.05)


def test_correlations_are_of_the_experts_named_rightly() -> None:
    right, gap = np.array([0, 1, 2, 2]), np.array([0.1, 0.3, 0.2, 0.9])
    columns = {"layer": 0, "target": 1, PREDICTOR: right, "certainty": 0.0, "first": 0, "gap": gap}
    [row] = _by_layer(pd.DataFrame(columns))
    assert row["set_by_gap"] == pytest.approx(np.corrcoef(right, gap)[0, 1])
    assert row["set_by_certainty"] is None

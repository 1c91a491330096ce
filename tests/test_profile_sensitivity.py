"""AdapMoE's gating: its rule by hand, and the profile against differences of the loss itself."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from lm_eval_moecache.algorithms.registry import find_algorithm
from lm_eval_moecache.analysis.analyzed_model import AnalyzedModel
from lm_eval_moecache.analysis.fisher import Fisher
from lm_eval_moecache.cli.profile import run_raw
from lm_eval_moecache.records.artifact import SENSITIVITY, read_artifact
from lm_eval_moecache.records.event import DECODE, Event
from lm_eval_moecache.records.sensitivity import LAYERS, THRESHOLDS, rises
from lm_eval_moecache.testing.streams import make_geometry
from tests.artifacts import profile_for

TEXT = "Alice has 3 apples. She buys 4 more apples. How many apples does Alice have?"


def test_the_rise_is_the_square_of_the_lost_share_times_the_sensitivity() -> None:
    weights = np.array([[0.6, 0.3, 0.1], [0.3, 0.3, 0.2]], dtype=np.float32)
    # Lost from rank 1 on: 0.4 of 1.0 and 0.5 of 0.8; from rank 2 on: 0.1 and 0.2 of 0.8.
    expected = [[np.inf, 0.16 * 5, 0.01 * 5], [np.inf, 0.625**2 * 5, 0.25**2 * 5]]
    assert rises(weights, 5.0) == pytest.approx(np.array(expected), rel=1e-6)


def test_the_lightest_go_first_and_the_heaviest_always_stays() -> None:
    geometry = make_geometry(num_layers=2, num_experts=4, top_k=3)
    profile = profile_for(SENSITIVITY, geometry)
    layer_1 = float(read_artifact(profile, SENSITIVITY, "profile").arrays[LAYERS][1])
    experts = np.array([[2, 0, 1], [3, 1, 0]])
    weights = np.array([[0.6, 0.3, 0.1], [0.34, 0.33, 0.33]], dtype=np.float32)
    event = Event(0, 1, DECODE, 2, [6, 4, 5, 7], experts=experts, weights=weights)

    def kept(threshold: float) -> list[list[bool]]:
        build = find_algorithm("routing", "sensitivity")
        selection = build(geometry, profile=profile, threshold=threshold).select(event, ())
        if selection is None:
            return [[True] * 3] * 2
        assert selection.renormalize
        return selection.keep.tolist()

    assert kept(0.005 * layer_1) == [[True, True, True], [True, True, True]]
    assert kept(0.05 * layer_1) == [[True, True, False], [True, True, True]]
    assert kept(0.17 * layer_1) == [[True, False, False], [True, True, False]]
    assert kept(9.0 * layer_1) == [[True, False, False], [True, False, False]]


@pytest.fixture(scope="module")
def analyzed() -> AnalyzedModel:
    return AnalyzedModel("tiny", [TEXT], max_tokens=24)


def test_the_slope_is_that_of_the_loss(analyzed: AnalyzedModel) -> None:
    """One token's output is moved a little along its change: the loss must follow the gradient."""
    analyzed.model.float()
    seen = Fisher(analyzed)
    layer, token, step = 3, 7, 1e-3
    grabbed: dict[str, torch.Tensor] = {}

    def loss_with(shift: float) -> float:
        def move(_module: object, _inputs: object, output: torch.Tensor) -> torch.Tensor:
            moved = output.clone()
            moved[token] += shift * grabbed["change"].to(output.dtype)
            return moved

        handle = analyzed.layers[layer].experts.register_forward_hook(move)
        try:
            ids = analyzed.windows[0][None]
            logits = analyzed.model(ids).logits[0, :-1].float()
            loss = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum")
            return float(loss.detach())
        finally:
            handle.remove()

    original = seen._watch(layer)

    def grab(module: object, inputs: object, output: torch.Tensor) -> None:
        original(module, inputs, output)
        kept, change = seen._change[layer]
        grabbed["change"] = change[token]
        kept.retain_grad()
        grabbed["output"] = kept

    handle = analyzed.layers[layer].experts.register_forward_hook(grab)
    ids = analyzed.windows[0][None]
    logits = analyzed.model(ids).logits[0, :-1].float()
    torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").backward()
    handle.remove()
    slope = float(grabbed["output"].grad[token].double() @ grabbed["change"])
    difference = (loss_with(step) - loss_with(-step)) / (2 * step)
    assert slope == pytest.approx(difference, rel=0.05, abs=1e-3)


def test_a_quarter_of_the_activations_lies_below_its_threshold(analyzed: AnalyzedModel) -> None:
    fisher = Fisher(analyzed)
    fisher.read()
    assert (fisher.sensitivity > 0).all()
    thresholds = fisher.thresholds()
    assert np.isfinite(thresholds).all() and (np.diff(thresholds) >= 0).all()
    found = np.concatenate(
        [
            rises(np.concatenate(kept), value).ravel()
            for kept, value in zip(fisher._weights, fisher.sensitivity, strict=True)
        ]
    )
    for share in (10, 25, 50):
        assert np.mean(found <= thresholds[share]) == pytest.approx(share / 100, abs=0.02)


def test_profile_sensitivity_writes_what_the_routing_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "s.safetensors"
    text.write_text(TEXT)
    assert run_raw(["sensitivity", "--data", str(text), "--out", str(out), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["sensitivity"]) == 8
    arrays = read_artifact(out, SENSITIVITY, "profile").arrays
    assert arrays[LAYERS].shape == (8,) and arrays[THRESHOLDS].shape == (101,)

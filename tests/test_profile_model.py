"""`moecache profile` of a model: its buddies, its sensitivities, the range of its logits."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from lm_eval_moecache.algorithms.learned.buddies import PAIRS, BuddyProfile
from lm_eval_moecache.algorithms.learned.sensitivity import LAYERS, THRESHOLDS, rises
from lm_eval_moecache.cli.main import main
from lm_eval_moecache.harness.lm import MoECacheLM
from lm_eval_moecache.model.moe_layers import find_moe_layers, router_digest
from lm_eval_moecache.model.reading import Fisher, ReadingModel, observe
from lm_eval_moecache.profiling._texts import task_examples
from lm_eval_moecache.records.artifact import (
    ARTIFACT_DIR,
    BUDDIES,
    SENSITIVITY,
    read_artifact,
)
from lm_eval_moecache.sweep import evaluation
from lm_eval_moecache.tiny import MODEL_DIR
from lm_eval_moecache.tiny.documents import arc
from tests.conftest import Checkpoint, Moecache

TEXT = "A snorf lives in the desert and eats stones . It fears fire , as nibbins do . " * 20


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "some.txt"
    path.write_text(TEXT)
    return str(path)


def profile(*arguments: str) -> int:
    return main(["profile", "buddies", *arguments])


def test_it_writes_a_profile_of_this_model_that_the_policy_runs_with(
    checkpoint: Checkpoint, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = str(checkpoint("olmoe")), str(tmp_path / "mine.safetensors")
    assert profile("--pretrained", model, "--data", text, "--k_max=3", "--out", out, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    artifact = read_artifact(out, BUDDIES, "out")
    assert report["tokens"] == artifact.made_from["tokens"] > 100
    assert artifact.made_from["data"] == ["some.txt"]
    assert max(row["longest"] for row in report["layers"]) <= 3
    # Each token activates top_k experts in every layer, and pairs each with the others.
    tokens, top_k = report["tokens"], artifact.top_k
    np.testing.assert_allclose(artifact.arrays["activations"].sum(axis=-1), tokens * top_k)
    pairs = artifact.arrays[PAIRS].sum(axis=(1, 2))
    np.testing.assert_allclose(pairs, tokens * top_k * (top_k - 1))
    options: dict[str, Any] = {"policy": "buddymoe", "miss.rho": 2, "capacity": "50%"}
    lm = MoECacheLM(model, **options, **{"miss.profile": out}, batch_size=1)
    assert lm.engine.rules.miss.artifact.path == out


def test_the_shipped_profile_is_of_tiny_and_made_from_training_documents() -> None:
    shipped = read_artifact(ARTIFACT_DIR / "tiny" / "buddies.safetensors", BUDDIES, "shipped")
    model = AutoModelForCausalLM.from_pretrained(str(MODEL_DIR))
    assert shipped.router_digest == router_digest(find_moe_layers(model))
    assert shipped.made_from["tasks"] == ["moecache_offline"] and not shipped.made_from["data"]
    BuddyProfile(shipped)
    test_questions = {row["question"] for row in arc()["test"]}
    examples = task_examples(["tiny_arc"], 50)
    assert len(examples) == 50 and examples[0].answer.startswith(" ")
    assert not test_questions & {e.prompt.split("Question: ")[1].split("\n")[0] for e in examples}


def test_output_similarity_is_the_mean_cosine_of_what_two_experts_give() -> None:
    analyzed = ReadingModel("tiny", [TEXT], 40)
    observation = observe(analyzed, 5)
    similarity = observation.similarity()
    np.testing.assert_allclose(np.diagonal(similarity, axis1=1, axis2=2), 1.0, atol=1e-2)
    np.testing.assert_allclose(similarity, similarity.transpose(0, 2, 1), atol=1e-6)
    # Two experts of layer 2, computed from their weights.
    hidden = observation.hidden[2].float()
    experts = analyzed.layers[2].experts
    outputs = []
    for expert in (3, 8):
        gate, up = (hidden @ experts.gate_up_proj[expert].float().T).chunk(2, dim=-1)
        inner = torch.nn.functional.silu(gate) * up
        outputs.append(inner @ experts.down_proj[expert].float().T)
    expected = torch.nn.functional.cosine_similarity(*outputs).mean().detach()
    assert similarity[2, 3, 8] == pytest.approx(float(expected), abs=0.02)
    assert len(hidden) == 6, "every eighth of 41 tokens"


def test_tasks_without_other_documents_than_those_tested_on_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    no, yes = (lambda: False), (lambda: True)
    task = SimpleNamespace(has_training_docs=no, has_validation_docs=yes, has_test_docs=no)
    tasks = {"only_test": task}
    manager = SimpleNamespace(task_index=tasks, load=lambda names: {"tasks": tasks})
    monkeypatch.setattr(evaluation, "_task_manager", lambda *_: manager)
    with pytest.raises(ValueError, match="tasks='only_test' has no documents but those it is"):
        task_examples(["only_test"], 5)


APPLES = "Alice has 3 apples. She buys 4 more apples. How many apples does Alice have?"


def test_the_rise_is_the_square_of_the_lost_share_times_the_sensitivity() -> None:
    weights = np.array([[0.6, 0.3, 0.1], [0.3, 0.3, 0.2]], dtype=np.float32)
    # Lost from rank 1 on: 0.4 of 1.0 and 0.5 of 0.8; from rank 2 on: 0.1 and 0.2 of 0.8.
    expected = [[np.inf, 0.16 * 5, 0.01 * 5], [np.inf, 0.625**2 * 5, 0.25**2 * 5]]
    assert rises(weights, 5.0) == pytest.approx(np.array(expected), rel=1e-6)


@pytest.fixture(scope="module")
def analyzed() -> ReadingModel:
    return ReadingModel("tiny", [APPLES], max_tokens=24)


def test_the_slope_is_that_of_the_loss(analyzed: ReadingModel) -> None:
    """One token's output moves a little along its change: the loss must follow the gradient."""
    analyzed.model.float()
    # Of earlier tokens a step flips a near tie of a later router, and the loss jumps.
    fisher, layer, token, step = Fisher(analyzed), 3, 12, 1e-3

    def loss(hook: Any) -> torch.Tensor:
        handle = analyzed.layers[layer].experts.register_forward_hook(hook)
        ids = analyzed.windows[0][None]
        logits = analyzed.model(ids).logits[0, :-1].float()
        handle.remove()
        return torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum")

    plain = loss(lambda module, args, output: fisher.note(layer, args, output))
    [(output, change)] = fisher._changes
    (slopes,) = torch.autograd.grad(plain, [output])

    def moved(shift: float) -> float:
        delta = torch.zeros_like(output)
        delta[token] = shift * change[token].to(output.dtype)
        return float(loss(lambda module, args, output: output + delta).detach())

    slope = float(slopes[token].double() @ change[token])
    assert slope == pytest.approx((moved(step) - moved(-step)) / (2 * step), rel=0.05, abs=1e-3)


def test_a_quarter_of_the_activations_lies_below_its_threshold(analyzed: ReadingModel) -> None:
    fisher = Fisher(analyzed)
    fisher.read()
    assert (fisher.sensitivity > 0).all()
    thresholds = fisher.thresholds()
    assert np.isfinite(thresholds).all() and (np.diff(thresholds) >= 0).all()
    activation_rises = np.concatenate(
        [
            rises(np.concatenate(weights), value).ravel()
            for weights, value in zip(fisher._weights, fisher.sensitivity, strict=True)
        ]
    )
    for share in (10, 25, 50):
        assert np.mean(activation_rises <= thresholds[share]) == pytest.approx(
            share / 100, abs=0.02
        )


def test_profile_sensitivity_writes_what_the_routing_takes(
    tmp_path: Path, moecache: Moecache
) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "s.safetensors"
    text.write_text(APPLES)
    report = moecache.json("profile", "sensitivity", "--data", text, "--out", out)
    assert len(report["sensitivity"]) == 8
    arrays = read_artifact(out, SENSITIVITY, "profile").arrays
    assert arrays[LAYERS].shape == (8,) and arrays[THRESHOLDS].shape == (101,)


def test_logit_range_is_the_mean_of_max_less_min_as_the_routing_takes_it(
    tmp_path: Path, checkpoint: Checkpoint, moecache: Moecache
) -> None:
    file, out, model = tmp_path / "a.txt", tmp_path / "range.json", str(checkpoint("olmoe"))
    file.write_text("some text " * 60)
    command = ["profile", "logit_range", f"--pretrained={model}", f"--data={file}"]
    report = json.loads(moecache(*command, "--max_tokens=600", f"--out={out}"))
    ranges = json.loads(out.read_text())["logit_range"]
    assert report == pytest.approx(ranges, abs=1e-4)
    analyzed = ReadingModel(model, [file.read_text()], 600)
    assert len(analyzed.windows) == 2
    with torch.no_grad():
        outputs = [
            analyzed.model(window[None], output_router_logits=True).router_logits
            for window in analyzed.windows
        ]
    for layer, value in enumerate(ranges):
        logits = torch.cat([logits[layer] for logits in outputs]).float()
        expected = (logits.max(-1).values - logits.min(-1).values).mean()
        assert value == pytest.approx(float(expected), rel=1e-4)

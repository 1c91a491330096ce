"""`moecache profile buddies`: what it counts, what it writes, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from lm_eval_moecache.analysis.analyzed_model import AnalyzedModel
from lm_eval_moecache.analysis.coactivation import observe
from lm_eval_moecache.cli.main import main
from lm_eval_moecache.harness.lm import MoECacheLM
from lm_eval_moecache.model.moe_layers import find_moe_layers, router_digest
from lm_eval_moecache.profiling._texts import task_examples
from lm_eval_moecache.records.artifact import ARTIFACT_DIR, BUDDIES, read_artifact, write_artifact
from lm_eval_moecache.records.coactivation import PAIRS, SIMILARITY, BuddyProfile
from lm_eval_moecache.sweep import evaluation
from lm_eval_moecache.tiny import MODEL_DIR
from lm_eval_moecache.tiny.documents import arc
from tests.conftest import Checkpoint

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
    printed = json.loads(capsys.readouterr().out)
    made = read_artifact(out, BUDDIES, "out")
    assert printed["tokens"] == made.made_from["tokens"] > 100
    assert made.made_from["data"] == ["some.txt"]
    assert max(row["longest"] for row in printed["layers"]) <= 3
    # Each token activates top_k experts in every layer, and pairs each with the others.
    tokens, top_k = printed["tokens"], made.top_k
    np.testing.assert_allclose(made.arrays["activations"].sum(axis=-1), tokens * top_k)
    pairs = made.arrays[PAIRS].sum(axis=(1, 2))
    np.testing.assert_allclose(pairs, tokens * top_k * (top_k - 1))
    options: dict[str, Any] = {"policy": "buddymoe", "miss.rho": 2, "capacity": "50%"}
    lm = MoECacheLM(model, **options, **{"miss.profile": out}, batch_size=1)
    assert lm.engine.rules.miss.artifact.path == out


def test_without_a_profile_the_error_says_how_to_make_one(checkpoint: Checkpoint) -> None:
    with pytest.raises(ValueError, match=r"miss\.profile must be given.*moecache profile buddies"):
        MoECacheLM(str(checkpoint("olmoe")), policy="buddymoe", **{"miss.rho": 2})


def test_a_profile_of_another_model_is_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    # Other layer counts before the weights are read, other weights of the same counts after.
    with pytest.raises(ValueError, match=r"made from 'tiny' with num_layers=8, but .* has"):
        MoECacheLM(
            str(checkpoint("olmoe")),
            policy="buddymoe",
            **{"miss.rho": 2, "miss.profile": str(ARTIFACT_DIR / "tiny" / "buddies.safetensors")},
        )
    model = AutoModelForCausalLM.from_pretrained(str(MODEL_DIR))
    with torch.no_grad():
        find_moe_layers(model)[3].router.weight.mul_(1.1)
    model.save_pretrained(tmp_path / "retrained")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "retrained" / name).write_bytes((Path(MODEL_DIR) / name).read_bytes())
    with pytest.raises(ValueError, match=r"made from 'tiny', whose router weights.*are not those"):
        MoECacheLM(
            str(tmp_path / "retrained"),
            policy="buddymoe",
            **{"miss.profile": str(ARTIFACT_DIR / "tiny" / "buddies.safetensors")},
        )


def test_the_shipped_profile_is_of_tiny_and_made_from_training_documents() -> None:
    shipped = read_artifact(ARTIFACT_DIR / "tiny" / "buddies.safetensors", BUDDIES, "shipped")
    model = AutoModelForCausalLM.from_pretrained(str(MODEL_DIR))
    assert shipped.router_digest == router_digest(find_moe_layers(model))
    assert shipped.made_from["tasks"] == ["moecache_offline"] and not shipped.made_from["data"]
    BuddyProfile(shipped)
    tested = {row["question"] for row in arc()["test"]}
    examples = task_examples(["tiny_arc"], 50)
    assert len(examples) == 50 and examples[0].answer.startswith(" ")
    assert not tested & {e.prompt.split("Question: ")[1].split("\n")[0] for e in examples}


def test_warm_up_tokens_count_for_less() -> None:
    analyzed = AnalyzedModel("tiny", [TEXT], 100)
    plain = observe(analyzed, 16).counts
    light = observe(analyzed, 16, lambda n: np.where(np.arange(n) < 60, 0.0, 1.0)).counts
    np.testing.assert_allclose(plain.activations.sum(axis=-1), 101 * 8)
    np.testing.assert_allclose(light.activations.sum(axis=-1), 41 * 8)


def test_output_similarity_is_the_mean_cosine_of_what_two_experts_give() -> None:
    analyzed = AnalyzedModel("tiny", [TEXT], 40)
    found = observe(analyzed, 5)
    similarity = found.similarity()
    np.testing.assert_allclose(np.diagonal(similarity, axis1=1, axis2=2), 1.0, atol=1e-2)
    np.testing.assert_allclose(similarity, similarity.transpose(0, 2, 1), atol=1e-6)
    # Two experts of layer 2, computed from their weights.
    hidden = torch.cat(found._hidden[2]).float()
    experts = analyzed.layers[2].experts
    outputs = []
    for expert in (3, 8):
        gate, up = (hidden @ experts.gate_up_proj[expert].float().T).chunk(2, dim=-1)
        inner = torch.nn.functional.silu(gate) * up
        outputs.append(inner @ experts.down_proj[expert].float().T)
    expected = torch.nn.functional.cosine_similarity(*outputs).mean().detach()
    assert similarity[2, 3, 8] == pytest.approx(float(expected), abs=0.02)
    assert len(hidden) == 6, "every eighth of 41 tokens"


class FakeManager:
    """lm-eval's index without its 10,000 tasks, and one task that has test documents only."""

    task_index: ClassVar[dict[str, object]] = {"tiny_arc": None, "only_test": None}

    def __init__(self, include_path: Sequence[str], defaults: bool) -> None:
        pass

    def load(self, names: list[str]) -> dict[str, Any]:
        task = SimpleNamespace(
            has_training_docs=lambda: False,
            has_validation_docs=lambda: True,
            has_test_docs=lambda: False,
        )
        return {"tasks": {name: task for name in names}}


def test_unknown_tasks_and_tasks_without_other_documents_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(evaluation, "_task_manager", FakeManager)
    with pytest.raises(ValueError, match=r"tasks='tiny_ark' is not known.*mean 'tiny_arc'"):
        task_examples(["tiny_ark"], 5)
    with pytest.raises(ValueError, match=r"tasks='only_test' has no documents beside those it is"):
        task_examples(["only_test"], 5)


def test_a_shipped_profile_without_similarity_is_not_a_whole_one(tmp_path: Path) -> None:
    shipped = read_artifact(ARTIFACT_DIR / "tiny" / "buddies.safetensors", BUDDIES, "shipped")
    arrays = {name: array for name, array in shipped.arrays.items() if name != SIMILARITY}
    write_artifact(
        tmp_path / "less.safetensors",
        type(shipped)(**{f: getattr(shipped, f) for f in shipped.__slots__} | {"arrays": arrays}),
    )
    with pytest.raises(ValueError, match="lacks the array 'similarity'"):
        BuddyProfile(read_artifact(tmp_path / "less.safetensors", BUDDIES, "less"))

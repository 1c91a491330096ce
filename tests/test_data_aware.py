"""SiDA's data-aware predictor: its network, its training, its trace, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lm_eval_moecache.algorithms.policy import load_policy
from lm_eval_moecache.cli.main import main
from lm_eval_moecache.engine.replay import replay
from lm_eval_moecache.harness.arguments import read_config
from lm_eval_moecache.harness.lm import MoECacheLM
from lm_eval_moecache.model.predictor.network import Foresight, network_from, sparsemax
from lm_eval_moecache.records.artifact import ARTIFACT_DIR, DATA_AWARE, Artifact, read_artifact
from lm_eval_moecache.records.data_aware import NUM_LSTMS, cost_of, shapes
from lm_eval_moecache.testing.artifacts import artifact_for
from lm_eval_moecache.testing.streams import make_geometry
from lm_eval_moecache.trace.importers import load_trace
from tests.artifacts import predictor_of
from tests.conftest import Checkpoint
from tests.test_live_replay import _run

PROMPTS = [f"Say {word}" for word in ("one", "two", "three", "four", "five", "six")]
GEOMETRY = make_geometry(num_layers=3, num_experts=8)


@pytest.mark.parametrize(
    ("scores", "weights"),
    [
        # Sorted sums less 1 stand below k times the score for two of them: threshold 0.25.
        ([1.0, 0.5, -1.0], [0.75, 0.25, 0.0]),
        ([3.0, 1.0, 0.0], [1.0, 0.0, 0.0]),
        ([0.2, 0.2, 0.2], [1 / 3, 1 / 3, 1 / 3]),
    ],
)
def test_sparsemax_by_hand(scores: list[float], weights: list[float]) -> None:
    torch.testing.assert_close(sparsemax(torch.tensor(scores)), torch.tensor(weights))


@given(st.lists(st.floats(-4, 4), min_size=1, max_size=7))
def test_sparsemax_is_the_nearest_point_of_the_simplex(scores: list[float]) -> None:
    row = torch.tensor(scores, dtype=torch.float64)
    found = sparsemax(row)
    assert float(found.min()) >= 0 and abs(float(found.sum()) - 1) < 1e-9
    own = float(((found - row) ** 2).sum())
    for index in range(len(scores)):
        # Any step towards a corner leads away from it.
        corner = torch.zeros_like(row)
        corner[index] = 1
        for step in (1e-3, 0.1, 1.0):
            other = found + step * (corner - found)
            assert float(((other - row) ** 2).sum()) >= own - 1e-9


def slow_logits(artifact: Artifact, embedded: np.ndarray) -> np.ndarray:
    """The network token by token in numpy: logits [T, L, E] of embeddings [T, D]."""
    a = {name: array.astype(np.float64) for name, array in artifact.arrays.items()}
    width = len(a["compress.bias"])
    states = [(np.zeros(width), np.zeros(width)) for _ in range(NUM_LSTMS)]
    read: list[np.ndarray] = []
    found = []

    def sigmoid(values: np.ndarray) -> np.ndarray:
        return np.asarray(1 / (1 + np.exp(-values)))

    for token in embedded.astype(np.float64):
        compressed = np.maximum(a["compress.weight"] @ token + a["compress.bias"], 0)
        values = compressed
        for stage, (h, c) in enumerate(states):
            sums = a[f"lstm.weight_ih_l{stage}"] @ values + a[f"lstm.bias_ih_l{stage}"]
            sums = sums + a[f"lstm.weight_hh_l{stage}"] @ h + a[f"lstm.bias_hh_l{stage}"]
            i, f, g, o = np.split(sums, 4)
            c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
            values = sigmoid(o) * np.tanh(c)
            states[stage] = (values, c)
        read.append(values)
        scores = torch.tensor(np.stack(read) @ values / width**0.5)
        context = sparsemax(scores).numpy() @ np.stack(read)
        residual = np.maximum(a["residual.weight"] @ compressed + a["residual.bias"], 0)
        found.append(a["heads.weight"] @ (context + residual) + a["heads.bias"])
    return np.stack(found).reshape(len(embedded), artifact.num_layers, artifact.num_experts)


@pytest.fixture(scope="module")
def drawn() -> tuple[Artifact, nn.Embedding]:
    torch.manual_seed(0)
    return artifact_for(DATA_AWARE, GEOMETRY), nn.Embedding(20, 6)


def test_the_network_is_what_its_oracle_computes(drawn: tuple[Artifact, nn.Embedding]) -> None:
    artifact, embedding = drawn
    with torch.no_grad():
        embedded = embedding(torch.tensor([[3, 1, 4, 1, 5, 9]]))
        found = network_from(artifact)(embedded)[0][0].numpy()
    np.testing.assert_allclose(found, slow_logits(artifact, embedded[0].numpy()), atol=1e-4)


def test_pass_by_pass_it_says_what_it_says_of_the_whole_text(
    drawn: tuple[Artifact, nn.Embedding],
) -> None:
    artifact, embedding = drawn
    text = [3, 1, 4, 1, 5, 9, 2, 6]
    whole = Foresight(artifact, embedding).begin_pass(torch.tensor([text]), 0, None)
    stepped = Foresight(artifact, embedding)
    stepped.begin_pass(torch.tensor([text[:3]]), 0, None)
    # Two drafts are verified and rejected: the cache loses them again.
    stepped.begin_pass(torch.tensor([[text[3], 7, 7]]), 3, None)
    for place in range(4, len(text)):
        found = stepped.begin_pass(torch.tensor([[text[place]]]), place, None)
        for layer in range(3):
            np.testing.assert_allclose(found[layer][0], whole[layer][place], atol=1e-5)


def test_padding_and_other_rows_change_nothing(drawn: tuple[Artifact, nn.Embedding]) -> None:
    artifact, embedding = drawn
    rows = torch.tensor([[0, 0, 4, 1], [2, 7, 1, 8]])
    valid = np.array([False, False, True, True, True, True, True, True])
    batch = Foresight(artifact, embedding)
    batch.begin_pass(rows, 0, valid)
    # The second row has ended.
    found = batch.begin_pass(torch.tensor([[5], [3]]), 4, np.array([True, False]))
    alone = Foresight(artifact, embedding).begin_pass(torch.tensor([[4, 1, 5]]), 0, None)
    assert found[1].shape == (1, 8)
    np.testing.assert_allclose(found[1][0], alone[1][2], atol=1e-5)


def test_its_cost_is_its_weights(drawn: tuple[Artifact, nn.Embedding]) -> None:
    artifact, _ = drawn
    sizes = [int(np.prod(shape)) for shape in shapes(3, 8, 6, 4).values()]
    cost = cost_of(artifact)
    assert (cost.num_weights, cost.num_bytes) == (sum(sizes), 2 * sum(sizes))


def command(model: str, folder: Path, *options: str) -> list[str]:
    prompts = folder / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS))
    given = ["profile", "data_aware", "--pretrained", model, "--data", str(prompts)]
    sizes = ["--tokens", "4", "--max_epochs", "3", "--width", "8"]
    return [*given, *sizes, "--out", str(folder / "made.safetensors"), *options]


def test_the_command_makes_the_same_network_twice_and_it_runs(
    checkpoint: Checkpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(checkpoint("olmoe"))
    assert main(command(model, tmp_path, "--json")) == 0
    report = json.loads(capsys.readouterr().out)
    assert [row["layer"] for row in report["layers"]] == [0, 1, 2]
    made = (tmp_path / "made.safetensors").read_bytes()
    assert main(command(model, tmp_path)) == 0
    assert (tmp_path / "made.safetensors").read_bytes() == made
    profile = {"prefetch.profile": str(tmp_path / "made.safetensors")}
    lm = MoECacheLM(pretrained=model, device="cpu", policy="sida", capacity="20%", **profile)
    _run(lm)
    assert sum(record.predicted_right for record in lm.engine.ledger.passes) > 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--width", "0"], "width=0"),
        (["--hard_weight", "-1"], "hard_weight=-1"),
        (["--out", "x.json"], "must end in .safetensors"),
    ],
)
def test_what_cannot_be_trained_is_said_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    assert main(command("no-such-model", tmp_path, *options)) == 2
    assert words in capsys.readouterr().err


def test_a_trace_of_another_policy_is_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    given: dict[str, Any] = {"pretrained": str(checkpoint("olmoe")), "device": "cpu"}
    lm = MoECacheLM(**given, policy="on_demand", capacity="20%", trace=str(tmp_path))
    _run(lm)
    lm.wrapped.recorder.close(lm.engine.ledger.requests)  # type: ignore[union-attr]
    [path] = tmp_path.glob("*.parquet")
    profile = predictor_of(lm.model, load_policy("sida"))
    config = read_config({"policy": "sida", "capacity": "20%", **profile})
    trace = load_trace(str(path))
    with pytest.raises(ValueError, match="was not recorded with prefetch='data_aware'"):
        replay(trace, config.setting(trace.geometry))


def test_an_embedding_of_another_length_is_refused(
    drawn: tuple[Artifact, nn.Embedding], checkpoint: Checkpoint
) -> None:
    from lm_eval_moecache.algorithms.prefetch.data_aware import DataAware
    from lm_eval_moecache.model.predictor.network import foresight_of
    from tests.artifacts import profile_for

    prefetch = DataAware(GEOMETRY, profile=profile_for(DATA_AWARE, GEOMETRY))
    with pytest.raises(ValueError, match="takes embeddings of 6 numbers, but those of"):
        foresight_of(prefetch, nn.Embedding(20, 7))


def test_the_shipped_network_knows_more_than_the_frequencies() -> None:
    path = ARTIFACT_DIR / "tiny" / f"{DATA_AWARE}.safetensors"
    rows = read_artifact(path, DATA_AWARE, "profile").made_from["layers"]
    assert len(rows) == 8
    assert all(row["data_aware"] > row["frequency"] for row in rows)

"""Predictors on a small random model: trained, applied, replayed, and refused; SiDA's last."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import AutoModelForCausalLM, BatchEncoding

from lm_eval_moecache.algorithms.learned.data_aware import NUM_LSTMS
from lm_eval_moecache.algorithms.learned.predictor import costs, shapes, target_of
from lm_eval_moecache.algorithms.policy import load_policy
from lm_eval_moecache.algorithms.prefetch.gates import DataAware
from lm_eval_moecache.cli.main import main
from lm_eval_moecache.engine.costs import Costs
from lm_eval_moecache.engine.replay import replay
from lm_eval_moecache.harness.arguments import read_config
from lm_eval_moecache.harness.lm import MoECacheLM
from lm_eval_moecache.model.moe_layers import find_moe_layers
from lm_eval_moecache.model.predictor.network import (
    PassPredictor,
    PredictorNetwork,
    pass_predictor_of,
    sparsemax,
)
from lm_eval_moecache.model.predictor.training import (
    Answer,
    Pairs,
    Recipe,
    Samples,
    answers,
    certainty,
    certainty_rows,
    judge,
    layer_rows,
    split,
    train,
)
from lm_eval_moecache.model.reading import watched
from lm_eval_moecache.profiling._texts import read_prompts
from lm_eval_moecache.records.artifact import (
    ARTIFACT_DIR,
    DATA_AWARE,
    PREDICTOR,
    Artifact,
    read_artifact,
)
from lm_eval_moecache.records.event import DECODE, PREFILL
from lm_eval_moecache.testing.streams import artifact_for, make_geometry, make_hardware
from lm_eval_moecache.trace.importers import load_trace
from tests.artifacts import predictor_of, profile_for
from tests.conftest import Checkpoint, Moecache
from tests.test_live_replay import _run

PROMPTS = [f"Say {word}" for word in ("one", "two", "three", "four", "five", "six")]


@pytest.fixture(scope="module")
def model(checkpoint: Checkpoint) -> str:
    return str(checkpoint("olmoe"))


def command(
    model: str, folder: Path, out: str, *options: str, kind: str = "predictor"
) -> list[str]:
    prompts = folder / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS))
    sizes = ["--prompts_per_batch", "2"] if kind == "predictor" else ["--width", "8"]
    sizes += ["--tokens", "4", "--max_epochs", "3", "--data", str(prompts)]
    words = ["profile", kind, "--pretrained", model, "--out", str(folder / out)]
    return [*words, *sizes, *options]


def test_the_command_reports_and_repeats_itself(
    model: str, tmp_path: Path, moecache: Moecache
) -> None:
    report = moecache.json(*command(model, tmp_path, "a.safetensors", "--json"))
    assert [row["target"] for row in report["layers"]] == [1, 2, 0]
    assert all(0 <= row["predictor"] <= 1 and "next_gate" in row for row in report["layers"])
    assert sum(row["tokens"] for row in report["certainty"]) > 0
    assert main(command(model, tmp_path, "b.safetensors")) == 0
    a, b = ((tmp_path / f"{name}.safetensors").read_bytes() for name in "ab")
    assert a == b
    assert main(command(model, tmp_path, "c.safetensors", "--loss", "bce")) == 0
    kl, bce = (read_artifact(tmp_path / f"{n}.safetensors", PREDICTOR, "profile") for n in "ac")
    assert (kl.made_from["loss"], bce.made_from["loss"]) == ("kl", "bce")
    assert any((kl.arrays[name] != bce.arrays[name]).any() for name in kl.arrays)


class Words:
    """A tokenizer of texts of numbers; its end token is 0."""

    eos_token = pad_token = "0"
    pad_token_id = 0
    padding_side = truncation_side = "right"

    def __call__(self, texts: Sequence[str], **options: Any) -> BatchEncoding:
        rows = [[int(word) for word in text.split()] for text in texts]
        longest = max(map(len, rows))
        ids = [[0] * (longest - len(row)) + row for row in rows]
        mask = [[0] * (longest - len(row)) + [1] * len(row) for row in rows]
        return BatchEncoding({"input_ids": ids, "attention_mask": mask}, tensor_type="pt")


@pytest.fixture(scope="module")
def recorded(model: str) -> tuple[Any, Any, list[Answer]]:
    """A model, its layers, and its answers to two prompts of unlike length."""
    network: Any = AutoModelForCausalLM.from_pretrained(model).eval()
    layers = find_moe_layers(network)
    given: dict[str, Any] = {"num_tokens": 4, "batch_size": 2}
    return network, layers, list(answers(network, Words(), layers, ["5 6 7", "9 6"], **given))


def test_recorded_are_the_texts_that_the_model_wrote_as_its_routers_read_them(
    recorded: Any,
) -> None:
    network, layers, found = recorded
    reading = list[Any]()
    for answer, prompt in zip(found, ([5, 6, 7], [9, 6]), strict=True):
        ids = torch.tensor([prompt])
        expected = network.generate(ids, max_new_tokens=4, do_sample=False)[0]
        assert answer.begin == len(prompt)
        assert answer.tokens.tolist() == expected[: len(answer.tokens)].tolist()
        with watched([layers[1].router], lambda _, args, out: reading.append((args[0], out[0]))):
            network(answer.tokens[None])
        inputs, logits = reading[-1]
        assert torch.equal(answer.hidden[1], inputs.reshape(-1, inputs.shape[-1]).float())
        assert torch.equal(answer.logits[1], logits.float())
    samples = Samples.of(found)
    assert samples.prompts.tolist() == [0] * 4 + [1] * 4
    assert np.array_equal(samples.hidden[2][4:], found[1].hidden[2][2:].half())


def test_pairs_join_neighbouring_layers_and_neighbouring_tokens() -> None:
    hidden = np.arange(2 * 5 * 3).reshape(2, 5, 3).astype(np.float16)
    logits = np.arange(2 * 5 * 4).reshape(2, 5, 4).astype(np.float16)
    samples = Samples([*hidden], [*logits], np.array([0, 0, 0, 1, 1]))
    same = samples.pairs(0)
    np.testing.assert_array_equal(same.inputs_ND, hidden[0])
    np.testing.assert_array_equal(same.targets_NE, logits[1])
    across = samples.pairs(1)
    np.testing.assert_array_equal(across.inputs_ND, hidden[1][[0, 1, 3]])
    np.testing.assert_array_equal(across.targets_NE, logits[0][[1, 2, 4]])
    assert across.prompts_N.tolist() == [0, 0, 1]
    ended = Answer(torch.tensor([5]), 1, [torch.ones(1, 3)] * 2, [torch.ones(1, 4)] * 2)
    with pytest.raises(ValueError, match="nothing to learn from"):
        Samples.of([ended])


def test_no_prompt_is_on_both_sides_of_the_split() -> None:
    training, held_out = split(np.arange(20), 42)
    assert (len(training), len(held_out)) == (16, 4) and not set(training) & set(held_out)
    again, other = split(np.arange(20), 42)[1], split(np.arange(20), 43)[1]
    assert held_out.tolist() == again.tolist() != other.tolist()


@pytest.mark.parametrize(("loss", "stages"), [("kl", 1), ("kl", 2), ("bce", 1)])
def test_training_learns_a_linear_router(loss: str, stages: int) -> None:
    rng = np.random.default_rng(0)
    gate = rng.normal(size=(6, 8))
    inputs = rng.normal(size=(1200, 6)).astype(np.float16)
    targets = (inputs.astype(np.float64) @ gate).astype(np.float16)
    pairs = Pairs(inputs, targets, np.arange(1200))
    recipe = Recipe(loss=loss, learning_rate=0.01, max_epochs=12)
    training, held_out = pairs.where(np.arange(1200) < 1000), pairs.where(np.arange(1200) >= 1000)
    repeated, weights = (
        train(training, held_out, stages=stages, num_chosen=2, recipe=recipe, layer=0)[0]
        for _ in range(2)
    )
    values = by_hand(weights, 0, stages, held_out.inputs_ND.astype(np.float32))
    assert shared(values, held_out.targets_NE, 2).mean() > 0.9 * 2
    assert all((weights[name] == array).all() for name, array in repeated.items())


def shared(scores: Any, others: Any, count: int) -> np.ndarray:
    """Count per row the experts among the top `count` of both."""
    best = [
        torch.as_tensor(values).float().topk(count).indices.tolist() for values in (scores, others)
    ]
    return np.array([len({*row} & {*other}) for row, other in zip(*best, strict=True)])


def by_hand(arrays: Any, layer: int, stages: int, values: np.ndarray) -> np.ndarray:
    """A predictor of one or two linear stages, with a ReLU between them."""
    for stage in range(stages):
        weight, bias = (arrays[f"{layer}.{stage}.{name}"] for name in ("weight", "bias"))
        values = (np.maximum(values, 0) if stage else values) @ weight.T + bias
    return values


def test_the_loss_is_equation_4_by_hand() -> None:
    """One sample, no training: KL of (0.7, 0.2, 0.1) from an untrained network's prediction."""
    inputs = np.ones((2, 1), np.float16)
    targets = np.log(np.array([[0.7, 0.2, 0.1]] * 2)).astype(np.float16)
    pairs = Pairs(inputs, targets, np.arange(2))
    recipe = Recipe(learning_rate=1e-12, max_epochs=1)
    arrays, best = train(pairs, pairs, stages=1, num_chosen=1, recipe=recipe, layer=3)
    weight, bias = (arrays[f"3.0.{name}"].astype(np.float64) for name in ("weight", "bias"))
    logits = weight[:, 0] + bias
    predicted = np.exp(logits) / np.exp(logits).sum()
    true = np.exp(targets[0].astype(np.float64))
    expected = float((true * np.log(true / predicted)).sum())
    assert best.held_out_loss == pytest.approx(expected, rel=0.01)


def test_early_stopping_keeps_the_best_epoch() -> None:
    rng = np.random.default_rng(1)
    noise = [
        Pairs(*(rng.normal(size=(40, 8)).astype(np.float16) for _ in "ab"), np.arange(40))
        for _ in "cd"
    ]
    recipe = Recipe(learning_rate=0.05, batch_size=4, max_epochs=30, patience=2)
    _, best = train(noise[0], noise[1], stages=2, num_chosen=2, recipe=recipe, layer=0)
    assert best.epochs == best.epoch + 2 < 30


def test_certainty_is_the_divergence_from_uniform() -> None:
    assert certainty(np.zeros((1, 4), np.float32))[0] == pytest.approx(0.0, abs=1e-6)
    sure = np.array([[100.0, 0, 0, 0]], np.float32)
    assert certainty(sure)[0] == pytest.approx(np.log(4))
    half = np.log(np.array([[0.5, 0.25, 0.125, 0.125]], np.float32))
    expected = np.log(4) - 1.75 * np.log(2)
    assert certainty(half)[0] == pytest.approx(expected, rel=1e-5)


def test_judging_counts_each_predictor_on_held_out_prompts(recorded: Any) -> None:
    _, layers, found = recorded
    samples = Samples.of(found)
    geometry = make_geometry(num_layers=3, num_experts=8, top_k=3)
    network = PredictorNetwork(artifact_for(PREDICTOR, geometry, hidden=32).arrays, 3)
    sides = {"known": np.array([0]), "held_out": np.array([1])}
    judged = judge(samples, network, layers, num_chosen=3, **sides)
    rows, own = layer_rows(judged, 3), judged[judged["layer"] == 0]
    assert [(row["layer"], row["target"], row["tokens"]) for row in rows] == [
        (0, 1, 4), (1, 2, 4), (2, 0, 3)
    ]  # fmt: skip
    first = samples.pairs(0)
    held_pairs = first.where(first.prompts_N == 1)
    inputs = torch.from_numpy(held_pairs.inputs_ND)
    gate = layers[1].router.forward(inputs.bfloat16())[0].detach()
    assert rows[0]["next_gate"] == pytest.approx(shared(gate, held_pairs.targets_NE, 3).mean() / 3)
    ordered = np.sort(held_pairs.targets_NE.astype(np.float32), axis=-1)[:, ::-1]
    np.testing.assert_allclose(own["gap"], ordered[:, 2] - ordered[:, 3])
    counts = shared(network(0, inputs), held_pairs.targets_NE, 3)
    assert rows[0]["predictor"] == pytest.approx(counts.mean() / 3)
    np.testing.assert_array_equal(own["predictor"], counts)
    assert sum(row["tokens"] for row in certainty_rows(judged, 3)) == len(judged)


def test_the_network_is_relu_between_two_linear_stages() -> None:
    artifact = artifact_for(PREDICTOR, make_geometry(), hidden=4)
    network = PredictorNetwork(artifact.arrays, 3)
    hidden = np.linspace(-1, 1, 8).reshape(2, 4).astype(np.float32)
    arrays = {name: a.astype(np.float32) for name, a in artifact.arrays.items()}
    assert arrays["2.0.weight"].shape == (8, 4), "twice the input's width"
    for layer, stages in ((0, 1), (2, 2)):
        expected = by_hand(arrays, layer, stages, hidden)
        np.testing.assert_allclose(network(layer, torch.from_numpy(hidden)), expected, rtol=1e-4)


def test_a_predictor_costs_its_own_weights_bytes_and_kernels() -> None:
    geometry, hardware = make_geometry(), make_hardware()
    linear, _, mlp = costs(artifact_for(PREDICTOR, geometry, hidden=4))
    assert (linear.num_weights, linear.num_bytes, linear.num_kernels) == (40, 80, 3)
    weights = 4 * 8 + 8 + 8 * 8 + 8
    assert (mlp.num_weights, mlp.num_bytes, mlp.num_kernels) == (
        weights,
        2 * weights,
        5,
    )
    clock = Costs(hardware, geometry)
    assert clock.network_s(linear, 1) == pytest.approx(80 / 400.0 + 3 * 0.001)
    many = 10**6
    assert clock.network_s(linear, many) == pytest.approx(2 * 40 * many / 1e6 + 3 * 0.001)


def test_only_decoding_predicts_the_next_token() -> None:
    assert [target_of(layer, 3, PREFILL) for layer in range(3)] == [1, 2, None]
    assert [target_of(layer, 3, DECODE) for layer in range(3)] == [1, 2, 0]
    assert len(shapes(3, 8, 4)) == 2 * 4


def test_prompts_come_from_lines_or_from_json(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('"two\\nlines"\n{"prompt": "one", "id": 3}\n')
    assert read_prompts(str(file)) == ["two\nlines", "one"]
    file.write_text('{"text": "no prompt"}\n')
    with pytest.raises(ValueError, match="line 1 must be a string or have one under `prompt`"):
        read_prompts(str(file))


def test_what_ships_for_tiny_was_made_by_the_command_and_beats_every_baseline() -> None:
    """On held-out prompts in every layer, for both losses and for SiDA's network."""
    for name, loss in (("predictor", "kl"), ("predictor_bce", "bce"), (DATA_AWARE, None)):
        kind = PREDICTOR if loss else DATA_AWARE
        artifact = read_artifact(ARTIFACT_DIR / "tiny" / f"{name}.safetensors", kind, "profile")
        assert artifact.made_from.get("loss") == loss
        rows = artifact.made_from["layers"]
        assert len(rows) == artifact.num_layers == 8
        for row in rows:
            assert row[kind] > max(row.get("next_gate", 0), row["frequency"]), row


GEOMETRY = make_geometry(num_layers=3, num_experts=8)


@given(st.lists(st.floats(-4, 4), min_size=1, max_size=7))
def test_sparsemax_is_the_nearest_point_of_the_simplex(scores: list[float]) -> None:
    row = torch.tensor(scores, dtype=torch.float64)
    point = sparsemax(row)
    assert float(point.min()) >= 0 and abs(float(point.sum()) - 1) < 1e-9
    distance = float(((point - row) ** 2).sum())
    for index in range(len(scores)):
        # Any step towards a corner leads away from `row`.
        corner = torch.zeros_like(row)
        corner[index] = 1
        for step in (1e-3, 0.1, 1.0):
            other = point + step * (corner - point)
            assert float(((other - row) ** 2).sum()) >= distance - 1e-9


def slow_logits(artifact: Artifact, embedded: np.ndarray) -> np.ndarray:
    """The network token by token in numpy: logits [T, L, E] of embeddings [T, D]."""
    a = {name: array.astype(np.float64) for name, array in artifact.arrays.items()}
    width = len(a["compress.bias"])
    states = [(np.zeros(width), np.zeros(width)) for _ in range(NUM_LSTMS)]
    states_so_far: list[np.ndarray] = []
    logits = []

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
        states_so_far.append(values)
        scores = torch.tensor(np.stack(states_so_far) @ values / width**0.5)
        context = sparsemax(scores).numpy() @ np.stack(states_so_far)
        residual = np.maximum(a["residual.weight"] @ compressed + a["residual.bias"], 0)
        logits.append(a["heads.weight"] @ (context + residual) + a["heads.bias"])
    return np.stack(logits).reshape(len(embedded), artifact.num_layers, artifact.num_experts)


@pytest.fixture(scope="module")
def drawn() -> tuple[Artifact, nn.Embedding]:
    torch.manual_seed(0)
    return artifact_for(DATA_AWARE, GEOMETRY), nn.Embedding(20, 6)


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32 - 1))
def test_pass_by_pass_it_says_of_each_rows_text_what_its_oracle_does(
    drawn: tuple[Artifact, nn.Embedding], seed: int
) -> None:
    """Under any padding, with drafts cropped from the KV cache and rows that have ended."""
    artifact, embedding = drawn
    rng, pass_predictor, past = np.random.default_rng(seed), PassPredictor(artifact, embedding), 0
    texts: list[list[int | None]] = [[] for _ in range(rng.integers(1, 3))]
    for _ in range(5):
        past -= int(rng.integers(0, past + 1)) if rng.random() < 0.2 else 0
        ids = rng.integers(0, 20, (len(texts), rng.integers(1, 4)))
        valid, expected = rng.random(ids.shape) < 0.8, []
        logits_by_layer = pass_predictor.begin_pass(torch.from_numpy(ids), past, valid.reshape(-1))
        for text, row, real in zip(texts, ids.tolist(), valid.tolist(), strict=True):
            text[past:] = [
                token if is_real else None for token, is_real in zip(row, real, strict=True)
            ]
            tokens = torch.tensor([token for token in text if token is not None], dtype=torch.int64)
            if any(real):
                expected += [
                    *slow_logits(artifact, embedding(tokens).detach().numpy())[-sum(real) :]
                ]
        logits = np.stack([logits_by_layer[layer] for layer in range(3)], axis=1)
        np.testing.assert_allclose(logits, np.reshape(expected, (-1, 3, 8)), atol=1e-4)
        past += ids.shape[1]


def test_the_command_makes_the_same_network_twice_and_it_runs(
    model: str, tmp_path: Path, moecache: Moecache
) -> None:
    words = command(model, tmp_path, "made.safetensors", kind="data_aware")
    assert [row["layer"] for row in moecache.json(*words)["layers"]] == [0, 1, 2]
    artifact_bytes = (tmp_path / "made.safetensors").read_bytes()
    moecache(*words)
    assert (tmp_path / "made.safetensors").read_bytes() == artifact_bytes
    profile = {"prefetch.profile": str(tmp_path / "made.safetensors")}
    lm = MoECacheLM(pretrained=model, device="cpu", policy="sida", capacity="20%", **profile)
    _run(lm)
    assert sum(record.predicted_right for record in lm.engine.ledger.passes) > 0


def test_a_trace_of_another_policy_is_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"pretrained": str(checkpoint("olmoe")), "device": "cpu"}
    lm = MoECacheLM(**arguments, policy="on_demand", capacity="20%", trace=str(tmp_path))
    _run(lm)
    lm.wrapped.recorder.writer.close(lm.engine.ledger.requests)  # type: ignore[union-attr]
    [path] = tmp_path.glob("*.parquet")
    profile = predictor_of(lm.model, load_policy("sida"))
    config = read_config({"policy": "sida", "capacity": "20%", **profile})
    trace = load_trace(str(path))
    with pytest.raises(ValueError, match="was not recorded with prefetch='data_aware'"):
        replay(trace, config.setting(trace.geometry))


def test_an_embedding_of_another_length_is_refused() -> None:
    prefetch = DataAware(GEOMETRY, profile=profile_for(DATA_AWARE, GEOMETRY))
    with pytest.raises(ValueError, match="takes embeddings of 6 numbers, but those of"):
        pass_predictor_of(prefetch, nn.Embedding(20, 7))

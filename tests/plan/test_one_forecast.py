"""One model has one forecast, whether it is a name, a folder, an index or a GGUF file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from gguf import GGMLQuantizationType as Type

from lm_eval_moecache.emulate.models import EMULATED_DIR, load_real_model
from tests.conftest import Moecache
from tests.plan.test_tensors import write_gguf

CARD = "rtx-4090-24gb"
SIZES = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "first_k_dense_replace": "leading_dense_block_count",
}


def hub_config(name: str) -> dict[str, Any]:
    """Return a shipped model as its `config.json` has it."""
    config = yaml.safe_load((EMULATED_DIR / f"{name}.yaml").read_text())
    return {key: value for key, value in config.items() if key not in ("name", "source")}


def tensors(name: str) -> Iterator[tuple[str, tuple[int, ...], Type]]:
    """Yield a model's tensors as llama.cpp has them, in bf16, what goes together as one.

    Their sums are the model's.
    """
    model = load_real_model(name)
    dense = hub_config(name).get("first_k_dense_replace", 0)
    yield "token_embd.weight", (model.embedding,), Type.BF16
    yield "output.weight", (model.output,), Type.BF16
    for layer in range(dense):
        weights = (model.read_once - model.output) // dense
        yield f"blk.{layer}.attn_all.weight", (weights,), Type.BF16
    for layer in range(dense, dense + model.num_layers):
        yield f"blk.{layer}.attn_all.weight", (model.layer_weights,), Type.BF16
        experts = (model.num_experts, model.expert_weights)
        yield f"blk.{layer}.ffn_up_exps.weight", experts, Type.BF16


def gguf_of(path: Path, name: str) -> Path:
    """Write the GGUF file of a shipped model in bf16, without its weights."""
    model, config = load_real_model(name), hub_config(name)
    numbers = {field: config.get(key) for key, field in SIZES.items()}
    numbers |= {"expert_count": model.num_experts, "expert_used_count": model.top_k}
    return write_gguf(path, tensors(name), general={"name": name}, file_type=32, **numbers)


@pytest.mark.parametrize("name", ["Qwen3-30B-A3B", "GLM-4.5-Air", "MiniMax-M2"])
def test_one_model_has_one_forecast_however_it_is_named(
    name: str, tmp_path: Path, moecache: Moecache
) -> None:
    config = hub_config(name)
    folder = tmp_path / name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    # Not every copy of a configuration says how its files are stored.
    bare = tmp_path / "bare.json"
    bare.write_text(json.dumps({**config, "quantization_config": None}))
    model = load_real_model(name)
    nbytes = model.all_expert_bytes + model.dense_bytes
    index = folder / "model.safetensors.index.json"
    weights = {"lm_head.weight": "model-00001-of-00001.safetensors"}
    index.write_text(json.dumps({"metadata": {"total_size": nbytes}, "weight_map": weights}))
    gguf = gguf_of(tmp_path / f"{name}.gguf", name)
    named = {"name": name, "folder": folder, "json": folder / "config.json", "bare": bare}
    named |= {"index": index, "gguf": gguf}
    said, shipped = {}, {}
    for way, path in named.items():
        report = moecache.json("plan", path, "--hardware", CARD)
        said[way] = report["first"], report["assumed"][1:]
        rows = [(row["runtime"], row["tok_per_s"]) for row in report["runtimes"]]
        speeds = {runtime: speed for runtime, speed in rows if speed}
        shipped = shipped or speeds
        assert speeds == pytest.approx(shipped, rel=1e-3), way
    assert len({str(first) for first in said.values()}) == 1, said
    shutil.rmtree(folder)
    gguf.unlink()


def test_dense_weights_that_do_not_fit_are_planned_in_fewer_bits(moecache: Moecache) -> None:
    """In bf16 what is not in experts of GLM-5 takes 37 GB of a card's 24."""
    report = moecache.json("plan", "GLM-5", "--hardware", CARD)
    assert report["assumed"][0] == "weights in q4_k_m (as published, bf16, they do not fit)"
    assert report["runtimes_precision"] == "q4_k_m" and report["memory"]["dense"] < 12e9
    asked = moecache("plan", "GLM-5", "--hardware", CARD, "--precision", "bf16", code=2)
    assert "GLM-5 does not run on rtx-4090-24gb" in asked


def test_bits_that_somebody_names_are_not_exchanged(moecache: Moecache) -> None:
    """30 GB of FP8 do not fit on a card of 24 GB, as do not 61 GB of bf16."""
    fp8 = moecache.json("plan", "Qwen/Qwen3-30B-A3B-FP8", "--hardware", CARD)
    assert fp8["runtimes_precision"] == fp8["precision"] == "fp8"
    assert not any("weights in" in text for text in fp8["assumed"])
    named = moecache.json("plan", "Qwen/Qwen3-30B-A3B", "--hardware", CARD)
    assert named["runtimes_precision"] == "q4_k_m"
    # Experts of four bits stay where they fit next to their layers in bf16; GGUF's are tried first.
    small = moecache.json("plan", "gpt-oss-120b", "--hardware", "rtx-3060-12gb")
    assert small["runtimes_precision"] == "mxfp4"
    none = moecache.json("plan", "gpt-oss-120b", "--hardware", "rtx-3060-12gb", "--context", 200000)
    assert none["runtimes_precision"] == "mxfp4_moe"

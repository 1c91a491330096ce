"""Sizes of models from the indexes of their files, by hand; damaged and foreign files say why."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter
from gguf.quants import quant_shape_to_byte_shape
from safetensors.numpy import save_file

from moecache_plan.models import load_model
from tests.emulate.test_models import OLMOE

HIDDEN, INNER, EXPERTS, VOCABULARY = 256, 512, 4, 1000
NUMBERS = {
    "block_count": 2,
    "embedding_length": HIDDEN,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 64,
    "expert_count": EXPERTS,
    "expert_used_count": 2,
}
MATRIX = EXPERTS * HIDDEN * INNER


def write_gguf(
    path: Path,
    tensors: Iterable[tuple[str, tuple[int, ...], Type]],
    architecture: str = "qwen3moe",
    general: dict[str, str] | None = None,
    file_type: int = 15,
    **changes: object,
) -> Path:
    """Write a GGUF file that has all but the weights: a hole in their place."""
    writer, total = GGUFWriter(path, architecture), 0
    for key, number in {**NUMBERS, **changes}.items():
        add: Any = writer.add_array if isinstance(number, list) else writer.add_uint32
        if number is not None:
            add(f"{architecture}.{key}", number)
    for key, text in (general or {}).items():
        writer.add_string(f"general.{key}", text)
    writer.add_file_type(file_type)
    for name, shape, kind in tensors:
        size = quant_shape_to_byte_shape(shape, kind)
        nbytes = math.prod(size)
        writer.add_tensor_info(name, size, np.dtype(np.uint8), nbytes, raw_dtype=kind)
        total += -(-nbytes // 32) * 32
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    os.truncate(path, -(-path.stat().st_size // 32) * 32 + total)
    return path


def layer(number: int, down: Type) -> list[tuple[str, tuple[int, ...], Type]]:
    name = f"blk.{number}."
    return [
        (name + "ffn_gate_exps.weight", (EXPERTS, INNER, HIDDEN), Type.Q4_K),
        (name + "ffn_up_exps.weight", (EXPERTS, INNER, HIDDEN), Type.Q4_K),
        (name + "ffn_down_exps.weight", (EXPERTS, HIDDEN, INNER), down),
        (name + "attn_q.weight", (HIDDEN, HIDDEN), Type.Q8_0),
        (name + "attn_k.weight", (HIDDEN // 2, HIDDEN), Type.Q8_0),
    ]


VOCABULARY_TENSORS: list[tuple[str, tuple[int, ...], Type]] = [
    ("token_embd.weight", (VOCABULARY, HIDDEN), Type.Q4_K),
    ("output.weight", (VOCABULARY, HIDDEN), Type.Q6_K),
]
WHOLE = [*VOCABULARY_TENSORS, *layer(0, Type.Q4_K), *layer(1, Type.Q6_K)]
# Bytes for 256 weights: 144 in Q4_K, 210 in Q6_K, 272 in Q8_0.
EXPERT_BYTES = MATRIX // 256 * (5 * 144 + 210)
DENSE_BYTES = 2 * HIDDEN * HIDDEN * 3 // 2 // 256 * 272 + VOCABULARY * (144 + 210)


def test_a_gguf_is_sized_by_every_tensor(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "mine.gguf", WHOLE, general={"name": "Mine"})
    model = load_model(str(path))
    assert (model.name, model.stored.name) == ("Mine", "q4_k_m")
    assert (model.num_layers, model.num_experts, model.top_k) == (2, EXPERTS, 2)
    assert model.expert_weights == 3 * HIDDEN * INNER
    assert model.num_layers * EXPERTS * model.expert_bytes == EXPERT_BYTES
    assert model.dense_bytes == DENSE_BYTES
    # Two layers of two heads of 64, keys and values in two bytes.
    assert model.kv_bytes(100) == 100 * 2 * 2 * 64 * 2 * 2
    assert load_model(str(tmp_path)) == model, "its folder names it, too"


def test_a_split_gguf_is_read_whole_whichever_part_is_named(tmp_path: Path) -> None:
    first = write_gguf(tmp_path / "m-00001-of-00002.gguf", WHOLE[:7])
    second = tmp_path / "m-00002-of-00002.gguf"
    with pytest.raises(ValueError, match=r"one of 2.*not in its folder: m-00002-of-00002\.gguf"):
        load_model(str(first))
    write_gguf(second, WHOLE[7:])
    for path in (first, second, tmp_path):
        model = load_model(str(path))
        assert 2 * EXPERTS * model.expert_bytes == EXPERT_BYTES
        assert model.dense_bytes == DENSE_BYTES


def test_dense_layers_tied_vocabularies_and_layers_that_predict_ahead(tmp_path: Path) -> None:
    dense = [("blk.0.ffn_up.weight", (INNER, HIDDEN), Type.Q8_0)]
    ahead = [(f"blk.2.{name[6:]}", shape, kind) for name, shape, kind in layer(1, Type.Q8_0)]
    table = [("per_layer_token_embd.weight", (4 * VOCABULARY, HIDDEN), Type.Q8_0)]
    tensors = [*VOCABULARY_TENSORS[:1], *dense, *layer(1, Type.Q4_K), *ahead, *table]
    path = write_gguf(tmp_path / "a.gguf", tensors, block_count=3, nextn_predict_layers=1)
    model = load_model(str(path))
    assert model.num_layers == 1 and model.embedding == 0
    assert model.output == VOCABULARY * HIDDEN
    assert model.read_once == VOCABULARY * HIDDEN + INNER * HIDDEN
    assert model.expert_bytes * EXPERTS == 3 * MATRIX // 256 * 144


@pytest.mark.parametrize(
    ("numbers", "tokens_bytes"),
    [
        # Three windowed layers of two heads of 64 see 100 tokens, one layer sees all 1,000.
        ({"attention.sliding_window_pattern": 4}, (3 * 100 + 1000) * 2 * 2 * 64 * 2),
        ({"attention.sliding_window_pattern": [1, 0, 1, 0]}, (2 * 100 + 2000) * 2 * 2 * 64 * 2),
        # The windowed layers of Gemma 4 have heads of their own.
        (
            {
                "attention.sliding_window_pattern": [1, 1, 1, 0],
                "attention.head_count_kv": [8, 8, 8, 1],
                "attention.key_length_swa": 32,
            },
            3 * 100 * 2 * 8 * 32 * 2 + 1000 * 2 * 64 * 2,
        ),
    ],
)
def test_windows_of_a_gguf(tmp_path: Path, numbers: dict[str, Any], tokens_bytes: int) -> None:
    tensors = [tensor for n in range(4) for tensor in layer(n, Type.Q4_K)]
    numbers = {"block_count": 4, "attention.sliding_window": 100, **numbers}
    path = write_gguf(tmp_path / "a.gguf", VOCABULARY_TENSORS + tensors, **numbers)
    assert load_model(str(path)).kv_bytes(1000) == tokens_bytes


@pytest.mark.parametrize(
    ("numbers", "state_bytes"),
    [
        # Kimi-Linear: 4 heads of 16 x 16 in float32; Mamba: 64 channels of 8.
        ({"kda.head_dim": 16}, 4 * 4 * 16 * 16),
        ({"ssm.state_size": 8, "ssm.time_step_rank": 4, "ssm.inner_size": 64}, 4 * 64 * 8),
        ({}, 0),
    ],
)
def test_layers_of_a_gguf_whose_state_does_not_grow(
    tmp_path: Path, numbers: dict[str, Any], state_bytes: int
) -> None:
    linear = [("blk.0.ssm_out.weight", (HIDDEN, HIDDEN), Type.Q8_0)]
    tensors = [*VOCABULARY_TENSORS, *linear, *layer(0, Type.Q4_K), *layer(1, Type.Q4_K)]
    mla = {"attention.kv_lora_rank": 32, "rope.dimension_count": 8}
    path = write_gguf(tmp_path / "a.gguf", tensors, **mla, **numbers)
    assert load_model(str(path)).kv_bytes(100) == 2 * (32 + 8) * 100 + state_bytes


@pytest.mark.parametrize(
    ("tensors", "general", "said"),
    [
        (
            VOCABULARY_TENSORS,
            {},
            r"not a Mixture-of-Experts model: qwen3moe, 2 tensors, none of them",
        ),
        ([], {"type": "imatrix"}, r"is an importance matrix, to be read by `moecache profile use`"),
        (WHOLE, {"type": "adapter"}, r"is an adapter"),
        (WHOLE, {"type": "mmproj"}, r"is an image encoder"),
    ],
)
def test_a_gguf_that_cannot_be_run_says_why(
    tmp_path: Path, tensors: Any, general: dict[str, str], said: str
) -> None:
    path = write_gguf(tmp_path / "a.gguf", tensors, general=general)
    with pytest.raises(ValueError, match=said):
        load_model(str(path))


@pytest.mark.parametrize("kept", [0, 3, 4, 7, 23, 24, 100, 400, 1000, 2000])
def test_a_gguf_that_is_cut_short_says_so(tmp_path: Path, kept: int) -> None:
    path = write_gguf(tmp_path / "a.gguf", WHOLE)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"model='.*not a (whole )?GGUF file"):
        load_model(str(path))


def test_a_folder_of_several_models_and_an_empty_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"without a config\.json or one GGUF model"):
        load_model(str(tmp_path))
    write_gguf(tmp_path / "a.gguf", WHOLE)
    shutil.copy(tmp_path / "a.gguf", tmp_path / "b.gguf")
    with pytest.raises(ValueError, match="2 GGUF models in it: name one"):
        load_model(str(tmp_path))


def test_a_configuration_under_any_name_and_of_any_type(tmp_path: Path) -> None:
    config = {**OLMOE, "model_type": "never_heard_of"}
    config["moe_topk"] = config.pop("num_experts_per_tok")
    config["moe_num_routed_experts"] = config.pop("num_experts")
    path = tmp_path / "olmoe-like.json"
    path.write_text(json.dumps(config))
    model, shipped = load_model(str(path)), load_model("OLMoE-1B-7B")
    assert model.name == "olmoe-like"
    assert (model.num_weights, model.top_k) == (shipped.num_weights, 8)


SMALL = {
    **OLMOE,
    "hidden_size": 8,
    "intermediate_size": 4,
    "num_hidden_layers": 2,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 10,
}


def checkpoint(folder: Path, config: dict[str, Any]) -> Path:
    """Write experts in one byte a weight, the rest in two, and layers that predict ahead."""
    experts = {
        f"model.layers.{n}.mlp.experts.{e}.{name}_proj.weight": np.zeros((8, 4), np.int8)
        for n in range(3)
        for e in range(3)
        for name in ("gate", "up", "down")
    }
    shapes = {f"model.layers.{n}.mlp.gate.weight": (3, 8) for n in range(2)}
    attention = "model.layers.{}.self_attn.{}_proj.weight"
    shapes |= {attention.format(n, name): (8, 8) for n in range(2) for name in "qkvo"}
    shapes |= dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (10, 8))
    dense = {name: np.zeros(shape, np.float16) for name, shape in shapes.items()}
    save_file(experts, folder / "a.safetensors")
    save_file({**dense, "visual.weight": np.zeros(99, np.float16)}, folder / "b.safetensors")
    names = {**dict.fromkeys(experts, "a.safetensors"), **dict.fromkeys(dense, "b.safetensors")}
    total = 2 * 3 * 96 + 2 * sum(tensor.size for tensor in dense.values())
    index = {"metadata": {"total_size": total}, "weight_map": names}
    (folder / "config.json").write_text(json.dumps(config))
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps(index))
    return path


def test_an_index_of_safetensors_gives_the_bits_of_the_tensors(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, SMALL)
    model = load_model(str(path))
    assert (model.stored.expert_bits, model.stored.dense_bits, model.stored.vocab_bits) == (
        *(8, 16, 16),
    )
    assert (model.expert_bytes, model.dense_bytes) == (96, 2 * (2 * (4 * 64 + 24) + 2 * 80))
    # Without the files the total has to do: what is left next to the rest in bf16.
    (tmp_path / "a.safetensors").unlink()
    assert load_model(str(path)).expert_bytes == 96


def test_an_index_without_its_configuration_or_its_map_says_so(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, SMALL)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ValueError, match=r"folder has no config\.json"):
        load_model(str(path))

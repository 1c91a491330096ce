"""Real models' sizes against published totals and against arithmetic by hand."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest

from lm_eval_moecache.emulate.models import EMULATED_DIR, emulated_names, load_real_model
from lm_eval_moecache.emulate.stored import load_stored
from tests.engine.traces import GEOMETRY

OLMOE = {
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "num_hidden_layers": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 50304,
    "tie_word_embeddings": False,
}
with (Path(__file__).parent / "published.csv").open() as file:
    PUBLISHED = {
        row["model"]: (float(row["total"]), float(row["rounding"]), row["active"])
        for row in csv.DictReader(line for line in file if line[0] != "#")
    }
GROUP = {"weights": {"num_bits": 4, "group_size": 32}}


def test_every_shipped_model_has_its_published_total() -> None:
    assert set(emulated_names()) == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_weights_of_a_configuration_add_up_to_the_published_total(name: str) -> None:
    model, (total, rounding, active) = load_real_model(name), PUBLISHED[name]
    assert model.num_weights / 1e9 == pytest.approx(total, abs=rounding)
    assert model.source
    # As a file of one's own it is the same, and has no key that nothing reads.
    assert load_real_model(str(EMULATED_DIR / f"{name}.yaml")) == model
    layers = model.num_layers * (model.layer_weights + model.top_k * model.expert_weights)
    # Cards differ in whether the vocabulary's two tables count.
    counts = [layers + model.read_once + table for table in (-model.output, 0, model.embedding)]
    assert not active or min(abs(n / 1e9 / float(active) - 1) for n in counts) < 0.05, counts


@pytest.mark.parametrize(
    ("name", "nbytes"),
    [
        # 20 layers of 32 heads of 128: a state of 128 x 128 in float32; 7 layers cache 512 + 64.
        ("Kimi-Linear-48B-A3B", 20 * 4 * 32 * 128 * 128 + 7 * 2 * (512 + 64) * 4096),
        ("MiniMax-Text-01", 70 * 4 * 64 * 128 * 128 + 10 * 2 * 2 * 8 * 128 * 4096),
        ("Granite-4.0-H-Small", 36 * 4 * 128 * 64 * 128 + 4 * 2 * 2 * 8 * 128 * 4096),
        ("Jamba-Mini", 28 * 4 * 8192 * 16 + 4 * 2 * 2 * 8 * 128 * 4096),
        # Keys of 192 and values of 128: 4 heads over all tokens, 8 over the last 128.
        ("MiMo-V2-Flash", 2 * 320 * (9 * 4 * 4096 + 39 * 8 * 128)),
        # Six attention layers of 2 heads of 128; 23 states of 64 x 64 x 128 in float32.
        ("Nemotron-3-Nano-30B-A3B", 6 * 2 * 2 * 128 * 2 * 4096 + 23 * 4 * 64 * 64 * 128),
        ("LFM2-8B-A1B", 6 * 2 * 8 * 64 * 2 * 4096 + 18 * 4 * 3 * 2048),
        # 25 layers of 8 heads of 256 attend to 1,024 tokens; 5 layers of 2 heads of 512 to all.
        ("Gemma-4-26B-A4B", 2 * 2 * (25 * 8 * 256 * 1024 + 5 * 2 * 512 * 4096)),
        # 10 layers of 2 heads of 256; 30 states of 32 heads of 128 x 128 in float32.
        ("Qwen3.5-35B-A3B", 10 * 2 * 2 * 256 * 2 * 4096 + 30 * 4 * 32 * 128 * 128),
    ],
)
def test_the_kv_cache_of_layers_of_every_kind_by_hand(name: str, nbytes: int) -> None:
    """At 4,096 tokens: delta and lightning attention, Mamba, convolutions, windows and mixes."""
    assert load_real_model(name).kv_bytes(4096) == nbytes


def test_layers_of_two_kinds_weigh_what_they_do_on_average() -> None:
    """Jamba's: 28 Mamba layers, and four of attention with 32 + 8 heads of 128."""
    jamba = load_real_model("Jamba-Mini")
    # Two projections in and one out of 8192, a step of rank 256 and two states of 16, kernels of 4.
    mamba = 3 * 4096 * 8192 + 8192 * (2 * 256 + 2 * 16) + 8192 * (16 + 4)
    mixer = round((28 * mamba + 4 * 4096 * 128 * 2 * (32 + 8)) / 32)
    assert (jamba.num_layers, jamba.layer_weights) == (16, mixer + 4096 * 16)
    assert load_real_model("LongCat-Flash").top_k == 8  # of 12 choices, 4 fall on nothing


def test_olmoe_by_hand() -> None:
    model = load_real_model("allenai/olmoe-1b-7b")
    # gate, up and down projection of 2048 x 1024 in two bytes a weight.
    assert model.expert_bytes == 3 * 2048 * 1024 * 2
    # Four square attention matrices and the router; a sixteenth of the output layer.
    assert model.layer_dense_bytes == 2 * (4 * 2048**2 + 2048 * 64 + 50304 * 2048 // 16)
    assert model.kv_bytes_per_token == 16 * 2 * 2048 * 2


def test_mxfp4_experts_are_four_and_a_quarter_bits_and_multiply_as_bf16() -> None:
    model = load_real_model("gpt-oss-20b")
    assert model.expert_bytes == 3 * 2880**2 * 17 // 32
    assert model.geometry().compute_bytes[0] == 3 * 2880**2 * 2
    large = load_real_model("gpt-oss-120b")
    experts = large.num_layers * large.num_experts * large.expert_bytes
    assert experts / 1e9 == pytest.approx(60.9, abs=0.05)  # and not 229


def test_a_stored_precision_sizes_experts_layers_and_vocabulary_apart() -> None:
    """OLMoE by hand in int8: 8.5 bits but for the vocabulary's, which stays at two bytes."""
    model = replace(load_real_model("OLMoE-1B-7B"), stored=load_stored("int8"))
    layers, vocabulary = 16 * (4 * 2048**2 + 2048 * 64), 2 * 50304 * 2048
    assert model.dense_bytes == pytest.approx(layers * 8.5 / 8 + vocabulary * 2, rel=1e-3)


def test_a_layer_is_charged_as_the_real_one_and_counts_stay() -> None:
    model = load_real_model("Mixtral-8x7B")
    charged = model.emulated_by(GEOMETRY)
    assert charged.expert_bytes == ((3 * 4096 * 14336 * 2,),) * 3
    assert (charged.num_experts, charged.top_k, charged.num_layers) == (8, 2, 3)
    assert charged.emulates == "Mixtral-8x7B" and charged.model == GEOMETRY.model
    assert model.emulated_by(charged) == charged


def test_encoded_experts_keep_their_bits_a_weight() -> None:
    """1,000 weights in 530 bytes at best are 4.24 bits each, whichever model is emulated."""
    sizes = {"expert_bytes": ((530, 265),) * 3, "compute_bytes": (2000,) * 3}
    encoded = replace(GEOMETRY, precision=("int4", "int2"), **sizes)
    model = load_real_model("OLMoE-1B-7B")
    charged = model.emulated_by(encoded)
    best = round(3 * 2048 * 1024 * 4.24 / 8)
    assert charged.expert_bytes == ((best, round(best / 2)),) * 3
    assert charged.compute_bytes == (3 * 2048 * 1024 * 2,) * 3
    assert model.emulated_by(charged) == charged
    # Published at 4.25 bits a weight, but charged at the 4.24 of this geometry.
    oss = load_real_model("gpt-oss-20b").emulated_by(encoded)
    assert oss.expert_bytes[0][0] == round(3 * 2880**2 * 4.24 / 8)
    at_dtype = replace(encoded, precision=("bf16", "int4"), expert_bytes=((2000, 530),) * 3)
    full = model.expert_bytes
    assert model.emulated_by(at_dtype).expert_bytes[0] == (full, round(full * 0.265))


def test_a_folder_and_a_yaml_are_read_like_the_shipped_ones(tmp_path: Path) -> None:
    config = {"model_type": "olmoe", **OLMOE}
    folder = tmp_path / "somebody"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (tmp_path / "mine.yaml").write_text(json.dumps(config))
    shipped = load_real_model("OLMoE-1B-7B")
    for name in (str(folder), str(tmp_path / "mine.yaml")):
        model = load_real_model(name)
        assert model.num_weights == shipped.num_weights
        assert model.kv_bytes_per_token == shipped.kv_bytes_per_token


@pytest.mark.parametrize(
    ("quantized", "bits"),
    [
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}, 4.25),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8 + 32 / 128**2),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 4 + 20 / 128),
        ({"quant_method": "awq", "bits": 4, "group_size": 64}, 4 + 20 / 64),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4.5),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4.5),
        ({"group_size": 64, "bits": 4, "mode": "affine"}, 4.5),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": GROUP}}, 4.5),
    ],
)
def test_a_checkpoint_is_sized_by_its_quantization(
    tmp_path: Path, quantized: dict[str, object], bits: float
) -> None:
    config = {**OLMOE, "quantization_config": quantized, "architectures": ["OlmoeForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load_real_model(str(tmp_path))
    assert model.expert_bytes == round(3 * 2048 * 1024 * bits / 8)
    assert model.geometry().compute_bytes[0] == 3 * 2048 * 1024 * 2


def test_an_unknown_name_offers_none_of_less_than_a_tenth_or_over_ten_times_its_size() -> None:
    with pytest.raises(ValueError, match="is not known, and there is no such") as refused:
        load_real_model("Qwen3.8-MoE-27B")
    assert "Qwen3.6-35B-A3B" in str(refused.value) and "397B" not in str(refused.value)


def test_a_hub_id_is_read_from_the_local_cache_where_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match="is not known"):
        load_real_model("somebody/my-mixture")
    for name in ("somebody/my-mixture", "Qwen/Qwen3-30B-A3B"):
        folder = tmp_path / f"models--{name.replace('/', '--')}"
        snapshot = folder / "snapshots" / "abc"
        snapshot.mkdir(parents=True)
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text("abc")
        (snapshot / "config.json").write_text(json.dumps(OLMOE))
        model = load_real_model(name)
        assert model.name == name.partition("/")[2]
        assert model.num_weights == load_real_model("OLMoE-1B-7B").num_weights
    # A cache of a tokenizer alone says nothing of sizes.
    (snapshot / "config.json").unlink()
    assert load_real_model("Qwen/Qwen3-30B-A3B").num_experts == 128

"""Real models' sizes against published totals and against arithmetic by hand."""

from __future__ import annotations

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
PUBLISHED = {
    "OLMoE-1B-7B": (6.92, 0.01),
    "Mixtral-8x7B": (46.7, 0.05),
    "Qwen1.5-MoE-A2.7B": (14.3, 0.05),
    "Qwen3-30B-A3B": (30.5, 0.05),
    "Qwen3.5-35B-A3B": (35, 0.5),
    "Qwen3.6-35B-A3B": (35, 0.5),
    "Qwen3-Next-80B-A3B": (80, 0.5),
    "GLM-4.5-Air": (106, 1),
    "GLM-4.7-Flash": (30, 0.5),
    "DeepSeek-V2-Lite": (15.7, 0.05),
    "DeepSeek-V3": (671, 0.5),
    "DeepSeek-V4-Flash": (284, 0.5),
    "gpt-oss-20b": (20.9, 0.05),
    "gpt-oss-120b": (116.8, 0.05),
    # Without their image encoders of 0.6 and 0.9 billion weights.
    "Gemma-4-26B-A4B": (25.2, 0.3),
    "Llama-4-Scout": (107.8, 0.3),
    "MiniMax-M2": (229, 1),
    "Qwen3-235B-A22B": (235, 0.5),
    "Qwen3.5-122B-A10B": (122, 0.5),
    "Qwen3.5-397B-A17B": (397, 1),
    "Qwen3.8-Flash-Next": (125, 0.5),  # without its n-gram table of 51
    "GLM-5": (744, 2),
    "Kimi-K2": (1026, 1),
    "Kimi-K2.6": (1026, 1),
    "ERNIE-4.5-21B-A3B": (21.8, 0.1),
    "Nemotron-3-Nano-30B-A3B": (31.6, 0.05),
    "LFM2-8B-A1B": (8.3, 0.05),
    "GLM-4.7": (353, 3),
    "Kimi-Linear-48B-A3B": (49.1, 0.2),
    "MiniMax-M3": (427, 2),
    "MiniMax-Text-01": (456, 1),
    "Granite-4.0-H-Small": (32, 0.3),
    "Granite-4.0-H-Tiny": (7, 0.1),
    "Jamba-Mini": (52, 0.5),
    "Jamba-Large": (398, 1),
    "Hunyuan-A13B": (80, 0.5),
    "Hy3": (295, 0.5),
    "Ling-mini-2.0": (16.3, 0.1),
    "Ling-flash-2.0": (103, 0.5),
    "Ling-1T": (1000, 5),
    "Step-3": (316, 1),
    "Step-3.5-Flash": (196.8, 0.2),
    "MiMo-V2-Flash": (309, 0.5),
    "Trinity-Nano": (6, 0.15),
    "Trinity-Mini": (26, 0.3),
    "Trinity-Large": (398, 2),
    "dots.llm1": (142, 0.8),
    "Llama-4-Maverick": (400, 1),
    "Phi-3.5-MoE": (41.9, 0.05),
    "DBRX": (132, 0.5),
    "Mixtral-8x22B": (141, 0.5),
    "ERNIE-4.5-300B-A47B": (300, 1.5),
    "Ling-2.6-flash": (104, 0.5),
    "Qwen2-57B-A14B": (57.4, 0.1),
    "Qwen3-Coder-480B-A35B": (480, 0.5),
    "DeepSeek-V2": (236, 0.5),
    "Nemotron-3-Super-120B-A12B": (120.6, 1.5),
    "LongCat-Flash": (560, 1),
    "Moonlight-16B-A3B": (16, 0.1),
    "Aria": (24.9, 0.3),
    "SmallThinker-21B-A3B": (21.5, 0.1),
    "Granite-3.1-3B-A800M": (3.3, 0.05),
    "Solar-Open-100B": (102.6, 0.1),
    "K-EXAONE-236B-A23B": (236, 1),
    "A.X-K1": (519, 0.5),
    "Mistral-Small-4-119B": (119, 0.5),
    "Mistral-Large-3-675B": (673, 3),
    "Laguna-XS": (33.2, 0.1),
    "LFM2-24B-A2B": (23.8, 0.3),
}
"""Billions of weights by the model cards, and the tolerance for their rounding."""


GROUP = {"weights": {"num_bits": 4, "group_size": 32}}


def test_every_shipped_model_has_its_published_total() -> None:
    assert set(emulated_names()) == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_weights_of_a_configuration_add_up_to_the_published_total(name: str) -> None:
    model = load_real_model(name)
    total, rounding = PUBLISHED[name]
    assert model.num_weights / 1e9 == pytest.approx(total, abs=rounding)
    assert model.source
    # As a file of one's own it is the same, and has no key that nothing reads.
    assert load_real_model(str(EMULATED_DIR / f"{name}.yaml")) == model


ACTIVE = {
    **{"Granite-4.0-H-Small": 9, "Jamba-Mini": 12, "Jamba-Large": 94, "LFM2-24B-A2B": 2.3},
    **{"MiniMax-Text-01": 45.9, "MiniMax-M3": 23, "Kimi-Linear-48B-A3B": 3, "GLM-4.7": 32},
    **{
        "Hunyuan-A13B": 13,
        "Hy3": 21,
        "Ling-1T": 50,
        "Ling-2.6-flash": 7.4,
        "Step-3": 38,
        "Step-3.5-Flash": 11,
    },
    **{"MiMo-V2-Flash": 15, "Trinity-Large": 13, "Trinity-Mini": 3, "dots.llm1": 14},
    **{"Llama-4-Maverick": 17, "DBRX": 36, "Mixtral-8x22B": 39, "ERNIE-4.5-300B-A47B": 47},
    **{"Qwen2-57B-A14B": 14, "Qwen3-Coder-480B-A35B": 35, "DeepSeek-V2": 21},
    **{"Nemotron-3-Super-120B-A12B": 12, "LongCat-Flash": 27, "K-EXAONE-236B-A23B": 23},
}
"""Billions of weights that a token goes through, by the model cards."""


@pytest.mark.parametrize("name", ACTIVE)
def test_a_token_goes_through_the_published_number_of_weights(name: str) -> None:
    model = load_real_model(name)
    layers = model.num_layers * (model.layer_weights + model.top_k * model.expert_weights)
    # Cards differ in whether the vocabulary's two tables count.
    counts = [layers + model.read_once + table for table in (-model.output, 0, model.embedding)]
    assert min(abs(n / 1e9 / ACTIVE[name] - 1) for n in counts) < 0.05, counts


def test_layers_of_every_kind_by_hand() -> None:
    """Kimi Delta Attention, lightning attention, Mamba and Mamba-2, in models that mix them."""
    kimi = load_real_model("Kimi-Linear-48B-A3B")
    # 20 layers of 32 heads of 128: a state of 128 x 128 in float32; 7 layers cache 512 + 64.
    assert kimi.kv_bytes(1000) == 20 * 4 * 32 * 128 * 128 + 7 * 2 * (512 + 64) * 1000
    delta = 4 * 2304 * 4096 + 2 * (2304 + 4096) * 128 + 2304 * 32 + 3 * 4 * 4096
    latent = 2304 * 32 * 192 + 2304 * 576 + 512 * 32 * 256 + 32 * 128 * 2304
    mixer = round((20 * delta + 7 * latent) / 27)
    assert kimi.layer_weights == mixer + 2304 * 256 + 3 * 2304 * 1024
    lightning = load_real_model("MiniMax-Text-01")
    assert lightning.kv_bytes(1000) == 70 * 4 * 64 * 128 * 128 + 10 * 2 * 2 * 8 * 128 * 1000
    # Queries, keys, values, a gate and the output, each of 64 heads of 128.
    mixer = round((70 * 5 * 6144 * 8192 + 10 * 6144 * 128 * 2 * (64 + 8)) / 80)
    assert lightning.layer_weights == mixer + 6144 * 32
    granite = load_real_model("Granite-4.0-H-Small")
    assert granite.kv_bytes(1000) == 36 * 4 * 128 * 64 * 128 + 4 * 2 * 2 * 8 * 128 * 1000
    jamba = load_real_model("Jamba-Mini")
    assert (jamba.num_layers, jamba.kv_bytes(1000)) == (
        16,
        28 * 4 * 8192 * 16 + 4 * 2 * 2 * 8 * 128 * 1000,
    )
    # Two projections in and one out of 8192, a step of rank 256 and two states of 16, kernels of 4.
    mamba = 3 * 4096 * 8192 + 8192 * (2 * 256 + 2 * 16) + 8192 * (16 + 4)
    mixer = round((28 * mamba + 4 * 4096 * 128 * 2 * (32 + 8)) / 32)
    assert jamba.layer_weights == mixer + 4096 * 16
    mimo = load_real_model("MiMo-V2-Flash")
    # Keys of 192 and values of 128: 4 heads over all tokens, 8 over the last 128.
    assert mimo.kv_bytes(1000) == 2 * 320 * (9 * 4 * 1000 + 39 * 8 * 128)
    assert load_real_model("LongCat-Flash").top_k == 8  # of 12 choices, 4 fall on nothing
    super_ = load_real_model("Nemotron-3-Super-120B-A12B")
    assert super_.expert_weights == 2 * 1024 * 2688


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
    # GGUF stores the vocabulary at its own bits, too. The published file has 18.6 GB.
    file = replace(load_real_model("Qwen3-30B-A3B"), stored=load_stored("q4_k_m"))
    experts = file.num_layers * file.num_experts * file.expert_bytes
    assert (experts + file.dense_bytes) / 1e9 == pytest.approx(18.6, abs=0.1)


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


def test_mamba_and_convolutions_by_hand() -> None:
    nemotron, lfm2 = load_real_model("Nemotron-3-Nano-30B-A3B"), load_real_model("LFM2-8B-A1B")
    assert (nemotron.num_layers, lfm2.num_layers) == (23, 22)
    # Two matrices an expert, and a shared expert twice as wide.
    assert nemotron.expert_weights == 2 * 2688 * 1856
    # 64 heads of 64; 8 groups of two states of 128; gate, values, groups and a step for each head.
    mixed = 64 * 64 + 2 * 8 * 128
    mamba = 2688 * (64 * 64 + mixed + 64) + 64 * 64 * 2688 + 4 * mixed
    attention = 2688 * 128 * 2 * (32 + 2)
    block = round((23 * mamba + 6 * attention) / 23)
    assert nemotron.layer_weights == block + 2688 * 128 + 2 * 2688 * 3712
    # Six attention layers of 2 heads of 128; 23 states of 64 x 64 x 128 in float32.
    assert nemotron.kv_bytes(1000) == 6 * 2 * 2 * 128 * 2 * 1000 + 23 * 4 * 64 * 64 * 128
    assert lfm2.kv_bytes(1000) == 6 * 2 * 8 * 64 * 2 * 1000 + 18 * 4 * 3 * 2048
    convolution, heads = 4 * 2048**2 + 3 * 2048, 2048 * 64 * 2 * (32 + 8)
    mixer = round((18 * convolution + 6 * heads) / 24)
    assert lfm2.layer_weights == mixer + 2048 * 32
    assert lfm2.read_once == 65536 * 2048 + 2 * (mixer + 3 * 2048 * 7168)


def test_a_pattern_of_layers_names_its_letters(tmp_path: Path) -> None:
    config = {**OLMOE, "hybrid_override_pattern": "MXE"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="hybrid_override_pattern='MXE' must be of the letters M"):
        load_real_model(str(tmp_path))


def test_windows_and_linear_attention_end_the_growth_of_a_kv_cache() -> None:
    gemma, qwen = load_real_model("Gemma-4-26B-A4B"), load_real_model("Qwen3.5-35B-A3B")
    # 25 layers of 8 heads of 256 attend to 1,024 tokens; 5 layers of 2 heads of 512 to all.
    window, whole = 2 * 8 * 256 * 2, 2 * 2 * 512 * 2
    assert gemma.kv_bytes(4096) == 25 * window * 1024 + 5 * whole * 4096
    # 10 layers of 2 heads of 256; 30 states of 32 heads of 128 x 128 in float32.
    assert qwen.kv_bytes(1000) == 10 * 2 * 2 * 256 * 2 * 1000 + 30 * 4 * 32 * 128 * 128


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

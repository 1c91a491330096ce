"""Every type of transformers with routed experts is read from its configuration, or says why not.

What is counted of each is compared with the parameters of the model that transformers builds of
the same configuration, without memory for them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from lm_eval_moecache.emulate.configuration import read_config
from lm_eval_moecache.emulate.models import load_real_model
from tests.emulate.test_models import OLMOE

NO_EXPERTS = "it is not a configuration of a Mixture-of-Experts model"
_COUNT = re.compile(r"(?<!max_)(num|n)_(local_|routed_)?experts|moe_num_experts")
_MODELS = (
    transformers.AutoModelForCausalLM,
    transformers.AutoModelForMultimodalLM,
    transformers.AutoModelForSeq2SeqLM,
)
_OTHERS = re.compile(r"vision|visual|image|audio|merger|projector|resampler|timestamp|per_layer")
"""Parts that a text's tokens do not pass through, and tables that are looked up on the host."""
_ROUTED = re.compile(r"\.experts\.(?!router)|\.mlp\.(in|out)put_linear|mlp\.(up|down)_embed")
_SET: dict[str, dict[str, Any]] = {
    "gemma4_text": {
        **{"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8},
        "moe_intermediate_size": 704,
    },
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {
        **{"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2},
        **{"n_group": 1, "topk_group": 1},
    },
    "hunyuan_v1_moe": {"num_experts": 16, "moe_topk": 2, "head_dim": 128},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "granitemoehybrid": {"layer_types": ["linear_attention"] * 30 + ["full_attention"] * 2},
    "jamba": {"num_hidden_layers": 16},
    "doge": {"is_moe": True},
}
"""What the defaults of a type leave open, or have only one kind of layer of."""
_OUT_OF_REACH = {
    "longcat_flash": "its module holds places for experts without weights",
    "openai_privacy_filter": "a classifier without an output layer",
}
_ROUGH = {"axk2": 0.11, "deepseek_v4": 0.08}
"""Types whose gates, compressors and indexes are left out: under 1% of the model."""


def _configurations() -> Iterator[tuple[str, Any]]:
    for model_type in sorted(CONFIG_MAPPING):
        try:
            config = CONFIG_MAPPING[model_type](**_SET.get(model_type, {}))
        except Exception:
            continue  # a type without defaults
        yield model_type, config


def _fields(config: Any) -> dict[str, Any]:
    return dict(json.loads(json.dumps(config.to_dict(), default=str)))


def _counts(fields: dict[str, Any]) -> list[Any]:
    """Return what a configuration says about numbers of experts, in all of its parts."""
    found = []
    for key, value in fields.items():
        if isinstance(value, dict):
            found += _counts(value)
        elif _COUNT.fullmatch(key):
            found.append(value)
    return found


def test_every_type_with_routed_experts_is_read_or_names_what_is_missing() -> None:
    read, refused = {}, {}
    for model_type, config in _configurations():
        counts = _counts(fields := _fields(config))
        try:
            read[model_type] = read_config(fields, model_type)
        except ValueError as error:
            said = refused[model_type] = str(error)
            assert "\n" not in said and said.startswith(model_type)
            if NO_EXPERTS in said:
                assert max((n for n in counts if isinstance(n, int)), default=1) == 1 or (
                    fields.get("is_moe") is False or "enable_moe_block" in said
                ), said
            else:
                lacks = re.match(rf"{model_type} lacks (\w+)", said)
                assert lacks and not fields.get(lacks[1]), said
    assert len(read) >= 75, sorted(read)
    missing = {name: said for name, said in refused.items() if NO_EXPERTS not in said}
    # Encoders, and types whose defaults leave the experts open.
    assert len(missing) <= 12, missing
    for model_type in ("llama", "qwen3", "gemma3_text", "bert", "mamba2"):
        assert NO_EXPERTS in refused[model_type]


def _parameters(config: Any) -> dict[str, int] | None:
    """Return the parameters of a configuration's text model, None where it has none."""
    for kind in _MODELS:
        try:
            with torch.device("meta"):
                model = kind.from_config(config)
        except ValueError:
            continue  # another kind of model
        found = {name: math.prod(p.shape) for name, p in model.named_parameters()}
        return {name: count for name, count in found.items() if not _OTHERS.search(name)}
    return None


def test_the_weights_of_every_type_are_those_of_the_model_that_transformers_builds() -> None:
    checked, off = 0, {}
    for model_type, config in _configurations():
        if model_type in _OUT_OF_REACH:
            continue
        try:
            model = read_config(_fields(config), model_type)
        except ValueError:
            continue
        try:
            parameters = _parameters(config)
        except (TypeError, AttributeError):
            continue  # defaults that transformers cannot build
        if parameters is None:
            continue
        checked += 1
        every = sum(parameters.values())
        routed = sum(
            n for k, n in parameters.items() if _ROUTED.search(k) and not k.endswith("bias")
        )
        counted = model.num_layers * model.num_experts * model.expert_weights
        most_off = (0.01, 0.001, _ROUGH.get(model_type, 0.05))
        ratios = (
            model.num_weights / every,
            counted / routed,
            (model.num_weights - counted) / (every - routed),
        )
        if any(abs(ratio - 1) > most for ratio, most in zip(ratios, most_off, strict=True)):
            off[model_type] = ratios
    assert not off
    assert checked >= 65


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128}
HQQ = {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4}}}
GROUPS = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 32}}},
}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_experts": "8"}, r"num_experts='8' is text"),
        ({"num_experts": None}, r"lacks num_experts .*which is null or no finite number"),
        ({"hidden_size": None}, r"lacks hidden_size .*which is null or no finite number"),
        ({"model_type": 5}, r"model_type=5 must be a text"),
        ({"layer_types": ["full_attention"]}, r"layer_types has 1 entries for 16 layers"),
        ({"layer_types": [1] * 16}, r"layer_types has 1, which is not a name"),
        ({"mlp_layer_types": ["dense"] * 16}, r"none of its 16 layers has experts"),
        ({"tie_word_embeddings": "no"}, r"tie_word_embeddings='no' must be true or false"),
        ({"text_config": 5}, r"text_config=5 must be a mapping"),
        ({"per_layer_config": [1]}, r"per_layer_config=\[1\] must be a mapping"),
        ({"mamba_d_state": 16}, r"lacks layer_types"),
        ({"hybrid_override_pattern": "MXE"}, r"pattern='MXE' must be of the letters M"),
        ({"quantization_config": {**AWQ, "bits": 1e9}}, r"bits=1000000000.0 must be .* at most 16"),
        ({"quantization_config": {**AWQ, "bits": "4"}}, r"bits='4' is text"),
        ({"quantization_config": {**GROUPS, "config_groups": [1]}}, r"groups=\[1\] must be a map"),
        ({"quantization_config": {**GROUPS, "config_groups": {"g": "x"}}}, r"'x' must be a map"),
        ({"quantization_config": {**HQQ, "quant_config": "x"}}, r"quant_config='x' must be a map"),
        ({"quantization_config": {**FP8, "weight_block_size": 7}}, r"=7 must be a list of two"),
    ],
)
def test_a_field_of_the_wrong_kind_is_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        read_config({**OLMOE, **changes}, "model='x'")
    assert str(caught.value).startswith("model='x'") and "\n" not in str(caught.value)


WRONG = (None, True, "8", "x", 0, -1, 1.5, [1], ["a"], {}, {"a": {"b": 2}}, 10**12, math.inf)
TYPES = ("qwen3_next", "dbrx", "kimi_linear", "ernie4_5_vl_moe", "deepseek_v4", "jamba")


def _places(fields: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    for key, value in list(fields.items()):
        yield fields, key
        if isinstance(value, dict):
            yield from _places(value)


@pytest.mark.parametrize("given", [*TYPES, AWQ, GROUPS, HQQ, FP8])
def test_no_value_of_a_configuration_ends_in_anything_but_a_sentence(given: Any) -> None:
    """Of a type of transformers, or of a checkpoint stored like this."""
    if isinstance(given, str):
        fields = _fields(CONFIG_MAPPING[given]())
    else:
        fields = json.loads(json.dumps({**OLMOE, "quantization_config": given}))
    for holder, key in _places(fields):
        sound = holder[key]
        for holder[key] in WRONG:
            try:
                model = read_config(fields, "x")
            except ValueError as error:
                assert "\n" not in str(error)
            else:
                assert model.kv_bytes(100) >= 0 and model.dense_bytes > 0
        holder[key] = sound


MLA = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
HUB = json.loads((Path(__file__).parent / "hub.json").read_text())
"""Shipped model -> its configuration with the hub's own keys, shortened to what says its sizes."""


@pytest.mark.parametrize("name", HUB)
def test_the_keys_of_the_hub_give_the_sizes_of_the_shipped_model(name: str) -> None:
    model, shipped = read_config(HUB[name], "x"), load_real_model(name)
    for field in ("num_layers", "num_experts", "top_k", "expert_weights", "num_weights"):
        assert getattr(model, field) == getattr(shipped, field), field
    assert model.kv_bytes(5000) == shipped.kv_bytes(5000)


def test_kimi_delta_attention_without_sizes_of_its_own_has_the_attention_s() -> None:
    """Ling 3.0 on the hub, and as transformers writes it."""
    sizes = {
        **{"model_type": "bailing_hybrid", "hidden_size": 1536, "intermediate_size": 4608, **MLA},
        **{"moe_intermediate_size": 512, "num_hidden_layers": 24, "first_k_dense_replace": 1},
        **{"num_experts": 128, "num_experts_per_tok": 8, "num_shared_experts": 1},
        **{"num_attention_heads": 16, "q_lora_rank": 256, "vocab_size": 157184},
        "layer_group_size": 4,
    }
    hub = {"head_dim": 128, "no_kda_lora": True, "kda_safe_gate": True, "kda_lower_bound": -5}
    written = {"head_dim": 64, "linear_num_heads": 16, "linear_head_dim": 128}
    model, same = read_config({**sizes, **hub}, "x"), read_config({**sizes, **written}, "x")
    assert (model.num_weights, model.state_bytes) == (same.num_weights, same.state_bytes)
    assert model.state_bytes == 18 * 4 * 16 * 128 * 128


def test_the_index_of_sparse_attention_is_cached_with_the_latent_vector() -> None:
    fields = _fields(CONFIG_MAPPING["deepseek_v32"]())
    assert read_config(fields, "x").kv_bytes(1000) == 61 * 2 * (512 + 64 + 128) * 1000
    # Layers that share another's choice keep none.
    shared = {**fields, "indexer_types": ["full"] + ["shared"] * 60}
    assert read_config(shared, "x").kv_bytes(1000) == 2 * (61 * (512 + 64) + 128) * 1000


def test_experts_for_images_are_left_out_and_said() -> None:
    config = _fields(CONFIG_MAPPING["ernie4_5_vl_moe"]())
    model = read_config(config, "x")
    assert model.expert_weights == 3 * 2560 * 1536
    assert model.source == "its configuration, without its experts for images"
    # The hub's file has lists of two throughout.
    hub = {"moe_num_experts": [64, 64], "moe_layer_start_index": [1, 1], "mlp_layer_types": None}
    text = {**config["text_config"], **hub, "moe_layer_end_index": [27, 27]}
    assert read_config(text, "x").num_weights == model.num_weights

"""Random two-layer models of every transformers model type with the experts interface.

The types are read from the installed transformers; a new type is tried with the common sizes, and
gets an entry below where these do not fit it.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, model_type_to_module_name
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

_LAYERS = {"num_hidden_layers": 2, "first_k_dense_replace": 0, "num_dense_layers": 0}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TOP_K = (
    *("num_experts_per_tok", "num_experts_per_token", "top_k_experts"),
    *("moe_k", "moe_topk", "moe_top_k"),
)
_WIDTHS = {
    "hidden_size": 32,
    "intermediate_size": 24,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "mamba_n_groups": 1,
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("sliding_window", "q_lora_rank", "kv_lora_rank", "mamba_d_head"), 16),
    **dict.fromkeys(("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "mamba_d_state"), 8),
    **dict.fromkeys(("index_head_dim", "index_topk"), 8),
    **dict.fromkeys(("num_attention_heads", "mamba_n_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "index_n_heads"), 2),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
}
_COMMON: dict[str, Any] = {
    **_LAYERS,
    **_WIDTHS,
    **dict.fromkeys(_EXPERTS, 8),
    **dict.fromkeys(_TOP_K, 3),
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 2,
    # Where unset, computed from the number of layers.
    "layer_types": None,
    "mlp_layer_types": None,
    "mlp_only_layers": [],
    "num_nextn_predict_layers": 0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
_SPARSE = {"mlp_layer_types": ["sparse", "sparse"]}
_MLA = {"num_key_value_heads": 4}
_ONE_GROUP = {"n_group": 1, "topk_group": 1, "linear_head_dim": 8}
_SPARSE_MLA = {**_SPARSE, **_MLA}
_LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
_PER_LAYER_INPUT = {
    "vocab_size_per_layer_input": 300,
    "hidden_size_per_layer_input": 8,
    "enable_moe_block": True,
}
_QSA = {
    **{**_LINEAR, "indexer_kv_heads": 1},
    **dict.fromkeys(("indexer_n_heads", "indexer_compress_ratio"), 2),
    **dict.fromkeys(("indexer_head_dim", "indexer_budget"), 8),
}
_OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa"), _MLA),
    **dict.fromkeys(("axk1", "axk2", "dots3_note", "dots3_note_text"), _SPARSE_MLA),
    "glm4_moe_lite": _SPARSE_MLA,
    **dict.fromkeys(("beam", "hy_v3", "hy_v4", "laguna", "mimo_v2_flash"), _SPARSE),
    "nemotron_h": {"num_hidden_layers": 4, "layers_block_type": ["full_attention", "moe"] * 2},
    "phimoe": {"num_experts_per_tok": 2},
    "ernie4_5_moe": {"moe_layer_start_index": 0},
    **dict.fromkeys(("qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next"), _LINEAR),
    **dict.fromkeys(("qwen4_exp", "qwen4_exp_text"), _QSA),
    **dict.fromkeys(("gemma4", "gemma4_text"), _PER_LAYER_INPUT),
    "bailing_hybrid": {**_LINEAR, "n_group": 2, "topk_group": 2, "num_key_value_heads": 4},
    "kimi_linear": {**_LINEAR, **_SPARSE_MLA, **_ONE_GROUP, "linear_num_heads": 2},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {
        **{"attn_layer_period": 2, "attn_layer_offset": 1, "layer_types": ...},
        **{"expert_layer_period": 1, "expert_layer_offset": 0},
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "zaya": {"num_experts_per_tok": 1},
}

_ADAPTED = ("dots3_note",)
_PARTS = {"adapter_out_dim": 32}


@cache
def _modules() -> frozenset[str]:
    """Return the transformers modules whose modeling file has the experts decorator."""
    root = Path(transformers.__file__).parent / "models"
    files = root.glob("*/modeling_*.py")
    return frozenset(f.parent.name for f in files if "@use_experts_impl" in f.read_text())


def causal_types() -> list[str]:
    """Return the model types with experts and a causal language model."""
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return sorted(t for t in names if model_type_to_module_name(t) in _modules())


def other_types() -> list[str]:
    """Return those with experts and no causal model, except vision and audio encoders."""
    types = (t for t in MODEL_MAPPING_NAMES if model_type_to_module_name(t) in _modules())
    encoders = ("_vision", "_audio")
    return sorted({t for t in types if not t.endswith(encoders)} - set(causal_types()))


def small_config(model_type: str, **changes: Any) -> Any:
    """Return the configuration of a random model of this type."""
    kind = CONFIG_MAPPING[model_type]
    fields = kind().to_dict()
    if "text_config" in fields:
        text = small_config(fields["text_config"]["model_type"], **_OWN.get(model_type, {}))
        ends = {name: _COMMON[name] for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
        parts = {key: _PARTS for key in ("vision_config", "audio_config") if model_type in _ADAPTED}
        return kind(text_config=text.to_dict(), **parts, **ends, **changes)
    sizes = {name: value for name, value in _COMMON.items() if name in fields}
    sizes |= {**_OWN.get(model_type, {}), **changes}
    return kind(**{name: value for name, value in sizes.items() if value is not ...})


def small_model(model_type: str) -> Any:
    """Return a random model whose routing differs from token to token, in bf16."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(small_config(model_type))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2:
                continue
            if any(part in name for part in ("experts", "gate", "router", "embed")):
                parameter.normal_(0, 0.25)
        for name, buffer in model.named_buffers():
            if name.endswith("tid2eid"):
                # A token's experts, where a table gives them by token id: all different.
                first = torch.arange(len(buffer))[:, None]
                buffer.copy_((first + torch.arange(buffer.shape[1])) % 8)
    return model.to(torch.bfloat16).eval()

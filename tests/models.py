"""Small random models of every router family, and a byte tokenizer: no network, no training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCAB = 300
_COMMON: dict[str, Any] = {
    **{"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "max_position_embeddings": 512},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1},
}
_DEEPSEEK: dict[str, Any] = {
    **{"moe_intermediate_size": 16, "intermediate_size": 48, "first_k_dense_replace": 1},
    **{"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 3},
    **{"n_group": 4, "topk_group": 3, "routed_scaling_factor": 1.5, "num_key_value_heads": 4},
    **{"q_lora_rank": 16, "kv_lora_rank": 16},
    **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
}
_LOCAL = {"intermediate_size": 16, "num_local_experts": 8}
_QWEN = {
    **{"moe_intermediate_size": 16, "intermediate_size": 48},
    **{"num_experts": 8, "num_experts_per_tok": 3},
}
_ATTENTION = ["sliding_attention", "full_attention", "full_attention"]
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "olmoe": ("Olmoe", {"intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 3}),
    "mixtral": ("Mixtral", {**_LOCAL, "num_experts_per_tok": 2}),
    "qwen2_moe": ("Qwen2Moe", {**_QWEN, "shared_expert_intermediate_size": 24}),
    "qwen3_moe": ("Qwen3Moe", {**_QWEN, "head_dim": 8, "norm_topk_prob": True}),
    "phimoe": ("Phimoe", {**_LOCAL, "num_experts_per_tok": 2}),
    "deepseek_v2": ("DeepseekV2", {**_DEEPSEEK, "topk_method": "group_limited_greedy"}),
    "deepseek_v3": ("DeepseekV3", _DEEPSEEK),
    "gpt_oss": (
        "GptOss",
        {**_LOCAL, "num_experts_per_tok": 3, "head_dim": 8, "layer_types": _ATTENTION},
    ),
    "granitemoe": ("GraniteMoe", {**_LOCAL, "num_experts_per_tok": 3}),
}

_TYPICAL = ("olmoe", "qwen2_moe", "gpt_oss")
"""Plain; with a shared expert; with biases, transposed matrices and top-k before softmax."""


def family_case(family: str, *others: Any) -> Any:
    """Return a parameter set; `make test` runs those of three typical families, CI all."""
    marks = () if family in _TYPICAL else (pytest.mark.slow,)
    return pytest.param(family, *others, marks=marks)


FAMILY_CASES = [family_case(family) for family in FAMILIES]


def config_of(family: str, **overrides: Any) -> Any:
    name, settings = FAMILIES[family]
    config_class = getattr(transformers, f"{name}Config")
    return config_class(**{**_COMMON, **settings, **overrides})


def random_model(family: str, seed: int = 0, **overrides: Any) -> Any:
    """A model with weights drawn wide enough that routing differs from token to token."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config_of(family, **overrides))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 0.25)
            elif "norm" not in name:
                parameter.normal_(0, 0.05)
    return model.to(torch.bfloat16).eval()


def byte_tokenizer() -> Any:
    """Bytes as tokens behind <pad> and <eos>: encodes any text without training."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<pad>": 0, "<eos>": 1, **{c: i + 2 for i, c in enumerate(alphabet)}}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", bos_token="<eos>"
    )


def save_model(folder: Path, family: str, **overrides: Any) -> Path:
    """Write a loadable checkpoint folder."""
    random_model(family, **overrides).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder

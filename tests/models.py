"""Small random models of every router family, and a byte tokenizer: no network, no training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.families.configs import small_config

_NARROW: dict[str, Any] = {"intermediate_size": 16}
_MIXTRAL = {**_NARROW, "num_experts_per_tok": 2, "sliding_window": None}
_QWEN = {"moe_intermediate_size": 16, "intermediate_size": 48}
_DEEPSEEK = {
    **{**_QWEN, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5},
    **{"n_group": 4, "topk_group": 3},
}
_ATTENTION = ["sliding_attention", "full_attention", "full_attention"]
FAMILIES: dict[str, dict[str, Any]] = {
    "olmoe": _NARROW,
    "mixtral": {**_MIXTRAL, "head_dim": None},
    "qwen2_moe": {**_QWEN, "shared_expert_intermediate_size": 24},
    "qwen3_moe": {**_QWEN, "head_dim": 8, "norm_topk_prob": True},
    "phimoe": _MIXTRAL,
    "deepseek_v2": {**_DEEPSEEK, "topk_method": "group_limited_greedy"},
    "deepseek_v3": {**_DEEPSEEK, "num_nextn_predict_layers": 1},
    "gpt_oss": {**_NARROW, "layer_types": _ATTENTION, "sliding_window": 128},
    "granitemoe": _NARROW,
}
"""Each router family's own sizes and options, in models of three layers."""

_TYPICAL = ("olmoe", "qwen2_moe", "gpt_oss")
"""Plain; with a shared expert; with biases, transposed matrices and top-k before softmax."""


def family_case(family: str, *others: Any) -> Any:
    """Return a parameter set; `make test` runs those of three typical families, CI all."""
    marks = () if family in _TYPICAL else (pytest.mark.slow,)
    return pytest.param(family, *others, marks=marks)


FAMILY_CASES = [family_case(family) for family in FAMILIES]


def config_of(family: str, **overrides: Any) -> Any:
    return small_config(family, **{"num_hidden_layers": 3, **FAMILIES[family], **overrides})


def sizes_of(family: str) -> dict[str, int]:
    """Sizes wide enough for every codec's groups."""
    widths = [name for name in FAMILIES[family] if name.endswith("intermediate_size")]
    return dict.fromkeys(["hidden_size", *widths], 64)


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

"""What of HFLM's own arguments would fail, or mean nothing, after the weights are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lm_eval_moecache.harness.arguments import Config
from lm_eval_moecache.model.experts import IMPLEMENTATION
from lm_eval_moecache.records.errors import unknown
from lm_eval_moecache.records.numbers import read_count, shown
from lm_eval_moecache.records.paths import check_place

BACKENDS = ("default", "causal", "seq2seq")
_LEAST = {"batch_size": 1, "max_batch_size": 1, "max_length": 2, "prefix_token_id": 0}
_TYPES = ("dtype", "softmax_dtype", "mixed_precision_dtype")
_SWITCHES = (
    *("trust_remote_code", "parallelize", "use_fast_tokenizer", "logits_cache", "truncation"),
    *("add_bos_token", "enable_thinking", "local_files_only", "low_cpu_mem_usage"),
    "use_safetensors",
)


def check_host(pretrained: object, config: Config, theirs: dict[str, Any]) -> None:
    """Refuse what HFLM or transformers would fail on only later, naming key, value and choices.

    Counts that were given as text become numbers in `theirs`; `batch_size` without a value is not
    given.
    """
    if theirs.get("batch_size", 1) is None:
        del theirs["batch_size"]
    if isinstance(pretrained, str):
        check_place("pretrained", pretrained)
    _check_batch_size(config, str(theirs.get("batch_size", 1)))
    for key, least in _LEAST.items():
        if theirs.get(key) is not None:
            theirs[key] = read_count(key, theirs[key], least=least)
    for key in _TYPES:
        _check_type(key, theirs.get(key))
    for key in _SWITCHES:
        if not isinstance(theirs.get(key), bool | None):
            raise ValueError(f"{key}={shown(theirs[key])} must be true or false.")
    if theirs.get("backend") is not None and theirs["backend"] not in BACKENDS:
        raise unknown("backend", theirs["backend"], BACKENDS)
    for key in ("tokenizer", "peft", "delta"):
        if isinstance(theirs.get(key), str):
            check_place(key, theirs[key])


def check_kernels(model: Any, theirs: Mapping[str, Any]) -> None:
    """Refuse names of kernels that transformers does not have, or cannot run here.

    `model` is the one without weights, which transformers asks the same once it has loaded them.
    """
    asked = theirs.get("experts_implementation")
    if asked is not None:
        known = {"eager", *ALL_EXPERTS_FUNCTIONS.keys()} - {IMPLEMENTATION}
        if asked not in known:
            raise unknown("experts_implementation", asked, known)
        try:
            model.get_correct_experts_implementation(asked)
        except (ValueError, ImportError) as error:
            raise ValueError(f"experts_implementation={asked!r}: {error}") from error
    attention = theirs.get("attn_implementation")
    # A name with a slash is a kernel on the hub.
    if isinstance(attention, str) and "/" not in attention:
        known = {"eager", *ALL_ATTENTION_FUNCTIONS.keys()}
        if attention not in known:
            raise unknown("attn_implementation", attention, known)


def _check_type(key: str, value: object) -> None:
    if value is None or isinstance(value, torch.dtype) or value == "auto":
        return
    name = str(value).removeprefix("torch.")
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        allowed = ("bfloat16", "float16", "float32", "float64", *(["auto"] * (key == "dtype")))
        raise unknown(key, value, allowed)


def _check_batch_size(config: Config, batch_size: str) -> None:
    if batch_size.startswith("auto"):
        raise ValueError(
            "batch_size='auto' would make the figures depend on free memory. "
            "Allowed: a whole number."
        )
    if config.draft is not None and batch_size != "1":
        raise ValueError(
            f"batch_size={batch_size} does not go with a draft (--model moecache-spec, "
            "prefetch=draft), which follows one request at a time. Allowed: 1."
        )
    if config.scoring == "scan" and batch_size != "1":
        raise ValueError(
            f"batch_size={batch_size} does not go with scoring='scan', which reads one text at a "
            "time. Allowed with scan: 1."
        )

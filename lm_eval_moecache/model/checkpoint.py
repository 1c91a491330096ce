"""Which files a `pretrained=` stands for, and the model they describe without its weights."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from transformers.quantizers import AutoHfQuantizer
from transformers.utils import cached_file

from lm_eval_moecache.records.paths import TINY, TINY_DRAFT
from lm_eval_moecache.tiny import DRAFT_DIR, MODEL_DIR

SHIPPED = {TINY: str(MODEL_DIR), TINY_DRAFT: str(DRAFT_DIR)}

OWN_EXPERTS = ("fp8", "mxfp4")
"""Quantisation methods whose experts are modules of the quantiser's own."""
_EXPERT_PART = re.compile(r"expert|gate_up_proj")


def model_path(pretrained: Any) -> Any:
    """Return where a named model lies; a loaded model is returned as it is."""
    return SHIPPED.get(pretrained, pretrained) if isinstance(pretrained, str) else pretrained


def skeleton(pretrained: Any, theirs: Mapping[str, Any]) -> Any:
    """Build the model without weights; a loaded model describes itself."""
    if isinstance(pretrained, torch.nn.Module):
        return pretrained
    config = transformers.AutoConfig.from_pretrained(
        model_path(pretrained),
        revision=str(theirs.get("revision", "main")),
        subfolder=str(theirs.get("subfolder") or ""),
        trust_remote_code=bool(theirs.get("trust_remote_code", False)),
    )
    check_quantization(config, theirs)
    check_adapter(theirs.get("peft"))
    check_head(config)
    dtype = getattr(torch, str(theirs.get("dtype", "auto")).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        dtype = getattr(config, "dtype", None) or torch.float32
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)


def check_quantization(config: Any, theirs: Mapping[str, Any]) -> None:
    """Refuse checkpoints whose experts would stay encoded, in modules of the quantiser's own.

    Asks the quantiser itself what it will do here: without its kernels it decodes while loading.
    """
    settings = theirs.get("quantization_config") or getattr(config, "quantization_config", None)
    if settings is None:
        return
    given = settings if isinstance(settings, dict) else settings.to_dict()
    method = str(getattr(given.get("quant_method"), "value", given.get("quant_method")))
    if method not in OWN_EXPERTS:
        return
    quantizer = AutoHfQuantizer.from_config(copy.deepcopy(given), pre_quantized=True)
    problem = ""
    try:
        quantizer.validate_environment()
    except (ImportError, RuntimeError, ValueError) as error:
        problem = f" ({error})"
    if not quantizer.quantization_config.dequantize:
        raise ValueError(
            f"pretrained: a checkpoint with quant_method={method!r}, whose experts transformers "
            f"runs with kernels of their own here{problem}; an expert cache cannot take them over. "
            "Allowed: a checkpoint in bf16 or fp16 (with precision=int8 or int4 for small experts),"
            " or quantization_config with dequantize=True."
        )


def check_adapter(peft: Any) -> None:
    """Refuse an adapter that changes experts: the cache would run them without it."""
    if not peft:
        return
    file = cached_file(str(peft), "adapter_config.json")
    with open(file, encoding="utf-8") as stream:
        adapter = json.load(stream)
    targets: list[str] = []
    for key in ("target_modules", "target_parameters", "modules_to_save"):
        named = adapter.get(key) or []
        targets += [named] if isinstance(named, str) else named
    touched = [name for name in targets if _EXPERT_PART.search(name)]
    if touched or "all-linear" in targets:
        raise ValueError(
            f"peft={peft!r} changes {', '.join(touched) or 'all layers'}, but experts are moved "
            "and run as the checkpoint has them. Allowed: adapters of other parts, or a checkpoint "
            "into which the adapter has been merged."
        )


def check_head(config: Any) -> None:
    """Refuse a model type that transformers has no causal language model for."""
    if type(config) not in transformers.AutoModelForCausalLM._model_mapping and not hasattr(
        config, "auto_map"
    ):
        raise ValueError(
            f"pretrained: transformers has no causal language model for the model type "
            f"{config.model_type!r}. Allowed: types that AutoModelForCausalLM can load."
        )

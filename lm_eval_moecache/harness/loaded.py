"""A transformers model that is already loaded, as `pretrained=`: what it is called, what fits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from lm_eval_moecache.harness.arguments import FROM_PRETRAINED, Config
from lm_eval_moecache.model.experts import STORE_ATTRIBUTE

_OF_LOADING = (
    *("revision", "subfolder", "dtype", "trust_remote_code", "parallelize", "tp_plan", "peft"),
    *("delta", "autogptq", "gptqmodel", "gguf_file", "max_memory_per_gpu", "max_cpu_memory"),
    *FROM_PRETRAINED,
)


def model_name(pretrained: str | nn.Module) -> str:
    """Return what the results call the model: as it was asked for, or where it was loaded from."""
    if isinstance(pretrained, str):
        return pretrained
    return str(getattr(pretrained, "name_or_path", "") or type(pretrained).__name__)


def check_loaded(model: nn.Module, config: Config, theirs: Mapping[str, Any]) -> None:
    """Raise ValueError for what could only be done while the model is loaded."""
    given = [key for key in _OF_LOADING if theirs.get(key)]
    if given:
        raise ValueError(
            f"{given[0]}={theirs[given[0]]!r} has no effect on a model that is already loaded. "
            "Allowed with one: the arguments of the cache, tokenizer and batch_size."
        )
    if config.clock == "wall" or config.ladder is not None:
        key = "clock" if config.clock == "wall" else "precision"
        raise ValueError(
            f"{key}={getattr(config, key)!r} does not go with a model that is already loaded: it "
            "decides where the experts lie while they are loaded. Allowed: pretrained= a folder or "
            "a hub id."
        )
    if any(hasattr(module, STORE_ATTRIBUTE) for module in model.modules()):
        raise ValueError(
            f"pretrained: the given {type(model).__name__} is inside an expert cache already. Call "
            "`wrapped.unwrap()` of the harness model that holds it first, or `install` there."
        )

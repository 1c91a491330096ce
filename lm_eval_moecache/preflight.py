"""Everything that can be wrong with a run's arguments, found before any weights are loaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import transformers

from lm_eval_moecache.config import TINY, Config, read_config, split_arguments
from lm_eval_moecache.core.records import Geometry
from lm_eval_moecache.core.sizes import parse_capacity
from lm_eval_moecache.moe_layers import describe, find_moe_layers
from lm_eval_moecache.registry import AXES
from lm_eval_moecache.tiny import MODEL_DIR


def preflight(
    pretrained: str, arguments: Mapping[str, Any], host_keys: Iterable[str]
) -> tuple[Config, dict[str, Any]]:
    """Return our checked setting and the host's arguments.

    Raises ValueError for unknown or useless keys, for values outside what is allowed, for a model
    without MoE layers that can be taken over, for a capacity too small for one expert, and for
    parameters out of an algorithm's range.
    """
    ours, theirs = split_arguments(arguments, host_keys)
    config = read_config(ours)
    _check_batch_size(config, str(theirs.get("batch_size", 1)))
    geometry = _geometry(pretrained, theirs)
    parse_capacity(config.capacity, geometry)
    for axis in AXES:
        # Built to be thrown away: their constructors check the parameters' ranges.
        getattr(config.policy, axis).build(geometry, config.seed)
    return config, theirs


def model_path(pretrained: str) -> str:
    return str(MODEL_DIR) if pretrained == TINY else pretrained


def _geometry(pretrained: str, theirs: Mapping[str, Any]) -> Geometry:
    """Measure the model as built without weights."""
    config = transformers.AutoConfig.from_pretrained(
        model_path(pretrained),
        revision=str(theirs.get("revision", "main")),
        trust_remote_code=bool(theirs.get("trust_remote_code", False)),
    )
    dtype = getattr(torch, str(theirs.get("dtype", "auto")).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        dtype = getattr(config, "dtype", None) or torch.float32
    with torch.device("meta"):
        skeleton = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    return describe(skeleton, find_moe_layers(skeleton), pretrained)


def _check_batch_size(config: Config, batch_size: str) -> None:
    if batch_size.startswith("auto"):
        raise ValueError(
            "batch_size='auto' would make the figures depend on free memory. "
            "Allowed: a whole number."
        )
    if config.scoring == "scan" and batch_size != "1":
        raise ValueError(
            f"batch_size={batch_size} does not go with scoring='scan', which reads one text at a "
            "time. Allowed with scan: 1."
        )

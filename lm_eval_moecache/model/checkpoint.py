"""Which files a `pretrained=` stands for, and the model they describe without its weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers

from lm_eval_moecache.records.paths import TINY, TINY_DRAFT
from lm_eval_moecache.tiny import DRAFT_DIR, MODEL_DIR

SHIPPED = {TINY: str(MODEL_DIR), TINY_DRAFT: str(DRAFT_DIR)}


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
        trust_remote_code=bool(theirs.get("trust_remote_code", False)),
    )
    dtype = getattr(torch, str(theirs.get("dtype", "auto")).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        dtype = getattr(config, "dtype", None) or torch.float32
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)

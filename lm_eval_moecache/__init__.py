"""Runs mixture-of-experts models inside an emulated expert cache, for lm-evaluation-harness."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lm_eval_moecache.harness.lm import MoECacheLM, MoECacheSpecLM

__all__ = ["MoECacheLM", "MoECacheSpecLM"]


def __getattr__(name: str) -> object:
    # Imported on first access: the models import torch, which `moecache --help` does not need.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.harness.lm"), name)

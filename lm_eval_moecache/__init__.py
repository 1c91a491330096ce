"""Runs mixture-of-experts models inside an emulated expert cache, for lm-evaluation-harness."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lm_eval_moecache.harness.lm import MoECacheLM
    from lm_eval_moecache.harness.spec_lm import MoECacheSpecLM

__all__ = ["MoECacheLM", "MoECacheSpecLM"]
_MODULES = {"MoECacheLM": "lm", "MoECacheSpecLM": "spec_lm"}


def __getattr__(name: str) -> object:
    # Imported when asked for: the models bring torch, and `moecache --help` needs none.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.harness.{_MODULES[name]}")
    return getattr(module, name)

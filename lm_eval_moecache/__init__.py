"""Runs mixture-of-experts models inside an emulated expert cache, for lm-evaluation-harness.

The names below are stable, as are the contracts in their docstrings; everything else may move.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lm_eval_moecache.algorithms.eviction.base import HitRule, RankedEviction
    from lm_eval_moecache.algorithms.eviction.base import StatefulEviction as Eviction
    from lm_eval_moecache.algorithms.features import Expert, Layer, Now
    from lm_eval_moecache.algorithms.miss.base import MissAlgorithm as Miss
    from lm_eval_moecache.algorithms.prefetch.base import PrefetchAlgorithm as Prefetch
    from lm_eval_moecache.algorithms.routing.base import RoutingAlgorithm as Routing
    from lm_eval_moecache.api import load_runs, load_trace, plan, replay
    from lm_eval_moecache.harness.lm import MoECacheLM, MoECacheSpecLM
    from lm_eval_moecache.records.errors import MoECacheError
    from lm_eval_moecache.records.event import Event
    from lm_eval_moecache.records.geometry import Geometry
    from lm_eval_moecache.records.selection import Selection
    from lm_eval_moecache.trace.formats.base import TraceFormat

    __version__: str

# Name -> where it is, `module:name`; imported on first access: the models import torch, which
# `moecache --help` does not need.
_PLACES = {
    "Event": "records.event:Event",
    "Eviction": "algorithms.eviction.base:StatefulEviction",
    "Expert": "algorithms.features:Expert",
    "Geometry": "records.geometry:Geometry",
    "HitRule": "algorithms.eviction.base:HitRule",
    "Layer": "algorithms.features:Layer",
    "Miss": "algorithms.miss.base:MissAlgorithm",
    "MoECacheError": "records.errors:MoECacheError",
    "MoECacheLM": "harness.lm:MoECacheLM",
    "MoECacheSpecLM": "harness.lm:MoECacheSpecLM",
    "Now": "algorithms.features:Now",
    "Prefetch": "algorithms.prefetch.base:PrefetchAlgorithm",
    "RankedEviction": "algorithms.eviction.base:RankedEviction",
    "Routing": "algorithms.routing.base:RoutingAlgorithm",
    "Selection": "records.selection:Selection",
    "TraceFormat": "trace.formats.base:TraceFormat",
    "load_runs": "api:load_runs",
    "load_trace": "api:load_trace",
    "plan": "api:plan",
    "replay": "api:replay",
}
__all__ = [
    "Event",
    "Eviction",
    "Expert",
    "Geometry",
    "HitRule",
    "Layer",
    "Miss",
    "MoECacheError",
    "MoECacheLM",
    "MoECacheSpecLM",
    "Now",
    "Prefetch",
    "RankedEviction",
    "Routing",
    "Selection",
    "TraceFormat",
    "__version__",
    "load_runs",
    "load_trace",
    "plan",
    "replay",
]


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        return version("lm-eval-moecache")
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, own_name = _PLACES[name].partition(":")
    return getattr(importlib.import_module(f"{__name__}.{module}"), own_name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""Routing that stands in for a model's: the nearest shipped trace, with the model's sizes."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
from pyarrow.parquet import read_schema

from lm_eval_moecache.engine.costs import Costs, attention_s
from lm_eval_moecache.records.event import DECODE
from lm_eval_moecache.records.files import traces_dir
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.hardware import Hardware
from lm_eval_moecache.records.real_model import RealModel
from lm_eval_moecache.trace.header import read_header


def nearest_trace(model: RealModel) -> Path:
    """Return the shipped trace whose routing is most like the model's.

    That of a model with equal layers and experts, else the nearest number of cycles in a layer's
    experts (experts / top-k), by ratio, then of layers.
    """

    def distance(path: Path) -> tuple[float, int, str]:
        # From the header: reading the rows of all traces takes a second.
        traced = read_header(path.name, read_schema(path).metadata).geometry
        sizes = (traced.num_layers, traced.num_experts)
        is_twin = sizes == (model.num_layers, model.num_experts)
        off = abs(math.log(cycle_ratio(model, traced)))
        return -1.0 if is_twin else off, abs(traced.num_layers - model.num_layers), path.name

    return min(sorted(traces_dir().glob("*.parquet")), key=distance)


def cycle_ratio(model: RealModel, traced: Geometry) -> float:
    """Return the share of a layer's experts that a token of the model takes, over the trace's."""
    return model.top_k / model.num_experts * traced.num_experts / traced.top_k


def traced_bytes(model: RealModel, traced: Geometry, share: float) -> int:
    """Return the cache of a trace that is as many cycles as a share of the model's experts."""
    traced_share = min(1.0, share / cycle_ratio(model, traced))
    size = int(model.emulated_by(traced).total_expert_bytes * traced_share)
    return max(size, model.expert_bytes)


def context_seconds(model: RealModel, hardware: Hardware, context: int) -> float:
    """Return the seconds in which a decoded token attends to `context` tokens."""
    if not context:
        return 0.0
    return model.num_layers * attention_s(model, hardware, DECODE, np.array([context - 1]))


def step_time(
    model: RealModel, hardware: Hardware, traced: Geometry, context: int
) -> Callable[[float], float]:
    """Return what turns seconds of a replayed decode step into those of the model's step.

    Beyond what a layer takes without experts, time grows with the experts of a token.
    """
    costs = Costs(hardware, model.geometry())
    dense_s = sum(costs.dense_s(layer, 1) for layer in range(model.num_layers))
    fixed_s = dense_s / model.num_layers + costs.expert_overhead_s
    context_s = context_seconds(model, hardware, context)
    top_k_ratio = model.top_k / traced.top_k

    def step_s(replayed_s: float) -> float:
        layer_s = fixed_s + (replayed_s / traced.num_layers - fixed_s) * top_k_ratio
        return model.num_layers * layer_s + context_s

    return step_s

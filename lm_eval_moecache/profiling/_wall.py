"""Measure what the wall clock takes on this machine: decode steps of a model, part by part.

Run twice under one policy, with room for all experts and with room for some: the first says what a
layer, its bookkeeping and the rest of a pass take, the second what a wait for the link adds.
"""

from __future__ import annotations

import copy
import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn

from lm_eval_moecache.engine.virtual.clock import DENSE_KERNELS, EXPERT_KERNELS, GATE_KERNELS
from lm_eval_moecache.engine.wall.link import WallLink
from lm_eval_moecache.model.checkpoint import model_path
from lm_eval_moecache.model.moe_layers import describe, find_moe_layers
from lm_eval_moecache.model.wall.loading import ExpertLoader
from lm_eval_moecache.profiling._wall_run import ALL, SOME, Step, WallRun
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.hardware import Hardware

ROUNDS = 3
"""How often both are run, in turn: machines change their speed."""
MOST_LAYERS = 4
"""Of the model that stands for a larger one: as much memory as a laptop has."""


class Parts(NamedTuple):
    """A decode step's parts, in seconds."""

    layer_s: float
    """One layer with its bookkeeping, nothing waited for."""
    bookkeeping_s: float
    outside_s: float
    """What a pass takes beside its layers."""
    wait_s: float
    """What a layer takes longer where it waited, the time that its experts moved apart."""


def parts_of(hot: Sequence[Step], cold: Sequence[Step]) -> Parts:
    """Tell the parts of steps: `hot` ones that found every expert, and others.

    Medians of each layer's own times, so that layers need not be alike.
    """
    calm = [_median(step.layers_s[i] for step in hot) for i in range(len(hot[0].layers_s))]
    layer_s = statistics.mean(calm)
    longer = [
        span_s - demanded_s - calm[layer]
        for step in cold
        for layer, (span_s, demanded_s) in enumerate(
            zip(step.layers_s, step.demanded_s, strict=True)
        )
        if demanded_s > 0
    ]
    places = range(len(hot[0].bookkeeping_s))
    return Parts(
        layer_s,
        statistics.mean(_median(step.bookkeeping_s[i] for step in hot) for i in places),
        max(_median(step.total_s for step in hot) - layer_s * len(places), 0.0),
        max(_median(longer), 0.0) if longer else 0.0,
    )


def profile_of(hardware: Hardware, parts: Parts, geometry: Geometry, gates: float) -> Hardware:
    """Return a profile by which the virtual clock charges a decode step as it was measured.

    `gates` is how many gates a layer's bookkeeping asks for predictions, on average: the clock
    charges them by themselves. Where reading takes longer than the whole, overheads are 0.
    """
    rate, num_layers = hardware.memory_bytes_per_s, geometry.num_layers
    own = min(geometry.dense_bytes)
    experts = statistics.mean(levels[0] for levels in geometry.expert_bytes) * geometry.top_k
    beside_s = parts.layer_s - parts.bookkeeping_s - (own + experts) / rate
    kernel_s = max(beside_s, 0.0) / (DENSE_KERNELS + EXPERT_KERNELS)
    outside_s = parts.outside_s - (sum(geometry.dense_bytes) - num_layers * own) / rate
    return dataclasses.replace(
        hardware,
        kernel_overhead_s=kernel_s,
        layer_overhead_s=max(parts.bookkeeping_s - gates * GATE_KERNELS * kernel_s, 0.0),
        pass_overhead_s=max(outside_s, 0.0),
        wait_overhead_s=parts.wait_s,
    )


def model_like(pretrained: str, dtype: torch.dtype, device: torch.device) -> Any:
    """Build the first layers of a model of this shape, with random weights: none are loaded.

    Its routers choose other experts for each token. Raises ValueError where there is no such model,
    and OSError where its configuration cannot be read.
    """
    config = copy.deepcopy(transformers.AutoConfig.from_pretrained(model_path(pretrained)))
    text = config.get_text_config()
    whole, text.num_hidden_layers = text.num_hidden_layers, min(text.num_hidden_layers, MOST_LAYERS)
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == whole:
            setattr(text, name, value[: text.num_hidden_layers])
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    for layer in find_moe_layers(model):
        nn.init.normal_(next(layer.router.parameters()), std=0.5)
    return model.to(device).eval().requires_grad_(False)


def measure_on_wall(
    hardware: Hardware,
    model: Any,
    loader: ExpertLoader,
    policy: str,
    bytes_per_s: float | None = None,
) -> Hardware:
    """Replace a profile's figures by what decoding this model takes on the wall clock here.

    The model's experts are the loader's already. With `bytes_per_s` the link is slowed down to
    that. Replaced: kernel, layer, pass and wait overheads, the link, and on a CPU the memory rate,
    all at the model's own matrices. Raises ValueError for a model of one MoE layer.
    """
    geometry = describe(model, find_moe_layers(model), "calibration")
    if geometry.num_layers < 2:
        raise ValueError("pretrained: a model of one MoE layer says nothing of a layer's time.")
    hot, cold, rates = [], [], []
    for _ in range(ROUNDS):
        run = WallRun(model, loader, geometry, policy, ALL, None)
        rates.append(run.memory_bytes_per_s)
        hot += run.decode()
        run = WallRun(model, loader, geometry, policy, SOME, bytes_per_s)
        cold += run.decode()
    link: WallLink = run.engine.link  # type: ignore[assignment]
    found = profile_of(
        dataclasses.replace(
            hardware,
            memory_bytes_per_s=statistics.median(rates) or hardware.memory_bytes_per_s,
            link_bytes_per_s=bytes_per_s or link.bytes_moved / link.busy_s,
            link_latency_s=0.0,
        ),
        parts_of(hot, cold),
        geometry,
        run.gates,
    )
    return dataclasses.replace(found, source=_sources(hardware, policy, bytes_per_s))


def _sources(hardware: Hardware, policy: str, bytes_per_s: float | None) -> dict[str, str]:
    known = hardware.source if isinstance(hardware.source, dict) else {}
    how = f"measured on the wall clock with policy {policy}: "
    given = f"given: the link is slowed down to {bytes_per_s} bytes/s"
    return {
        **known,
        "memory_bytes_per_s": f"{how}products of one row with the experts of the model",
        "link_bytes_per_s": given if bytes_per_s else f"{how}experts over the time they moved",
        "link_latency_s": f"{how}one expert after another, the rate holds what each costs",
        "kernel_overhead_s": f"{how}a layer less its bookkeeping and reading, over its kernels",
        "layer_overhead_s": f"{how}the hooks of a layer's router, predicting gates apart",
        "pass_overhead_s": f"{how}a decode step less its layers",
        "wait_overhead_s": f"{how}layers that waited, less the moving, beside those that did not",
    }


def _median(seconds: Any) -> float:
    return float(statistics.median(seconds))

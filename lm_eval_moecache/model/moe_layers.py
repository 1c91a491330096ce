"""Finds the MoE layers of a transformers model and measures what the core needs to know."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from lm_eval_moecache.model.gate import Gate, state_of
from lm_eval_moecache.model.precision.codecs import expert_bytes
from lm_eval_moecache.model.precision.ladder import codecs_of
from lm_eval_moecache.records.geometry import Geometry

_ROUTER_NAMES = ("gate", "router")
_TOP_K_NAMES = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k")
_INDEX = re.compile(r"(.*?\.)(\d+)\.")
_DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True, slots=True)
class MoELayer:
    """One MoE layer: its place in the model, its router and its experts."""

    path: str
    router: nn.Module
    experts: nn.Module
    gate: Gate
    """The family-independent interface to `router`."""

    @property
    def num_experts(self) -> int:
        """The number of routed experts."""
        return int(self.experts.num_experts)  # type: ignore[arg-type]


def find_moe_layers(model: Any) -> list[MoELayer]:
    """Return the MoE layers in order of execution; ValueError names what the model lacks."""
    modules = dict(model.named_modules())
    layers = []
    for path, module in modules.items():
        # Attributes that transformers' `use_experts_implementation` gives every experts module.
        if not (hasattr(module, "has_gate") and hasattr(module, "is_transposed")):
            continue
        parent = path.rpartition(".")[0]
        routers = [modules[f"{parent}.{n}"] for n in _ROUTER_NAMES if f"{parent}.{n}" in modules]
        if not routers:
            raise ValueError(
                f"pretrained: {type(model).__name__} has no {' or '.join(_ROUTER_NAMES)} module "
                f"next to its experts at {path!r}; its routing cannot be observed."
            )
        hidden_size = model.config.get_text_config().hidden_size
        gate = Gate(routers[0], modules[parent], hidden_size, int(module.num_experts))
        layers.append(MoELayer(path, routers[0], module, gate))
    name = type(model).__name__
    if not layers and any("expert" in path.rpartition(".")[2].lower() for path in modules):
        raise ValueError(
            f"pretrained: {name} is a Mixture-of-Experts model, but its experts do not use the "
            "experts interface of transformers (`use_experts_implementation`), through which their "
            "execution is taken over. Allowed: models whose modeling file has that decorator."
        )
    if not layers:
        raise ValueError(
            f"pretrained: {name} is a dense model: it has no experts to cache. "
            "Allowed: Mixture-of-Experts models; use `--model hf` for dense ones."
        )
    return layers


def cache_of(kwargs: Mapping[str, Any]) -> Any:
    """Return the cache of past keys and values that a model is called with, or None.

    transformers 5.24 calls it `cache`.
    """
    past = kwargs.get("past_key_values")
    return kwargs.get("cache") if past is None else past


def describe(
    model: Any, layers: Sequence[MoELayer], name: str, ladder: Sequence[str] | None = None
) -> Geometry:
    """Measure a model (it may be on the meta device) whose experts are stored at these levels.

    Without a ladder they keep their dtype. Raises ValueError where layers differ in their number
    of experts, which keys cannot express, and where a ladder's levels do not get smaller.
    """
    counts = {layer.num_experts for layer in layers}
    if len(counts) > 1:
        raise ValueError(f"pretrained: layers with different numbers of experts: {sorted(counts)}.")
    layer_bytes = [sum(p.nbytes for p in layer.experts.parameters()) for layer in layers]
    dtype = next(layers[0].experts.parameters()).dtype
    sizes = tuple(size // layers[0].num_experts for size in layer_bytes)
    levels: tuple[tuple[int, ...], ...] = tuple((size,) for size in sizes)
    if ladder is not None:
        codecs = codecs_of(tuple(ladder))
        levels = tuple(expert_bytes(layer.experts, codecs) for layer in layers)
        for (upper, size), (lower, less) in pairwise(zip(ladder, levels[0], strict=True)):
            if less >= size:
                raise ValueError(
                    f"precision={':'.join(ladder)!r} is not best first: an expert takes {size} "
                    f"bytes as {upper} and {less} as {lower}. Allowed: levels that get smaller."
                )
    return Geometry(
        model=name,
        num_layers=len(layers),
        num_experts=layers[0].num_experts,
        top_k=_top_k(model, layers[0]),
        expert_bytes=levels,
        dense_bytes=dense_bytes(model, layers),
        precision=tuple(ladder or (_DTYPE_NAMES.get(dtype, str(dtype).removeprefix("torch.")),)),
        element_bytes=float(dtype.itemsize),
        compute_bytes=() if ladder is None else sizes,
        hidden_size=int(getattr(model.config.get_text_config(), "hidden_size", 0)),
    )


def router_digest(layers: Sequence[MoELayer]) -> str:
    """Return the SHA-256 of the routers' tensors rounded to bf16, the same at any dtype.

    The model must not be on the meta device.
    """
    digest = hashlib.sha256()
    for index, layer in enumerate(layers):
        for name, tensor in state_of(layer.router):
            rounded = tensor.detach().to(torch.bfloat16).contiguous().cpu()
            digest.update(f"{index} {name} {tuple(tensor.shape)} ".encode())
            digest.update(rounded.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def _top_k(model: Any, layer: MoELayer) -> int:
    config = model.config.get_text_config()
    for place, name in ((layer.router, "top_k"), *((config, name) for name in _TOP_K_NAMES)):
        top_k = getattr(place, name, None)
        if isinstance(top_k, int):
            return top_k
    raise ValueError(
        f"pretrained: neither {layer.gate.name} nor {type(config).__name__} says how many experts "
        f"a token gets. Allowed: models whose router has `top_k`, or whose configuration has one "
        f"of {', '.join(_TOP_K_NAMES)}."
    )


def dense_bytes(model: Any, layers: Sequence[MoELayer]) -> tuple[int, ...]:
    """Return the bytes of all other weights per MoE layer, each counted towards one layer.

    A decoder layer without experts counts towards the next one with experts; what follows the
    last (norm, output head) towards the last. The input embedding is left out: a pass reads single
    rows of it.
    """
    sizes = [0] * len(layers)
    places = [place_of(layer.path) for layer in layers]
    expert_ids = {id(p) for layer in layers for p in layer.experts.parameters()}
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    if head is not None and head.weight is embedding:
        sizes[-1] += embedding.nbytes
    for name, parameter in model.named_parameters():
        if id(parameter) in expert_ids or parameter is embedding:
            continue
        stack, index = place_of(name)
        target = len(layers) - 1
        for i, (moe_stack, moe_index) in enumerate(places):
            if stack == moe_stack and index <= moe_index:
                target = i
                break
        sizes[target] += parameter.nbytes
    return tuple(sizes)


def place_of(path: str) -> tuple[str, int]:
    """Split `model.layers.3.mlp.experts` into (`model.layers.`, 3); -1 without an index."""
    match = _INDEX.match(path + ".")
    return (match[1], int(match[2])) if match else ("", -1)

"""Experts that a checkpoint has as they are executed: read from its files, nothing converted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from lm_eval_moecache.model.moe_layers import MoELayer, find_moe_layers
from lm_eval_moecache.model.sources import Source, can_leave_out, sources_of
from lm_eval_moecache.model.wall.pools import expert_parameters
from lm_eval_moecache.model.wall.tiers import Joined, OnDisk, Stored, tensors_in


def names_of(layers: Sequence[MoELayer]) -> list[dict[str, str]]:
    """Return each layer's parameters with an entry for each expert: name -> name in the model."""
    return [{n: f"{layer.path}.{n}" for n in expert_parameters(layer.experts)} for layer in layers]


def find_in_place(skeleton: Any, files: Sequence[Path]) -> list[dict[str, OnDisk]] | None:
    """Return where each layer's experts lie in these files, of the type and order they have there.

    None where any would have to be converted: another type, a transposition, a quantised model, no
    safetensors.
    """
    if not files or not can_leave_out() or hasattr(skeleton.config, "quantization_config"):
        return None
    tensors = {key: tensor for file in files for key, tensor in tensors_in(file).items()}
    layers = find_moe_layers(skeleton)
    names = names_of(layers)
    sources = sources_of(skeleton, {name for row in names for name in row.values()}, tensors)
    found: list[dict[str, OnDisk]] = []
    for layer, row in zip(layers, names, strict=True):
        own: dict[str, OnDisk] = {}
        for name, parameter in expert_parameters(layer.experts).items():
            place = _place(sources.get(row[name]), parameter, tensors)
            if place is None:
                return None
            own[name] = place
        found.append(own)
    return found


def _place(
    source: Source | None, parameter: Tensor, tensors: Mapping[str, Stored]
) -> OnDisk | None:
    if source is None or source.groups is None:
        return None
    groups = [[tensors[key] for key in group] for group in source.groups]
    if any(part.dtype != parameter.dtype for group in groups for part in group):
        return None
    whole = groups[0][0]
    if len(groups) == len(groups[0]) == 1 and whole.shape == tuple(parameter.shape):
        return whole
    num_experts, rows, *rest = parameter.shape
    if any(len(group) != num_experts for group in groups):
        return None
    experts = list(zip(*groups, strict=True))
    fits = all(
        sum(part.shape[0] for part in parts) == rows
        and all(part.shape[1:] == tuple(rest) for part in parts)
        for parts in experts
    )
    return Joined(experts) if fits else None

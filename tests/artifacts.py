"""Artifacts that belong to a model, or to the shipped one in another order."""

from __future__ import annotations

import dataclasses
from collections.abc import Container
from functools import cache
from pathlib import Path
from typing import Any

from lm_eval_moecache.algorithms.policy import Choice, Policy
from lm_eval_moecache.algorithms.registry import AXES
from lm_eval_moecache.model.moe_layers import describe, find_moe_layers, router_digest
from lm_eval_moecache.records.artifact import (
    ARTIFACT_DIR,
    DATA_AWARE,
    PREDICTOR,
    SENSITIVITY,
    UseProfile,
    read_artifact,
    write_artifact,
    write_use,
)
from lm_eval_moecache.records.coactivation import PAIRS, SIMILARITY, WEIGHTED
from lm_eval_moecache.records.sensitivity import LAYERS
from lm_eval_moecache.testing.streams import (
    MAKERS,
    artifact_folder,
    artifact_for,
    equip,
    profile_for,
    profile_parameter,
)

__all__ = [
    "artifact_for",
    "artifacts_of",
    "equip",
    "other_profile",
    "predictor_of",
    "profile_for",
    "profile_parameter",
    "use_profile",
]


@cache
def use_profile(num_layers: int, num_experts: int) -> str:
    """Return the path of a profile of use in which later experts are the hotter ones."""
    path = Path(artifact_folder().name) / f"use-{num_layers}-{num_experts}.json"
    counts = tuple(tuple(range(num_experts)) for _ in range(num_layers))
    write_use(path, UseProfile(model="", counts=counts))
    return str(path)


def predictor_of(model: Any, policy: Policy) -> dict[str, str]:
    """Give a policy that needs a trained predictor one that belongs to this very model."""
    return artifacts_of(model, policy, (PREDICTOR, DATA_AWARE))


def artifacts_of(
    model: Any, policy: Policy, kinds: Container[str] = tuple(MAKERS)
) -> dict[str, str]:
    """Give a policy's algorithms that need artifacts some that belong to this very model."""
    layers = find_moe_layers(model)
    geometry, found = describe(model, layers, "any"), {}
    for axis in AXES:
        choice: Choice = getattr(policy, axis)
        kind = getattr(choice.algorithm, "artifact_kind", None)
        if kind is None or kind not in kinds:
            continue
        drawn: dict[str, Any] = {}
        if kind == DATA_AWARE:
            drawn["hidden"] = model.get_input_embeddings().weight.shape[-1]
        elif kind == PREDICTOR:
            drawn["hidden"] = next(layers[0].router.parameters()).shape[-1]
            if "loss" in choice.parameters:
                drawn["loss"] = choice.parameters["loss"]
        digest = router_digest(layers)
        # Random routers of two families may be alike, and differ in how many experts they take.
        name = f"{kind}-{digest}-{geometry.top_k}-{drawn.get('loss', '')}.safetensors"
        path = Path(artifact_folder().name) / name
        if not path.exists():
            made = artifact_for(kind, geometry, **drawn)
            write_artifact(path, dataclasses.replace(made, router_digest=digest))
        found[f"{axis}.profile"] = str(path)
    if policy.placed:
        found["warm"] = use_profile(geometry.num_layers, geometry.num_experts)
    return found


@cache
def other_profile(kind: str) -> str:
    """Return a path like the one that ships for `tiny`, with the order of its experts reversed."""
    shipped = read_artifact(ARTIFACT_DIR / "tiny" / f"{kind}.safetensors", kind, "profile")
    arrays = dict(shipped.arrays)
    if kind == PREDICTOR:
        ends = len({array.shape[0] for array in arrays.values()} - {shipped.num_experts})
        assert ends == 1, "all but the hidden stage of the last layer end in experts"
        for name, array in arrays.items():
            if array.shape[0] == shipped.num_experts:
                arrays[name] = array[::-1]
    elif kind == DATA_AWARE:
        for name in ("heads.weight", "heads.bias"):
            by_layer = arrays[name].reshape(shipped.num_layers, shipped.num_experts, -1)
            arrays[name] = by_layer[:, ::-1].reshape(arrays[name].shape)
    elif kind == SENSITIVITY:
        arrays[LAYERS] = arrays[LAYERS][::-1]
    else:
        for name in (PAIRS, WEIGHTED, SIMILARITY):
            arrays[name] = arrays[name][:, ::-1, ::-1]
    path = Path(artifact_folder().name) / f"other-{kind}.safetensors"
    write_artifact(path, dataclasses.replace(shipped, arrays=arrays))
    return str(path)

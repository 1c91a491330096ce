"""Artifacts that belong to a model."""

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
    DATA_AWARE,
    PREDICTOR,
    UseProfile,
    write_artifact,
    write_use,
)
from lm_eval_moecache.testing.streams import MAKERS, artifact_folder, artifact_for, profile_for

__all__ = ["artifacts_of", "predictor_of", "profile_for", "use_profile"]


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

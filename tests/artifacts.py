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
from lm_eval_moecache.records.artifact import DATA_AWARE, PREDICTOR, write_artifact
from lm_eval_moecache.testing.streams import MAKERS, artifact_folder, artifact_for, profile_for
from lm_eval_moecache.trace.use import UseProfile, write_use

__all__ = ["artifacts_of", "predictor_of", "profile_for", "use_profile"]


@cache
def use_profile(num_layers: int, num_experts: int) -> str:
    """Return the path of a use profile in which experts get hotter with their index."""
    path = Path(artifact_folder().name) / f"use-{num_layers}-{num_experts}.json"
    counts = tuple(tuple(range(num_experts)) for _ in range(num_layers))
    write_use(path, UseProfile(model="", counts=counts))
    return str(path)


def predictor_of(model: Any, policy: Policy) -> dict[str, str]:
    """Return arguments with a predictor of this very model for each algorithm that needs one."""
    return artifacts_of(model, policy, (PREDICTOR, DATA_AWARE))


def artifacts_of(
    model: Any, policy: Policy, kinds: Container[str] = tuple(MAKERS)
) -> dict[str, str]:
    """Return arguments with artifacts of this very model for the algorithms that need them."""
    layers = find_moe_layers(model)
    geometry, arguments = describe(model, layers, "any"), {}
    for axis in AXES:
        choice: Choice = getattr(policy, axis)
        kind = getattr(choice.algorithm, "artifact_kind", None)
        if kind is None or kind not in kinds:
            continue
        options: dict[str, Any] = {}
        if kind == DATA_AWARE:
            options["hidden"] = model.get_input_embeddings().weight.shape[-1]
        elif kind == PREDICTOR:
            options["hidden"] = next(layers[0].router.parameters()).shape[-1]
            if "loss" in choice.parameters:
                options["loss"] = choice.parameters["loss"]
        digest = router_digest(layers)
        # Random routers of two families may have equal weights and differ in top-k.
        name = f"{kind}-{digest}-{geometry.top_k}-{options.get('loss', '')}.safetensors"
        path = Path(artifact_folder().name) / name
        if not path.exists():
            artifact = artifact_for(kind, geometry, **options)
            write_artifact(path, dataclasses.replace(artifact, router_digest=digest))
        arguments[f"{axis}.profile"] = str(path)
    if policy.placed:
        arguments["warm"] = use_profile(geometry.num_layers, geometry.num_experts)
    return arguments

"""Artifacts that belong to a model, or to the shipped one in another order."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

from lm_eval_moecache.algorithms.policy import Policy
from lm_eval_moecache.model.moe_layers import describe, find_moe_layers, router_digest
from lm_eval_moecache.records.artifact import (
    ARTIFACT_DIR,
    DATA_AWARE,
    PREDICTOR,
    SENSITIVITY,
    read_artifact,
    write_artifact,
)
from lm_eval_moecache.records.coactivation import PAIRS, SIMILARITY, WEIGHTED
from lm_eval_moecache.records.sensitivity import LAYERS
from lm_eval_moecache.testing.artifacts import (
    artifact_folder,
    artifact_for,
    equip,
    profile_for,
    profile_parameter,
)

__all__ = [
    "artifact_for",
    "equip",
    "other_profile",
    "predictor_of",
    "profile_for",
    "profile_parameter",
]


def predictor_of(model: Any, policy: Policy) -> dict[str, str]:
    """Give a policy that needs a trained predictor one that belongs to this very model."""
    prefetch = policy.prefetch
    if prefetch.algorithm.artifact_kind not in (PREDICTOR, DATA_AWARE):
        return {}
    layers = find_moe_layers(model)
    geometry = describe(model, layers, "any")
    if prefetch.algorithm.foresees:
        hidden, loss = model.get_input_embeddings().weight.shape[-1], ""
        drawn = artifact_for(DATA_AWARE, geometry, hidden=hidden)
    else:
        hidden = next(layers[0].router.parameters()).shape[-1]
        loss = prefetch.parameters["loss"]
        drawn = artifact_for(PREDICTOR, geometry, hidden=hidden, loss=loss)
    digest = router_digest(layers)
    # Random routers of two families may be alike, and differ in how many experts they take.
    name = f"{drawn.kind}-{digest}-{geometry.top_k}-{loss}.safetensors"
    path = Path(artifact_folder().name) / name
    if not path.exists():
        write_artifact(path, dataclasses.replace(drawn, router_digest=digest))
    return {"prefetch.profile": str(path)}


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

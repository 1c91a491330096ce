"""Artifacts for models that have none: what algorithms with a `profile` are tested with."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from lm_eval_moecache.algorithms.policy import Choice, Policy
from lm_eval_moecache.algorithms.registry import AXES
from lm_eval_moecache.records.artifact import (
    BUDDIES,
    DATA_AWARE,
    PREDICTOR,
    SENSITIVITY,
    Artifact,
    write_artifact,
)
from lm_eval_moecache.records.coactivation import (
    PAIRS,
    SIMILARITY,
    TOP_LOGITS,
    WEIGHTED,
    Coactivation,
)
from lm_eval_moecache.records.data_aware import shapes as data_aware_shapes
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.predictor import shapes
from lm_eval_moecache.records.sensitivity import LAYERS, THRESHOLDS

Made = tuple[dict[str, Any], dict[str, Any]]
"""An artifact's arrays and its `made_from`."""


def buddies(geometry: Geometry, seed: int = 0) -> Made:
    """Count the choices of random routers whose experts have favourite partners."""
    rng = np.random.default_rng(seed)
    counts, top_logits = Coactivation(geometry), []
    for layer in range(geometry.num_layers):
        gate = rng.normal(size=(4, geometry.num_experts))
        logits = (rng.normal(size=(300, 4)) @ gate).astype(np.float32)
        experts = np.argsort(-logits, axis=-1, kind="stable")[:, : geometry.top_k]
        counts.add(layer, experts, logits, np.ones(len(logits)))
        top_logits.append(np.take_along_axis(logits, experts, axis=-1)[:64])
    outputs = rng.normal(size=(geometry.num_layers, geometry.num_experts, 6))
    outputs /= np.sqrt((outputs**2).sum(axis=-1, keepdims=True))
    arrays = {
        "activations": counts.activations,
        PAIRS: counts.pairs,
        WEIGHTED: counts.weighted_pairs,
        TOP_LOGITS: np.stack(top_logits),
        SIMILARITY: np.einsum("lad,lbd->lab", outputs, outputs).astype(np.float32),
    }
    return arrays, {"alpha": [0.95] * geometry.num_layers, "k_max": 16, "smoothing": 1.0}


def predictor(geometry: Geometry, seed: int = 0, hidden: int = 6, loss: str = "kl") -> Made:
    """Draw the weights of a predictor.

    Streams have their own predictions and see its cost only, so an odd seed and the second loss
    give numbers twice as wide.
    """
    rng = np.random.default_rng(seed)
    wanted = shapes(geometry.num_layers, geometry.num_experts, hidden)
    kind = np.float32 if seed % 2 or loss != "kl" else np.float16
    arrays = {name: rng.normal(size=shape).astype(kind) for name, shape in wanted.items()}
    return arrays, {"loss": loss}


def data_aware(geometry: Geometry, seed: int = 0, hidden: int = 6) -> Made:
    """Draw the weights of a network that foresees passes; odd seeds give twice as wide numbers."""
    rng = np.random.default_rng(seed)
    wanted = data_aware_shapes(geometry.num_layers, geometry.num_experts, hidden, 4)
    kind = np.float32 if seed % 2 else np.float16
    return {name: rng.normal(size=shape).astype(kind) for name, shape in wanted.items()}, {}


def sensitivity(geometry: Geometry, seed: int = 0) -> Made:
    """Draw how sensitive each layer is, with thresholds that even random routers get below."""
    layers = np.random.default_rng(seed).uniform(0.2, 3, geometry.num_layers)
    return {LAYERS: layers, THRESHOLDS: np.linspace(0.01, 0.6, 101)}, {}


MAKERS: Mapping[str, Callable[..., Made]] = {
    BUDDIES: buddies,
    PREDICTOR: predictor,
    DATA_AWARE: data_aware,
    SENSITIVITY: sensitivity,
}


@cache
def artifact_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="moecache-artifacts-")


def artifact_for(kind: str, geometry: Geometry, seed: int = 0, **given: Any) -> Artifact:
    arrays, made_from = MAKERS[kind](geometry, seed, **given)
    return Artifact(
        kind=kind,
        model=geometry.model,
        num_layers=geometry.num_layers,
        num_experts=geometry.num_experts,
        top_k=geometry.top_k,
        router_digest="0" * 64,
        made_from=made_from,
        arrays=arrays,
    )


@cache
def profile_for(kind: str, geometry: Geometry, seed: int = 0, **given: Any) -> str:
    """Return the path of an artifact that fits this geometry."""
    folder = Path(artifact_folder().name)
    path = folder / f"{kind}-{len(list(folder.iterdir()))}.safetensors"
    write_artifact(path, artifact_for(kind, geometry, seed, **given))
    return str(path)


def profile_parameter(algorithm: type[Any], geometry: Geometry, **given: Any) -> dict[str, Any]:
    """Return `{"profile": path}` for an algorithm that wants one and has none shipped."""
    kind = getattr(algorithm, "artifact_kind", None)
    if kind is None or geometry.model == "tiny":
        return {}
    return {"profile": profile_for(kind, geometry, **given)}


def equip(policy: Policy, geometry: Geometry) -> Policy:
    """Give every algorithm of a policy that wants a profile, and names none, one that fits."""
    changes: dict[str, Any] = {}
    for axis in AXES:
        choice: Choice = getattr(policy, axis)
        if getattr(choice.algorithm, "artifact_kind", None) and not choice.parameters["profile"]:
            loss = {key: choice.parameters[key] for key in choice.parameters if key == "loss"}
            given = profile_parameter(choice.algorithm, geometry, **loss)
            changes[axis] = dataclasses.replace(choice, parameters={**choice.parameters, **given})
    return dataclasses.replace(policy, **changes) if changes else policy

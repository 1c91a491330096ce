"""The arrays of a data-aware predictor, and the cost of applying it.

It reads the tokens of a text and predicts, before a pass begins, the experts of all its layers: a
linear stage on the token's embedding, two LSTM stages, attention over their outputs so far, and one
linear head for all MoE layers. Arrays have torch's names.
"""

from __future__ import annotations

from lm_eval_moecache.algorithms.learned.predictor import PredictorCost
from lm_eval_moecache.records.artifact import DATA_AWARE, Artifact, load_artifact
from lm_eval_moecache.records.geometry import Geometry

NUM_LSTMS = 2
# Each linear stage is a product and its activation, an LSTM stage two products and two elementwise
# kernels, attention two products, the projection of its weights and their application.
_KERNELS = 2 + 4 * NUM_LSTMS + 4 + 2 + 2


def shapes(
    num_layers: int, num_experts: int, hidden: int, width: int
) -> dict[str, tuple[int, ...]]:
    """Return the shape of every array; `hidden` is the length of an embedding."""
    shape_of: dict[str, tuple[int, ...]] = {
        "compress.weight": (width, hidden),
        "compress.bias": (width,),
        "residual.weight": (width, width),
        "residual.bias": (width,),
        "heads.weight": (num_layers * num_experts, width),
        "heads.bias": (num_layers * num_experts,),
    }
    for stage in range(NUM_LSTMS):
        for side in ("ih", "hh"):
            shape_of[f"lstm.weight_{side}_l{stage}"] = (4 * width, width)
            shape_of[f"lstm.bias_{side}_l{stage}"] = (4 * width,)
    return shape_of


def sizes_of(artifact: Artifact) -> tuple[int, int]:
    """Return the length of the predictor's input embeddings, and its own width."""
    first = artifact.arrays.get("compress.weight")
    if first is None or first.ndim != 2:
        raise ValueError(f"{artifact.path}: no predictor: it lacks the array 'compress.weight'.")
    return int(first.shape[1]), int(first.shape[0])


def load_data_aware(profile: str | None, geometry: Geometry) -> Artifact:
    """Return the predictor at `profile`, or else the one that ships for the model.

    Raises ValueError where there is none, or where the file is another model's or is truncated.
    """
    artifact = load_artifact(DATA_AWARE, profile, geometry, "prefetch.profile")
    artifact.require(**shapes(geometry.num_layers, geometry.num_experts, *sizes_of(artifact)))
    return artifact


def cost_of(artifact: Artifact) -> PredictorCost:
    """Return the cost of reading a pass's tokens, without attention over earlier ones."""
    return PredictorCost.of([*artifact.arrays.values()], _KERNELS)

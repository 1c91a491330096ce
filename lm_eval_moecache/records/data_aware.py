"""What a data-aware predictor looks like as arrays, and what applying it costs.

It reads the tokens of a text and says, before a pass begins, which experts each of its layers will
choose: a linear stage on the token's embedding, two LSTM stages, attention over their outputs so
far, and one linear head for all MoE layers. Arrays are named as torch names them.
"""

from __future__ import annotations

from lm_eval_moecache.records.artifact import DATA_AWARE, Artifact, load_artifact
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.predictor import PredictorCost

NUM_LSTMS = 2
# Each linear stage is a product and its activation, an LSTM stage two products and two elementwise
# kernels, attention two products, the projection of its weights and their application.
_KERNELS = 2 + 4 * NUM_LSTMS + 4 + 2 + 2


def shapes(
    num_layers: int, num_experts: int, hidden: int, width: int
) -> dict[str, tuple[int, ...]]:
    """Return the shape of every array; `hidden` is an embedding's length."""
    found: dict[str, tuple[int, ...]] = {
        "compress.weight": (width, hidden),
        "compress.bias": (width,),
        "residual.weight": (width, width),
        "residual.bias": (width,),
        "heads.weight": (num_layers * num_experts, width),
        "heads.bias": (num_layers * num_experts,),
    }
    for stage in range(NUM_LSTMS):
        for side in ("ih", "hh"):
            found[f"lstm.weight_{side}_l{stage}"] = (4 * width, width)
            found[f"lstm.bias_{side}_l{stage}"] = (4 * width,)
    return found


def sizes_of(artifact: Artifact) -> tuple[int, int]:
    """Return the length of the embeddings it takes, and its own width."""
    first = artifact.arrays.get("compress.weight")
    if first is None or first.ndim != 2:
        raise ValueError(f"{artifact.path}: no predictor: it lacks the array 'compress.weight'.")
    return int(first.shape[1]), int(first.shape[0])


def load_data_aware(profile: str | None, geometry: Geometry) -> Artifact:
    """Return the one at `profile`, or else the one that ships for the model.

    Raises ValueError where there is none, and where the file is another model's or is cut short.
    """
    artifact = load_artifact(DATA_AWARE, profile, geometry, "prefetch.profile")
    artifact.require(**shapes(geometry.num_layers, geometry.num_experts, *sizes_of(artifact)))
    return artifact


def cost_of(artifact: Artifact) -> PredictorCost:
    """Return the cost of reading a pass's tokens, apart from attention over those before."""
    arrays = artifact.arrays.values()
    return PredictorCost(
        num_weights=sum(array.size for array in arrays),
        num_bytes=sum(array.nbytes for array in arrays),
        num_kernels=_KERNELS,
    )

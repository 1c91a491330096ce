"""The arrays of a trained predictor of router logits, and the cost of applying it.

At each MoE layer it maps the router's input to logits for the next MoE layer of the same token; at
the last one, for the first MoE layer of the next token. Layer l has `stages(l)` linear
stages with ReLU between them, stored as `L.S.weight` [out, in] and `L.S.bias` [out].
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from lm_eval_moecache.records.artifact import PREDICTOR, Artifact, load_artifact
from lm_eval_moecache.records.event import DECODE
from lm_eval_moecache.records.geometry import Geometry

LOSSES = ("kl", "bce")
"""`kl`: CommitMoE eq. 4, file `predictor`. `bce`: on the chosen experts, file `predictor_bce`."""
HIDDEN_FACTOR = 2
"""Hidden width / input width of the two-stage predictor (CommitMoE section 4.2)."""
_LINEAR_KERNELS = 2
"""A product with its bias, and a cast or an activation; the softmax at the end is one more."""


class PredictorCost(NamedTuple):
    """The cost of one application at a layer: multiplied weights, bytes read, kernels launched."""

    num_weights: int = 0
    num_bytes: int = 0
    num_kernels: int = 0

    @classmethod
    def of(cls, arrays: Sequence[Any], num_kernels: int) -> PredictorCost:
        """Return the cost of multiplying by these arrays once."""
        return cls(sum(a.size for a in arrays), sum(a.nbytes for a in arrays), num_kernels)


def num_stages(layer: int, num_layers: int) -> int:
    """Return the linear stages at a layer: 1, or 2 at the last, which predicts the next token."""
    return 2 if layer == num_layers - 1 else 1


def target_of(layer: int, num_layers: int, phase: str) -> int | None:
    """Return the layer whose experts are predicted at `layer`, or None.

    Only decoding has a next token to predict for: the first layer of the first generated token is
    routed as usual (CommitMoE section 4.1).
    """
    if layer < num_layers - 1:
        return layer + 1
    return 0 if phase == DECODE else None


def array_name(layer: int, stage: int, what: str) -> str:
    """Return the name of a stage's `weight` or `bias` in the artifact."""
    return f"{layer}.{stage}.{what}"


def hidden_size(artifact: Artifact) -> int:
    """Return the width of the router inputs that the predictor takes."""
    first = artifact.arrays.get(array_name(0, 0, "weight"))
    if first is None or first.ndim != 2:
        raise ValueError(f"{artifact.path}: no predictor: it lacks the array '0.0.weight'.")
    return int(first.shape[1])


def shapes(num_layers: int, num_experts: int, hidden: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of every array of a predictor; `hidden` is its input width."""
    shape_of: dict[str, tuple[int, ...]] = {}
    for layer in range(num_layers):
        inner = [HIDDEN_FACTOR * hidden] * (num_stages(layer, num_layers) - 1)
        for stage, (width, out) in enumerate(pairwise([hidden, *inner, num_experts])):
            shape_of[array_name(layer, stage, "weight")] = (out, width)
            shape_of[array_name(layer, stage, "bias")] = (out,)
    return shape_of


def load_predictor(profile: str | None, loss: str, geometry: Geometry) -> Artifact:
    """Return the predictor at `profile`, or else the one of this loss that ships for the model.

    Raises ValueError where there is none, or where the file is another model's, is truncated, or
    was trained with another loss.
    """
    key = "prefetch.profile"
    special = None if loss == LOSSES[0] else loss
    artifact = load_artifact(PREDICTOR, profile, geometry, key, special)
    artifact.require(**shapes(geometry.num_layers, geometry.num_experts, hidden_size(artifact)))
    for layer in range(geometry.num_layers):
        last = array_name(layer, num_stages(layer, geometry.num_layers) - 1, "weight")
        silent = ~artifact.arrays[last].any(axis=1)
        if silent.any():
            raise ValueError(
                f"{key}={artifact.path!r} predicts nothing for expert {int(silent.argmax())} of "
                f"layer {(layer + 1) % geometry.num_layers}: its row of {last!r} is all zero. Make "
                "a new one with `moecache profile predictor`."
            )
    trained = artifact.made_from.get("loss")
    if trained != loss:
        raise ValueError(
            f"{key}={artifact.path!r} was trained with loss={trained!r}, but prefetch.loss={loss!r}"
            " is asked for. Set prefetch.loss to it, or give another file."
        )
    return artifact


def costs(artifact: Artifact) -> tuple[PredictorCost, ...]:
    """Return the cost of applying the predictor at each layer, for any number of tokens at once."""
    layer_costs = []
    for layer in range(artifact.num_layers):
        arrays = [a for name, a in artifact.arrays.items() if name.startswith(f"{layer}.")]
        num_kernels = _LINEAR_KERNELS * num_stages(layer, artifact.num_layers) + 1
        layer_costs.append(PredictorCost.of(arrays, num_kernels))
    return tuple(layer_costs)


def digest_of(artifact: Artifact) -> str:
    """Return the digest of a predictor's weights, by which a trace identifies its predictions."""
    digest = hashlib.sha256()
    for name in sorted(artifact.arrays):
        digest.update(name.encode())
        digest.update(artifact.arrays[name].tobytes())
    return digest.hexdigest()

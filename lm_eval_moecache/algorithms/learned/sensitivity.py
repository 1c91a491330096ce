"""Sensitivity of each layer to dropped experts: the artifact of `moecache profile sensitivity`.

`sensitivity` [layers] is the rise of the loss, to second order, from leaving out all but a token's
heaviest expert, divided by the square of their share of the weight. `thresholds` [101] are the
percentiles 0, 1, ... 100 of this rise over all (token, rank) activations.
"""

from __future__ import annotations

import numpy as np

from lm_eval_moecache.records.arrays import DoubleArray, FloatArray
from lm_eval_moecache.records.artifact import SENSITIVITY, Artifact, load_artifact
from lm_eval_moecache.records.geometry import Geometry

LAYERS, THRESHOLDS = "sensitivity", "thresholds"


def rises(weights: FloatArray, sensitivity: float) -> DoubleArray:
    """Return the rise of the loss from dropping each entry and all lighter ones [tokens, top_k].

    AdapMoE's (1 - alpha)^2 S, where 1 - alpha is the lost share of the weight. The first column,
    which would lose all of it, is infinite: the heaviest expert always stays.
    """
    lost = np.cumsum(weights[:, ::-1].astype(np.float64), axis=-1)[:, ::-1]
    rise = (lost / np.maximum(lost[:, :1], 1e-20)) ** 2 * sensitivity
    rise[:, 0] = np.inf
    return rise


def load_sensitivity(profile: str | None, geometry: Geometry) -> Artifact:
    """Return the artifact at `profile`, or else the one that ships for the model.

    Raises ValueError where there is none, or where it does not fit the model.
    """
    key = "routing.profile"
    artifact = load_artifact(SENSITIVITY, profile, geometry, key)
    artifact.require(**{LAYERS: (geometry.num_layers,), THRESHOLDS: (101,)})
    low = float(artifact.arrays[LAYERS].min())
    if low <= 0:
        raise ValueError(
            f"{key}={artifact.path!r}: a layer's sensitivity is {low}, where it must be above 0. "
            "Make a new one with `moecache profile sensitivity`."
        )
    return artifact

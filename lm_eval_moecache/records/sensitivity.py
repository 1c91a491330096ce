"""What a layer's output may lose: the artifact of `moecache profile sensitivity`, and its arrays.

`sensitivity` [layers] says how much the loss rises, to second order, where all but a token's
heaviest expert are left out, over the square of their share of the weight. `thresholds` [101] says
below which rise a share of 0, 1, ... 100% of all (token, rank) activations lies.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lm_eval_moecache.records.arrays import FloatArray
from lm_eval_moecache.records.artifact import SENSITIVITY, Artifact, load_artifact
from lm_eval_moecache.records.geometry import Geometry

LAYERS, THRESHOLDS = "sensitivity", "thresholds"
Doubles = npt.NDArray[np.float64]


def rises(weights: FloatArray, sensitivity: float) -> Doubles:
    """Return what leaving out each entry and all lighter ones costs: [tokens, top_k].

    AdapMoE's (1 - alpha)^2 S, where 1 - alpha is the share of the weight that is lost; the first
    column, all of it, is infinite, because the heaviest expert always stays.
    """
    lost = np.cumsum(weights[:, ::-1].astype(np.float64), axis=-1)[:, ::-1]
    found = (lost / np.maximum(lost[:, :1], 1e-20)) ** 2 * sensitivity
    found[:, 0] = np.inf
    return found


def load_sensitivity(profile: str | None, geometry: Geometry) -> Artifact:
    """Return the profile, or the one that ships for the model. ValueError where it does not fit."""
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

"""The rows of a routing trace as arrays, and the error for a value that does not fit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lm_eval_moecache.records.arrays import FloatArray

Ints = npt.NDArray[np.int32]
Halves = npt.NDArray[np.float16]
NO_REQUEST = -1
"""Request number of a row that no harness request was waiting for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """The rows of a trace. `phase` indexes PHASES; `experts` and `weights` are [rows, top_k]."""

    request: Ints
    pass_index: Ints
    phase: Ints
    token: Ints
    layer: Ints
    experts: Ints
    weights: FloatArray | None = None


def misfit(name: str, place: str, field: str, problem: str) -> ValueError:
    """Build the error for a value that does not fit the format."""
    return ValueError(f"trace {name}: {place}: {field} {problem}.")

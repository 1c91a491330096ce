"""Array types shared between folders, and the softmax of a router."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]
DoubleArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
Weigh = Callable[[FloatArray, IntArray], FloatArray]
"""(logits [tokens, experts], chosen experts [tokens, top_k]) -> their weights [tokens, top_k]."""


def each_token(rows: IntArray | FloatArray) -> IntArray:
    """Return the index [tokens, 1] that goes with one into each token's entries.

    For one token it takes a third of the time of numpy's `take_along_axis`.
    """
    return _numbered(len(rows))


@lru_cache(maxsize=128)
def _numbered(count: int) -> IntArray:
    numbers = np.arange(count)[:, None]
    numbers.flags.writeable = False
    return numbers


def softmax(logits: FloatArray) -> FloatArray:
    """Return the row-wise softmax of [tokens, experts]."""
    # The methods `max` and `sum` wrap these, which doubles their cost for one token.
    scores = np.exp(logits - np.maximum.reduce(logits, axis=-1, keepdims=True))
    scores /= np.add.reduce(scores, axis=-1, keepdims=True)
    return np.asarray(scores, dtype=np.float32)


def softmax_weights(logits: FloatArray, experts: IntArray) -> FloatArray:
    """Return the softmax scores of the chosen experts: the rule of CommitMoE eq. 1 and 2."""
    return softmax(logits)[each_token(logits), experts]

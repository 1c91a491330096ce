"""One MoE layer of a pass as rules see it, in arrays.

A key names an expert of the whole model: `layer * num_experts + expert`. Keys sort by layer, then
by expert; "layer" counts MoE layers only. Times are seconds, sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from lm_eval_moecache.records.arrays import (
    BoolArray,
    FloatArray,
    IntArray,
    Weigh,
    softmax_weights,
)

PREFILL, DECODE, VERIFY = "prefill", "decode", "verify"
PHASES = (PREFILL, DECODE, VERIFY)
PASS_START = -1
"""The layer of an event before the first one, which needs nothing and predicts the whole pass."""
DROPPED = -1
"""In `Event.experts`: an expert that is left out."""
UNSEEN_SCORES: FloatArray = np.empty((0, 0), dtype=np.float32)
NO_FLAGS: BoolArray = np.empty((0, 0), dtype=bool)
"""Arrays without rows, for what no algorithm of the policy uses, or nobody knows."""
NO_PREDICTIONS: Mapping[int, FloatArray] = MappingProxyType({})


class Event(NamedTuple):
    """A layer of a pass: what the tokens need there, and where its experts are.

    Of one run, or of several side by side: a row is a run of its own, with a cache of its own, and
    has its part of the tokens. Arrays must not be changed.
    """

    layer: int
    phase: str
    passes: Sequence[int]
    """The number of each row's pass."""
    num_experts: int
    """Of a layer."""
    experts: IntArray
    """[tokens, top_k], heaviest first; DROPPED where one is left out."""
    weights: FloatArray = UNSEEN_SCORES
    """[tokens, top_k]; without rows where the rule does not use them. Where routing has chosen
    others, theirs are softmax scores, if there are logits."""
    logits: FloatArray = UNSEEN_SCORES
    """[tokens, experts], unmodified; without rows where the rule does not use them."""
    bounds: Sequence[int] = ()
    """Row r has the tokens `bounds[r]` to `bounds[r + 1]`; empty for a single row."""
    resident: BoolArray = NO_FLAGS
    """[rows, experts]; known to routing and miss rules, as is the next one."""
    absent: BoolArray = NO_FLAGS
    """[rows, experts]: what a miss rule is asked about. Experts that are neither resident nor
    absent are on their way, and waited for."""
    own: Sequence[Any] = ()
    """By row, its rule, which has what it remembers; known to rules over rows."""
    predicted: Mapping[int, FloatArray] = NO_PREDICTIONS
    """Target layer -> predicted logits [tokens, experts]: its gate's on this layer's input, or a
    trained predictor's. A target at or before this layer belongs to the next pass."""
    weigh: Weigh = softmax_weights
    """The model family's rule for the weights of chosen experts."""

    @property
    def pass_index(self) -> int:
        """The number of the first row's pass."""
        return self.passes[0]

    @property
    def keys(self) -> list[int]:
        """The keys that the tokens need, each once, in order of first need."""
        return unique_in_order(self.layer, self.num_experts, self.experts)

    @property
    def sizes(self) -> Sequence[int]:
        """How many tokens each row has."""
        return [stop - start for start, stop in pairwise(self.bounds)] or [len(self.experts)]

    @property
    def rows(self) -> IntArray:
        """The row of each token, [tokens]."""
        if len(self.experts) == len(self.passes):
            return np.arange(len(self.passes))
        return np.repeat(np.arange(len(self.passes)), self.sizes)

    @property
    def is_missing(self) -> BoolArray:
        """Whether each chosen expert is absent, [tokens, top_k]."""
        return self._found(self.absent)

    @property
    def is_resident(self) -> BoolArray:
        """Whether each chosen expert is resident, [tokens, top_k]."""
        return self._found(self.resident)

    def _found(self, flags: BoolArray) -> BoolArray:
        found = flags[self.rows[:, None], self.experts]
        return np.asarray(found & (self.experts != DROPPED))

    def row(self, place: int) -> Event:
        """Return the event of one row."""
        if len(self.passes) == 1:
            return self
        own = slice(self.bounds[place], self.bounds[place + 1])
        return self._replace(
            passes=self.passes[place : place + 1],
            experts=self.experts[own],
            weights=self.weights[own],
            logits=self.logits[own],
            bounds=(),
            resident=self.resident[place : place + 1],
            absent=self.absent[place : place + 1],
            own=self.own[place : place + 1],
            predicted={target: values[own] for target, values in self.predicted.items()},
        )


def unique_in_order(layer: int, num_experts: int, experts: IntArray) -> list[int]:
    """Return the keys of [tokens, top_k] experts, each once, in order of first need; no dropped."""
    base = layer * num_experts
    return list(dict.fromkeys((experts[experts >= 0] + base).tolist()))

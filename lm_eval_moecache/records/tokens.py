"""What a rule over rows decides at once: the tokens of an event, or those of several rows' events.

A row is a run of its own, with a cache and a state of its own; all rows have equally many tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from lm_eval_moecache.records.arrays import (
    BoolArray,
    DoubleArray,
    FloatArray,
    IntArray,
    Weigh,
    each_token,
    softmax_weights,
)
from lm_eval_moecache.records.event import DROPPED, NO_PREDICTIONS, Event, resident_mask

NO_STATE: DoubleArray = np.zeros((0, 0))


class Tokens(NamedTuple):
    """The router's choice for some tokens, and where the experts of the layer are for each."""

    layer: int
    phase: str
    passes: Sequence[int]
    """The number of each row's pass."""
    experts: IntArray
    """[tokens, top_k], heaviest first; DROPPED where routing left one out. Not to be changed."""
    weights: FloatArray
    """[tokens, top_k]; without rows where the rule does not use them."""
    logits: FloatArray
    """[tokens, experts]; without rows where the rule does not use them."""
    resident: BoolArray
    """[tokens, experts]"""
    absent: BoolArray
    """[tokens, experts]: what a miss rule is asked about. Experts that are neither resident nor
    absent are on their way, and waited for."""
    state: DoubleArray
    """[rows, numbers]: what the rule keeps of this layer, which it may change (`row_state`)."""
    predicted: Mapping[int, FloatArray] = NO_PREDICTIONS
    """Target layer -> predicted logits [tokens, experts], as in `Event`."""
    weigh: Weigh = softmax_weights
    """The model family's rule for the weights of chosen experts."""

    @property
    def by_row(self) -> tuple[int, int]:
        """The shape [rows, tokens of each], into which values of all tokens may be brought."""
        return len(self.passes), len(self.experts) // len(self.passes)

    @property
    def rows(self) -> IntArray:
        """The row of each token, [tokens]."""
        return np.arange(len(self.experts)) // self.by_row[1]

    @property
    def is_missing(self) -> BoolArray:
        """Whether each chosen expert is absent, [tokens, top_k]."""
        absent = self.absent[each_token(self.experts), self.experts]
        return np.asarray(absent & (self.experts != DROPPED))


def tokens_of(
    event: Event,
    resident: Container[int],
    num_experts: int,
    state: DoubleArray,
    absent: Collection[int] | None = None,
) -> Tokens:
    """Return the tokens of one event; `state` [1, numbers] is changed with theirs."""
    layer, size = event.layer, len(event.experts)
    flags = resident_mask(layer, num_experts, resident)
    others = ~flags if absent is None else resident_mask(layer, num_experts, {*absent})
    is_resident, is_absent = flags[None].repeat(size, axis=0), others[None].repeat(size, axis=0)
    given = event.experts, event.weights, event.logits, is_resident, is_absent
    seen = event.predicted, event.weigh
    return Tokens(layer, event.phase, (event.pass_index,), *given, state, *seen)

"""An event: the experts that one pass needs from one MoE layer.

An expert key is the integer `layer * num_experts + expert`, so that keys sort by layer, then by
expert; "layer" counts MoE layers only. Times are seconds, sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from lm_eval_moecache.records.arrays import BoolArray, FloatArray, IntArray, Weigh, softmax_weights

PREFILL, DECODE, VERIFY = "prefill", "decode", "verify"
PHASES = (PREFILL, DECODE, VERIFY)
PASS_START = -1
"""The layer of an event before the first one, which needs nothing and predicts the whole pass."""
DROPPED = -1
"""In `Event.experts`: an expert that is left out."""
UNSEEN_EXPERTS: IntArray = np.empty((0, 0), dtype=np.int64)
UNSEEN_SCORES: FloatArray = np.empty((0, 0), dtype=np.float32)
"""Arrays without rows, for fields of an event that no algorithm of the policy uses."""
NO_PREDICTIONS: Mapping[int, FloatArray] = MappingProxyType({})


class Event(NamedTuple):
    """One (pass, MoE layer): the unique experts its tokens need, in order of first need.

    Immutable: a changed selection makes a new event, and the outcome is in `engine.decide.Plan`. A
    named tuple, because one is made per layer and token and a frozen dataclass costs four times as
    much.

    `experts` and `weights` are [tokens, top_k] in router order, heaviest first; `logits` are
    [tokens, experts], unmodified. They have no rows where no algorithm of the policy uses them
    (`experts` also not in passes of one token, where `keys` suffices). In the event of a changed
    selection a dropped expert is DROPPED, and if there are logits, an expert that the router did
    not choose has its softmax score as weight.
    """

    pass_index: int
    layer: int
    phase: str
    num_tokens: int
    keys: Sequence[int]
    experts: IntArray = UNSEEN_EXPERTS
    weights: FloatArray = UNSEEN_SCORES
    logits: FloatArray = UNSEEN_SCORES
    predicted: Mapping[int, FloatArray] = NO_PREDICTIONS
    """Target layer -> predicted logits [tokens, experts]: its gate's on this layer's input, or a
    trained predictor's. A target at or before this layer belongs to the next pass."""
    weigh: Weigh = softmax_weights
    """The model family's rule for the weights of chosen experts."""

    def of_token(self, token: int, pass_index: int, base: int) -> Event:
        """Return the event of one token in a decode pass of its own; a key is `base` + expert."""
        row = slice(token, token + 1)
        keys: list[int] = (self.experts[token] + base).tolist()
        return Event(
            pass_index,
            self.layer,
            DECODE,
            1,
            keys,
            self.experts[row],
            self.weights[row],
            self.logits[row],
        )

    def spelled_out(self, num_experts: int) -> Event:
        """Return the event with `experts` filled in from the keys where it has none."""
        if len(self.experts):
            return self
        experts = np.array([self.keys], dtype=np.int64) - self.layer * num_experts
        return self._replace(experts=experts)


class Fetch(NamedTuple):
    """One expert to load, at a level of the precision ladder (0 is the best)."""

    key: int
    level: int = 0


def unique_in_order(layer: int, num_experts: int, experts: IntArray) -> list[int]:
    """Return the keys of [tokens, top_k] experts, each once, in order of first need."""
    base = layer * num_experts
    return list(dict.fromkeys((experts + base).ravel().tolist()))


def num_assignments(event: Event, keys: Sequence[int], num_experts: int) -> int:
    """Count the (token, expert) pairs that these keys of an event serve."""
    if not len(event.experts):
        return len(keys)
    if len(keys) == len(event.keys):
        if event.num_tokens == 1:
            return sum([expert >= 0 for expert in event.experts.tolist()[0]])
        return int((event.experts >= 0).sum())
    experts = np.asarray(keys) - event.layer * num_experts
    return int(np.isin(event.experts, experts).sum())


def resident_mask(layer: int, num_experts: int, resident: Container[int]) -> BoolArray:
    """Return which of a layer's experts are resident [experts]."""
    base = layer * num_experts
    return np.array([key in resident for key in range(base, base + num_experts)], dtype=bool)

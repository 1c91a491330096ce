"""An event: what one pass needs of one MoE layer.

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
"""The layer of an event before the first one: nothing is needed yet, the whole pass is foreseen."""
DROPPED = -1
"""Stands in `Event.experts` for an expert that is left out."""
UNSEEN_EXPERTS: IntArray = np.empty((0, 0), dtype=np.int64)
UNSEEN_SCORES: FloatArray = np.empty((0, 0), dtype=np.float32)
"""Stand in an event, with no row at all, for what no algorithm of the policy asked to see."""
NO_PREDICTIONS: Mapping[int, FloatArray] = MappingProxyType({})


class Event(NamedTuple):
    """One (pass, MoE layer): the unique experts its tokens need, in order of first need.

    Never changed: a changed selection makes a new event, and what became of one stands in its
    `engine.decide.Plan`. A tuple, as one is made for each layer and token: a frozen dataclass costs
    four times as much to make.

    `experts` and `weights` are [tokens, top_k] in router order, heaviest first; `logits` are
    [tokens, experts], unmodified. They have no rows where no algorithm of the policy asked for them
    (`experts` also where the pass has one token: `keys` says it all). In the event of a changed
    selection a dropped expert is DROPPED, and where logits are there, an expert that the router
    did not choose has its softmax score as weight.
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
    """Target layer -> [tokens, experts] logits that it is expected to have: of its gate on this
    layer's input, or of a trained predictor. A layer at or before this one is the next pass's."""
    weigh: Weigh = softmax_weights
    """The model family's own rule for the weights of chosen experts."""

    def of_token(self, token: int, pass_index: int, base: int) -> Event:
        """Return what one token's event would be in a pass of its own; a key is `base` + expert."""
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
        """Return the event with its `experts`, also where one token's keys say it all."""
        if len(self.experts):
            return self
        experts = np.array([self.keys], dtype=np.int64) - self.layer * num_experts
        return self._replace(experts=experts)


class Fetch(NamedTuple):
    """One expert to load, at one level of the precision ladder (0 is the best)."""

    key: int
    level: int = 0


def unique_in_order(layer: int, num_experts: int, experts: IntArray) -> list[int]:
    """Return the keys of [tokens, top_k] experts, each once, in order of first need."""
    base = layer * num_experts
    return list(dict.fromkeys((experts + base).ravel().tolist()))


def num_assignments(event: Event, keys: Sequence[int], num_experts: int) -> int:
    """Count the (token, expert) pairs that these of an event's keys serve."""
    if not len(event.experts):
        return len(keys)
    if len(keys) == len(event.keys):
        if event.num_tokens == 1:
            return sum([expert >= 0 for expert in event.experts.tolist()[0]])
        return int((event.experts >= 0).sum())
    own = np.asarray(keys) - event.layer * num_experts
    return int(np.isin(event.experts, own).sum())


def token_miss_count(event: Event, num_experts: int, absent: Sequence[int]) -> int:
    """Count the event's [tokens, top_k] entries whose expert is among these absent keys."""
    experts = event.experts
    if not len(experts) or not absent:
        return len(absent)
    missing = np.zeros(num_experts, dtype=bool)
    missing[np.asarray(absent) % num_experts] = True
    return int((missing[experts] & (experts != DROPPED)).sum())


def resident_mask(layer: int, num_experts: int, resident: Container[int]) -> BoolArray:
    """Mark which of a layer's experts [experts] are resident."""
    base = layer * num_experts
    return np.array([base + expert in resident for expert in range(num_experts)], dtype=bool)

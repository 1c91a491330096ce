"""An event: what one pass needs of one MoE layer.

An expert key is the integer `layer * num_experts + expert`, so that keys sort by layer, then by
expert; "layer" counts MoE layers only. Times are seconds, sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field

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
DROPPED = -1
"""Stands in `Event.experts` for an expert that is left out."""


@dataclass(slots=True)
class Event:
    """One (pass, MoE layer): the unique experts its tokens need, in order of first need.

    `experts` and `weights` are [tokens, top_k] in router order, heaviest first; `logits` are
    [tokens, experts], unmodified. They are None where no algorithm of the policy asked for them
    (`experts` also where the pass has one token: `keys` says it all). Once a selection was changed
    they are the changed ones: a dropped expert is DROPPED, and where logits are there, an expert
    that the router did not choose has its softmax score as weight.
    """

    pass_index: int
    layer: int
    phase: str
    num_tokens: int
    keys: list[int]
    experts: IntArray | None = None
    weights: FloatArray | None = None
    logits: FloatArray | None = None
    predicted: dict[int, FloatArray] = field(default_factory=dict)
    """Target layer -> [tokens, experts] logits that it is expected to have: of its gate on this
    layer's input, or of a trained predictor. A layer at or before this one is the next pass's."""
    weigh: Weigh = softmax_weights
    """The model family's own rule for the weights of chosen experts."""
    levels: dict[int, int] | None = None
    """Key -> level at which it was executed; None where the store has one precision."""

    def of_token(self, token: int, pass_index: int, base: int) -> Event:
        """Return what one token's event would be in a pass of its own; a key is `base` + expert."""
        assert self.experts is not None, "a token's experts are unknown"
        row = slice(token, token + 1)
        keys: list[int] = (self.experts[token] + base).tolist()
        return Event(
            pass_index=pass_index,
            layer=self.layer,
            phase=DECODE,
            num_tokens=1,
            keys=keys,
            experts=self.experts[row],
            weights=None if self.weights is None else self.weights[row],
            logits=None if self.logits is None else self.logits[row],
        )


@dataclass(frozen=True, slots=True)
class Fetch:
    """One expert to bring near, at one level of the precision ladder (0 is the best)."""

    key: int
    level: int = 0


def unique_in_order(layer: int, num_experts: int, experts: IntArray) -> list[int]:
    """Return the keys of [tokens, top_k] experts, each once, in order of first need."""
    base = layer * num_experts
    return list(dict.fromkeys((experts + base).ravel().tolist()))


def num_assignments(event: Event, keys: Sequence[int], num_experts: int) -> int:
    """Count the (token, expert) pairs that these of an event's keys serve."""
    if event.experts is None:
        return len(keys)
    if len(keys) == len(event.keys):
        return int((event.experts >= 0).sum())
    own = np.asarray(keys) - event.layer * num_experts
    return int(np.isin(event.experts, own).sum())


def token_miss_count(experts: IntArray | None, num_experts: int, absent: Sequence[int]) -> int:
    """Count the [tokens, top_k] entries whose expert is among the absent keys of one layer."""
    if experts is None or not absent:
        return len(absent)
    missing = np.zeros(num_experts, dtype=bool)
    missing[np.asarray(absent) % num_experts] = True
    return int((missing[experts] & (experts != DROPPED)).sum())


def spell_out(event: Event, num_experts: int) -> IntArray:
    """Return the event's [tokens, top_k] experts, filled in where one token's keys say it all."""
    if event.experts is None:
        event.experts = np.array([event.keys], dtype=np.int64) - event.layer * num_experts
    return event.experts


def near_mask(layer: int, num_experts: int, resident: Container[int]) -> BoolArray:
    """Mark which of a layer's experts [experts] are resident."""
    base = layer * num_experts
    return np.array([base + expert in resident for expert in range(num_experts)], dtype=bool)

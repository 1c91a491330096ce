"""The prefetch axis: from one event to keys for the next ones."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from lm_eval_moecache.algorithms.likeliest import Likeliest
from lm_eval_moecache.algorithms.parameters import Algorithm, OverRows
from lm_eval_moecache.records.arrays import DoubleArray, FloatArray, IntArray, softmax
from lm_eval_moecache.records.event import DROPPED, Event


class PrefetchAlgorithm(Algorithm):
    """Proposes experts to load, most wanted first; the link decides when they arrive.

    A proposal for a layer at or before the running one is meant for the next pass. Resident keys
    and keys on their way may be proposed: they are not moved, but the eviction algorithm hears of
    them.
    """

    axis: ClassVar[str] = "prefetch"
    is_active: ClassVar[bool] = True
    """Whether it ever proposes anything."""
    predicts_pass: ClassVar[bool] = False
    """Whether it is asked once a pass, before its first layer, about all of its layers: with an
    event of layer `PASS_START`, whose `predicted` are a trained network's; at no other event."""
    needs_draft: ClassVar[bool] = False
    """Whether it prefetches while a draft model drafts: a subclass of `DraftStagePrefetch`."""
    remembers: ClassVar[bool] = True
    """Whether a proposal may depend on earlier events."""
    depth: int = 0
    """How many layers ahead `Event.predicted` must reach; each layer's gate costs time."""
    after_layer: bool = False
    """Whether the link hears of proposals only when the experts of their event are executed."""
    uses_predictor: ClassVar[bool] = False
    """Whether `Event.predicted` come from the predictor that is its artifact, not from gates."""

    @property
    def draft_stage(self) -> DraftStagePrefetch | None:
        """The rule as one that prefetches while a draft model drafts, or None."""
        return self if isinstance(self, DraftStagePrefetch) else None

    def most(self, overfetch: float) -> int:
        """Return a share `overfetch` of the router's experts as a number, at most all of them."""
        return min(self.geometry.num_experts, math.ceil(self.geometry.top_k * overfetch))

    @abstractmethod
    def propose(self, event: Event) -> Sequence[int]:
        """Return the keys to prefetch now, of one row, in order of priority, without duplicates."""


class DraftStagePrefetch(PrefetchAlgorithm):
    """Prefetches from a draft model's states while it drafts."""

    needs_draft: ClassVar[bool] = True
    by_order: ClassVar[bool] = False
    """Whether `propose_draft` looks at the order of the `num_critical` largest logits alone: traces
    keep no more, so that only then a replay can run it."""
    cutoff: int | str
    """Draft-stage prefetch covers the layers before it; `auto` until `plan` has been called."""
    num_critical: int
    """Experts prefetched per layer and drafted token, at most."""
    batched: bool
    """Whether the experts proposed together move as one batch."""
    synchronous: bool
    """Whether the draft waits, after each of its layers, for what that layer has asked for."""

    @abstractmethod
    def plan(self, cutoff: int) -> None:
        """Set the cutoff that the profile allows, in place of `auto`, before the first draft."""

    @abstractmethod
    def propose_draft(self, layer: int, logits: FloatArray) -> Sequence[int]:
        """Return a layer's keys to prefetch, from its gate's logits [1, experts] on a draft."""

    def propose(self, event: Event) -> Sequence[int]:
        return ()


class ScorePrefetch(OverRows, PrefetchAlgorithm):
    """Base of the rules that propose experts by their predicted scores alone, by a loop.

    The layers that an event predicts follow each other.
    """

    remembers: ClassVar[bool] = False
    count: int = 0
    """Experts proposed for each token of a predicted layer; 0: those above a bar."""

    @cached_property
    def loop(self) -> Likeliest:
        """The loop over tokens and experts."""
        return Likeliest(self.geometry, count=self.count)

    def give(self, own: Sequence[Any], logits: FloatArray, is_alone: bool) -> FloatArray:
        """Give the loop what decides of predictions [predictions, experts], and return that.

        They are of rows with these rules; `is_alone` if events have one token.
        """
        # A single token's order needs no probabilities.
        scores = logits if is_alone else softmax(logits)
        self.loop.give(scores=scores)
        return scores

    def propose(self, event: Event) -> Sequence[int]:
        keys: list[int] = []
        for layer, logits in event.predicted.items():
            self.give([self], logits, len(logits) == 1)
            keys += self.loop.of_event(layer, len(logits))
        return keys


def largest(layer: int, values: FloatArray | DoubleArray | IntArray, count: int) -> list[int]:
    """Return the keys of the experts with the largest `values` [experts], ties by key."""
    top = np.argsort(-values, kind="stable")[:count]
    keys: list[int] = (top + layer * len(values)).tolist()
    return keys


def activations(event: Event, num_experts: int) -> IntArray:
    """Return how many of the event's tokens each expert of its layer serves: [experts]."""
    return np.bincount(event.experts[event.experts != DROPPED], minlength=num_experts)

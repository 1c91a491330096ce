"""The prefetch axis: from one event to keys for the next ones."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from lm_eval_moecache.algorithms.parameters import Algorithm
from lm_eval_moecache.records.arrays import DoubleArray, FloatArray, IntArray, each_token, softmax
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
        """The part that prefetches while a draft model drafts, or None."""
        return None

    def most(self, overfetch: float) -> int:
        """Return a share `overfetch` of the router's experts as a number, at most all of them."""
        return min(self.geometry.num_experts, math.ceil(self.geometry.top_k * overfetch))

    @abstractmethod
    def propose(self, event: Event) -> Sequence[int]:
        """Return the keys to prefetch now, in order of priority, without duplicates."""

    def propose_arrays(
        self, layers: Sequence[int], logits: FloatArray
    ) -> tuple[IntArray, IntArray] | None:
        """Return the proposals for n one-token predictions at once, or None if unsupported.

        Returns all keys, and the number of keys of each row [n]. Row i of `logits` [n, experts]
        predicts layer `layers[i]`. Only for algorithms that read nothing else of an event: a replay
        batches many steps of one layer, a live run all layers of a step.
        """
        return None

    def propose_rows(
        self, rules: Sequence[Any], layers: Sequence[int], logits: FloatArray
    ) -> tuple[IntArray, IntArray]:
        """Return what `propose_arrays` of each of these rules, alike but for memory, proposes.

        Each predicts the same layers [n] in a run of its own; `logits` are [rules, n, experts], and
        the numbers returned are [rules x n].
        """
        if not self.remembers:
            every = [*layers] * len(logits)
            found = self.propose_arrays(every, logits.reshape(-1, logits.shape[-1]))
            assert found is not None, "asked of a rule that cannot"
            return found
        told = [each.propose_arrays(layers, own) for each, own in zip(rules, logits, strict=True)]
        keys, counts = zip(*told, strict=True)
        return np.concatenate(keys), np.concatenate(counts)


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

    @property
    def draft_stage(self) -> DraftStagePrefetch:
        return self

    @abstractmethod
    def plan(self, cutoff: int) -> None:
        """Set the cutoff that the profile allows, in place of `auto`, before the first draft."""

    @abstractmethod
    def propose_draft(self, layer: int, logits: FloatArray) -> Sequence[int]:
        """Return a layer's keys to prefetch, from its gate's logits [1, experts] on a draft."""

    def propose(self, event: Event) -> Sequence[int]:
        return ()


class LikeliestPrefetch(PrefetchAlgorithm):
    """Base of the rules that propose each token's likeliest experts by the predicted logits."""

    remembers: ClassVar[bool] = False
    count: int
    """Experts proposed for each token of a predicted layer."""

    def propose(self, event: Event) -> Sequence[int]:
        keys: list[int] = []
        for layer, logits in event.predicted.items():
            keys += most_likely(layer, logits, self.count)
        return keys

    def propose_arrays(
        self, layers: Sequence[int], logits: FloatArray
    ) -> tuple[IntArray, IntArray]:
        return best_of_rows(layers, logits, self.count)


def most_likely(layer: int, logits: FloatArray, count: int) -> list[int]:
    """Return the keys of each token's `count` likeliest experts, in the order of `by_mass`.

    `logits` are [tokens, experts].
    """
    if len(logits) == 1:
        # A single token's order needs no probabilities.
        return largest(layer, logits[0], count)
    scores = softmax(logits)
    wanted = np.zeros(scores.shape, dtype=bool)
    wanted[each_token(scores), _top(-scores, count)] = True
    return by_mass(layer, wanted, scores)


def largest(layer: int, values: FloatArray | DoubleArray | IntArray, count: int) -> list[int]:
    """Return the keys of the experts with the largest `values` [experts], ties by key."""
    top = np.argsort(-values, kind="stable")[:count]
    keys: list[int] = (top + layer * len(values)).tolist()
    return keys


def by_mass(layer: int, wanted: np.ndarray, scores: FloatArray) -> list[int]:
    """Return the keys of the experts wanted by any token, largest summed score first.

    `wanted` is boolean [tokens, experts], `scores` are [tokens, experts]; ties go to the smaller
    key.
    """
    if len(scores) == 1:
        experts = wanted[0].nonzero()[0]
        mass = scores[0][experts]
    else:
        experts = np.flatnonzero(wanted.any(axis=0))
        mass = (scores * wanted).sum(axis=0)[experts]
    keys: list[int] = (experts[(-mass).argsort(kind="stable")] + layer * scores.shape[-1]).tolist()
    return keys


def best_of_rows(
    layers: Sequence[int], logits: FloatArray, count: int
) -> tuple[IntArray, IntArray]:
    """Return `most_likely` of each single token in one array, and each token's number of keys.

    `layers` [tokens] holds each token's layer.
    """
    top = _top(-logits, count) + np.asarray(layers)[:, None] * logits.shape[-1]
    return top.ravel(), np.full(len(top), top.shape[1])


def _top(ranks: FloatArray, count: int) -> IntArray:
    """Return the indices of each row's `count` lowest ranks, lowest first, ties by index.

    Sorts 64-bit integers that hold rank and index: numpy vectorises this, which makes it several
    times as fast as an argsort.
    """
    if len(ranks) < 3:
        # Numbers too few for it to pay.
        return ranks.argsort(axis=-1, kind="stable")[:, :count]
    bits = np.add(ranks, 0, dtype=np.float32).view(np.int32)  # adding 0 turns -0 into 0
    bits ^= (bits >> 31) & np.int32(0x7FFFFFFF)
    places: IntArray = (bits.astype(np.int64) << 32) | np.arange(ranks.shape[-1])
    if 8 * count < ranks.shape[-1]:
        places.partition(count, axis=-1)
        places = places[:, :count]
    places.sort(axis=-1)
    return places[:, :count] & 0xFFFFFFFF


def activations(event: Event, num_experts: int) -> IntArray:
    """Return how many of the event's tokens each expert of its layer serves: [experts]."""
    if not len(event.experts):
        keys = np.asarray(event.keys, dtype=np.int64) - event.layer * num_experts
        return np.bincount(keys, minlength=num_experts)
    return np.bincount(event.experts[event.experts != DROPPED], minlength=num_experts)

"""The miss axis: what is executed where experts are absent, and at which level they are loaded."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

import numpy as np

from lm_eval_moecache.algorithms.parameters import Algorithm, OverRows
from lm_eval_moecache.algorithms.substitution import SubstituteCost, Substitution
from lm_eval_moecache.records.arrays import (
    BoolArray,
    FloatArray,
    IntArray,
    each_token,
    softmax,
)
from lm_eval_moecache.records.batch import Batch
from lm_eval_moecache.records.event import DROPPED, UNSEEN_SCORES, Event
from lm_eval_moecache.records.ranges import Range
from lm_eval_moecache.records.selection import Selection


class MissAlgorithm(Algorithm):
    """Decides whether each absent expert is loaded (and at which level), replaced or dropped.

    `Event.experts` are always filled, heaviest first; experts dropped by routing are DROPPED. Each
    token is decided by itself, from the residents at the start of the event: an expert may be
    loaded for one token and replaced for another. What is still executed and is absent is loaded,
    in order of need.
    """

    axis: ClassVar[str] = "miss"
    is_lossless: ClassVar[bool] = False
    """Whether every absent expert is loaded at full precision, so that results cannot change."""
    cached_first: ClassVar[bool] = False
    """Whether the resident experts of an event are executed while the absent ones are loaded."""
    uses_host: ClassVar[bool] = False
    """Whether it executes absent experts on the host; the hardware profile needs host figures."""
    host_rule: str = ""
    """How absent experts are divided between the host, which executes them, and the link, which
    loads them: `always`, `first` or `balanced` (see `miss=host`); empty if all are loaded."""
    uploads: int = 0
    """How many of an event's host-executed experts are loaded after it."""
    only_decodes: ClassVar[bool] = False
    """Whether it loads everything in prefills, whatever `phases` says."""
    uses_ladder: ClassVar[bool] = False
    """Whether it loads at lower levels of precision, which the store must have."""
    upgrade: bool = False
    """Whether residents of a lower level than `levels` says are loaded again."""
    awaits_late: bool = False
    """Whether prefetches under way are waited for, and not absent."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.uses_ladder and len(self.geometry.precision) < 2:
            raise ValueError(
                f"{self.label()} loads at lower precisions, but "
                f"precision={self.geometry.precision[0]!r} is the only one stored. Allowed with "
                "it: several, best first, as precision=int8:int4:int2."
            )

    @abstractmethod
    def choose(self, event: Event) -> Selection | None:
        """Return the experts to execute instead, or None for the event's own.

        Where `event.experts` are DROPPED they stay so. Where nothing is absent nothing changes.
        """

    def levels(self, experts: IntArray, weights: FloatArray) -> IntArray:
        """Return the level that each entry requires, from experts and weights [tokens, top_k].

        An expert is loaded once, at the best level that any token requires.
        """
        return np.zeros(experts.shape, np.int64)

    def prefetch_levels(self, event: Event, layer: int, experts: IntArray) -> IntArray:
        """Return at which level to prefetch each expert of a layer, most wanted first."""
        return np.zeros(len(experts), np.int64)


class MissOverRows(OverRows, MissAlgorithm):
    """Base of the rules that decide the tokens of many rows at once, each by its own residents."""


class LosslessMiss(MissAlgorithm):
    """Base of the rules that load every absent expert, or have the host execute it."""

    is_lossless: ClassVar[bool] = True

    def choose(self, event: Event) -> Selection | None:
        return None


class LadderMiss(MissOverRows):
    """Base of the rules that load a token's lesser experts at lower levels of precision.

    A prefetched expert gets the best level that any token would require of it by the predicted
    gate, and the lowest one where no token is expected to choose it.
    """

    uses_ladder: ClassVar[bool] = True

    @abstractmethod
    def levels(self, experts: IntArray, weights: FloatArray) -> IntArray:
        """Return the level that each entry requires, from experts and weights [tokens, top_k]."""

    def choose(self, event: Event) -> Selection | None:
        return None

    def unpredicted(self, count: int) -> Sequence[int]:
        """Return the levels of keys, most wanted first, of a layer whose gate is not predicted."""
        return [0] * count

    def prefetch_levels(self, event: Event, layer: int, experts: IntArray) -> IntArray:
        if layer not in event.predicted:
            return np.array(self.unpredicted(len(experts)), np.int64)
        logits = event.predicted[layer]
        lowest, each = len(self.geometry.precision) - 1, each_token(logits)
        chosen = np.argsort(-logits, axis=-1, kind="stable")[:, : self.geometry.top_k]
        levels, best = (
            self.levels(chosen, softmax(logits)[each, chosen]),
            np.full(logits.shape, lowest),
        )
        best[each, chosen] = np.minimum(levels, lowest)
        found: IntArray = best.min(axis=0)[experts]
        return found


Order = Literal["heaviest", "lightest"]


def weight_shares(experts: IntArray, weights: FloatArray) -> FloatArray:
    """Return each expert's share of its token's weight, [..., top_k]; 0 where dropped.

    A token's shares sum to 1, whether or not the model family renormalises its router's weights.
    """
    weights = np.where(experts != DROPPED, weights, 0)
    total = np.maximum(np.add.reduce(weights, axis=-1, keepdims=True), 1e-20)
    return np.asarray(weights / total, dtype=np.float32)


def keep_one(keep: BoolArray, shares: FloatArray) -> None:
    """Set `keep` [tokens, top_k] for the heaviest expert of each token that would have none."""
    nothing_left = ~(keep & (shares > 0)).any(axis=-1)
    keep[nothing_left, shares[nothing_left].argmax(axis=-1)] = True


def weight_before(weights: FloatArray, live: BoolArray) -> FloatArray:
    """Return the share of a token's weight on experts heavier than each, [tokens, top_k].

    This is HOBBIT's unimportance: 0 for the heaviest. Entries that are not `live` weigh nothing.
    """
    weights = np.where(live, weights, 0)
    total = np.maximum(weights.sum(axis=-1, keepdims=True), 1e-20)
    return np.asarray((weights.cumsum(axis=-1) - weights) / total, dtype=np.float32)


def unless_all(event: Event, keep: BoolArray, renormalize: bool) -> Selection | None:
    """Drop the entries that `keep` [tokens, top_k] leaves out."""
    return None if keep.all() else Selection(event.experts, keep, renormalize)


Budget = Annotated[
    int,
    Range(least=1, below="top_k", why=": give a smaller one, or leave it out to have no budget"),
]
"""How many of a token's experts may be replaced in a layer."""


class SubstitutingMiss(MissOverRows):
    """Base of the rules that have a token's absent experts replaced by its cheapest residents.

    Each in turn, heaviest first, takes the cheapest resident expert that the token does not have
    yet: BuddyMoE algorithm 1 for any order of preference. Those over the budget are loaded.
    """

    uses_scores: ClassVar[bool] = False
    """Whether `cost` looks at softmax scores."""
    uses_shares: ClassVar[bool] = False
    """Whether it looks at shares of the token's weight."""
    fallback: Literal["fetch", "drop"] = "fetch"
    """What becomes of an expert without a substitute."""
    weight: Literal["own", "missing"] = "own"
    """Whose weight a substitute has."""
    rho: int | None = None
    """How many of a token's experts may be replaced in a layer; None for all."""
    order: Order = "heaviest"
    reuse: float = 0.0
    """Factor of the cost of a substitute that the token has taken already; 0 excludes it."""
    late: Literal["replace", "await"] = "replace"

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        cls.uses_logits |= cls.uses_scores
        cls.uses_weights |= cls.uses_shares

    def __post_init__(self) -> None:
        super().__post_init__()
        self.awaits_late = self.late == "await"

    @abstractmethod
    def cost(self) -> SubstituteCost:
        """Return what a substitute costs, as a function of numbers that numba can compile."""

    def budget(self, event: Event) -> IntArray:
        """Return how many experts each token may have replaced, [tokens]: `rho` by default."""
        return np.full(len(event.experts), self.rho or event.experts.shape[1])

    @cached_property
    def loop(self) -> Substitution:
        """The loop over tokens and their absent experts."""
        loop = Substitution(self.cost(), self.geometry)
        loop.record.reuse, loop.record.forwards = self.reuse, int(self.order == "heaviest")
        loop.record.drops = int(self.fallback == "drop")
        return loop

    def give(self, given: Event | Batch, budget: IntArray, **arrays: Any) -> Substitution:
        """Give the loop tokens, what each may have replaced, and more arrays of its record."""
        scores = softmax(given.logits) if self.uses_scores else UNSEEN_SCORES
        shares = weight_shares(given.experts, given.weights) if self.uses_shares else UNSEEN_SCORES
        states = np.empty(given.experts.shape, np.int64)
        self.loop.give(experts=given.experts, logits=given.logits, scores=scores, shares=shares)
        self.loop.give(budget=budget, states=states, **arrays)
        return self.loop

    def changed(self, chosen: IntArray, experts: IntArray) -> Selection:
        """Return what the loop has chosen instead of these experts [tokens, top_k]."""
        weigh_as = experts if self.weight == "missing" else None
        keep = (chosen >= 0) | (experts < 0)
        if keep.all():
            return Selection(chosen, weigh_as=weigh_as)
        return Selection(np.where(keep, chosen, experts), keep, weigh_as=weigh_as)

    def choose(self, event: Event) -> Selection | None:
        chosen: IntArray = np.empty(event.experts.shape, np.int64)
        flags = {"resident": event.resident, "absent": event.absent}
        loop = self.give(event, self.budget(event), chosen=chosen, **flags)
        return self.changed(chosen, event.experts) if loop.run(event) else None

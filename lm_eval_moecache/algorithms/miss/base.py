"""The miss axis: from absent experts to fetches and the experts to execute."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

import numpy as np

from lm_eval_moecache.algorithms.costs import (
    NO_SCORES,
    NO_TABLE,
    SubstituteCost,
    choose_once,
    substitutes,
)
from lm_eval_moecache.algorithms.parameters import Algorithm, OverRows
from lm_eval_moecache.records.arrays import (
    BoolArray,
    DoubleArray,
    FloatArray,
    IntArray,
    each_token,
    softmax,
)
from lm_eval_moecache.records.event import DROPPED, Event, Fetch
from lm_eval_moecache.records.ranges import Range
from lm_eval_moecache.records.selection import Selection
from lm_eval_moecache.records.tokens import Tokens, tokens_of


@dataclass(frozen=True, slots=True)
class Resolution:
    """The decision about the absent experts of one event.

    `fetch` lists the loads in the order they are requested from the link; `selection` replaces the
    experts to execute, and is None to execute the event's own.
    """

    fetch: Sequence[Fetch]
    selection: Selection | None = None


class MissAlgorithm(Algorithm):
    """Decides whether each absent expert is loaded (and at which level), replaced or dropped.

    `Event.experts` are always filled, heaviest first; experts dropped by routing are DROPPED. Each
    token is decided by itself, from the residents at the start of the event: an expert may be
    loaded for one token and replaced for another.
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
    """Whether it is also called without absent experts, to upgrade residents of a lower level."""
    awaits_late: bool = False
    """Whether the engine waits for prefetches under way instead of asking about them."""

    def __post_init__(self) -> None:
        if self.uses_ladder and len(self.geometry.precision) < 2:
            raise ValueError(
                f"{self.label()} loads at lower precisions, but "
                f"precision={self.geometry.precision[0]!r} is the only one stored. Allowed with "
                "it: several, best first, as precision=int8:int4:int2."
            )

    @abstractmethod
    def resolve(
        self, event: Event, absent: Sequence[int], resident: Mapping[int, int]
    ) -> Resolution | None:
        """Return the decision about the `absent` keys (in order of need), or None to load them all.

        Every absent key is either in `fetch` or no longer in the selection. Prefetches under way
        are absent, too, unless `awaits_late`: then they are in neither `absent` nor `resident`, and
        the engine waits for those still in the selection. `resident` maps resident keys to their
        levels: fetching one at a better level loads it again. A returned selection has DROPPED
        wherever the event has it.
        """

    def prefetch_levels(self, event: Event, layer: int, keys: Sequence[int]) -> Sequence[int]:
        """Return the level at which to prefetch each of a layer's keys, most wanted first."""
        return [0] * len(keys)


NOTHING_HELD: Mapping[int, int] = MappingProxyType({})


class MissOverRows(OverRows, MissAlgorithm):
    """Base of the rules that decide the tokens of many rows at once, each by its own residents.

    What they still execute and is absent is loaded, in order of need, at the level of `levels`.
    """

    @abstractmethod
    def choose(self, tokens: Tokens) -> Selection | None:
        """Return the experts to execute instead, with DROPPED where it is, or None to load all.

        What it returns for a token depends on that token's row alone, and where nothing is absent
        it changes nothing.
        """

    def levels(self, experts: IntArray, weights: FloatArray) -> IntArray:
        """Return the level that each entry requires, from experts and weights [tokens, top_k]."""
        return np.zeros(experts.shape, np.int64)

    def predicted_levels(self, logits: FloatArray) -> IntArray:
        """Return at which level to prefetch each expert for a token, given a gate's predicted
        logits: [tokens, experts]."""
        return np.zeros(logits.shape, np.int64)

    def resolve(
        self, event: Event, absent: Sequence[int], resident: Mapping[int, int]
    ) -> Resolution | None:
        kept, num_experts = self.row_state(event.layer, event.num_tokens), self.geometry.num_experts
        selection = self.choose(tokens_of(event, resident, num_experts, kept, absent))
        if selection is None and not self.uses_ladder:
            return None
        executed = event.experts if selection is None else selection.experts
        live = executed != DROPPED
        if selection is not None and selection.keep is not None:
            live &= selection.keep
        # An expert is loaded once, at the best level that any token requires.
        never = len(self.geometry.precision)
        best = np.full(num_experts, never)
        np.minimum.at(best, executed[live], self.levels(event.experts, event.weights)[live])
        base = event.layer * num_experts
        keys, held = (event.keys, resident) if self.upgrade else (absent, NOTHING_HELD)
        wanted = zip(keys, best[np.array(keys, np.int64) - base].tolist(), strict=True)
        fetch = [Fetch(key, level) for key, level in wanted if level < held.get(key, never)]
        return Resolution(fetch, selection)


class LosslessMiss(MissAlgorithm):
    """Base of the rules that load every absent expert, or have the host execute it."""

    is_lossless: ClassVar[bool] = True

    def resolve(
        self, event: Event, absent: Sequence[int], resident: Mapping[int, int]
    ) -> Resolution | None:
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

    def choose(self, tokens: Tokens) -> Selection | None:
        return None

    def unpredicted(self, count: int) -> Sequence[int]:
        """Return the levels of keys, most wanted first, of a layer whose gate is not predicted."""
        return [0] * count

    def predicted_levels(self, logits: FloatArray) -> IntArray:
        lowest, each = len(self.geometry.precision) - 1, each_token(logits)
        experts = np.argsort(-logits, axis=-1, kind="stable")[:, : self.geometry.top_k]
        best = np.full(logits.shape, lowest)
        levels = self.levels(experts, softmax(logits)[each, experts])
        best[each, experts] = np.minimum(levels, lowest)
        return best

    def prefetch_levels(self, event: Event, layer: int, keys: Sequence[int]) -> Sequence[int]:
        if layer not in event.predicted:
            return self.unpredicted(len(keys))
        best = self.predicted_levels(event.predicted[layer]).min(axis=0).tolist()
        return [best[key % self.geometry.num_experts] for key in keys]


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


def unless_all(tokens: Tokens, keep: BoolArray, renormalize: bool) -> Selection | None:
    """Drop the entries that `keep` [tokens, top_k] leaves out."""
    return None if keep.all() else Selection(tokens.experts, keep, renormalize)


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

    def budget(self, tokens: Tokens) -> IntArray:
        """Return how many experts each token may have replaced, [tokens]: `rho` by default."""
        return np.full(len(tokens.experts), self.rho or tokens.experts.shape[1])

    def table(self, tokens: Tokens) -> tuple[DoubleArray, IntArray]:
        """Return numbers [any, experts] for `Substitute.given`, and each expert's row of them."""
        return NO_TABLE, tokens.experts

    @cached_property
    def _cost(self) -> SubstituteCost:
        return self.cost()

    def get_ready(self) -> None:
        choose_once(self)

    def choose(self, tokens: Tokens) -> Selection | None:
        chosen, sought = substitutes(
            tokens,
            self._cost,
            self.budget(tokens),
            scores=softmax(tokens.logits) if self.uses_scores else NO_SCORES,
            shares=weight_shares(tokens.experts, tokens.weights) if self.uses_shares else NO_SCORES,
            table=self.table(tokens),
            reuse=self.reuse,
            heaviest_first=self.order == "heaviest",
        )
        is_same = chosen == tokens.experts
        lost = sought & is_same
        keep = ~lost if self.fallback == "drop" and lost.any() else None
        if keep is None and is_same.all():
            return None
        weigh_as = tokens.experts if self.weight == "missing" else None
        return Selection(chosen, keep, weigh_as=weigh_as)

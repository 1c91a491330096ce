"""The routing axis: logits in, a changed selection (or none) out."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar

import numpy as np

from lm_eval_moecache.algorithms.cheapest import Cheapest, RankCost
from lm_eval_moecache.algorithms.parameters import Algorithm, OverRows
from lm_eval_moecache.records.arrays import DoubleArray, IntArray, softmax
from lm_eval_moecache.records.batch import Batch
from lm_eval_moecache.records.event import UNSEEN_SCORES, Event
from lm_eval_moecache.records.memory import address_of
from lm_eval_moecache.records.ranges import Range
from lm_eval_moecache.records.selection import Selection


class RoutingAlgorithm(Algorithm):
    """Decides which experts each token is sent to, given the residents.

    It does not set weights: those of a changed selection come from the router's unmodified logits
    by the model family's own rule. `Event.experts` are always filled.
    """

    axis: ClassVar[str] = "routing"
    is_lossless: ClassVar[bool] = False
    """Whether the selection is always the router's own, so that results cannot change."""
    depth: int = 0
    """How many layers ahead `Event.predicted` must reach."""

    @abstractmethod
    def choose(self, event: Event) -> Selection | None:
        """Return the experts [tokens, top_k] to execute, heaviest first, or None for the router's.

        What it returns for a token depends on that token's row alone.
        """


class RoutingOverRows(OverRows, RoutingAlgorithm):
    """Base of the rules that are asked about many rows at once."""

    uses_residents: ClassVar[bool] = True
    """Whether it looks at the residents: else all tokens of a text may choose at once."""


class RoutingByCost(RoutingOverRows):
    """Base of the rules that take a token's cheapest experts, by a cost of each rank.

    They stay in the order of their ranks.
    """

    uses_logits: ClassVar[bool] = True
    uses_scores: ClassVar[bool] = False
    """Whether `cost` looks at softmax scores."""

    def forget(self) -> None:
        self.seen: DoubleArray = np.zeros((self.geometry.num_layers, 3))
        """Of each layer: how many tokens, and the sums of their ranges and means (see `Seen`)."""

    @abstractmethod
    def cost(self) -> RankCost:
        """Return what an expert costs, as a function of numbers that numba can compile."""

    @cached_property
    def loop(self) -> Cheapest:
        """The loop over tokens and ranks."""
        return Cheapest(self.cost(), self.geometry)

    def give(self, given: Event | Batch, own: Sequence[Any], **arrays: Any) -> Cheapest:
        """Give the loop tokens, of rows with these rules, and more arrays of its record."""
        scores = softmax(given.logits) if self.uses_scores else UNSEEN_SCORES
        states = np.array([address_of(rule.seen) for rule in own])
        self.loop.give(experts=given.experts, logits=given.logits, scores=scores, states=states)
        self.loop.give(**arrays)
        return self.loop

    def choose(self, event: Event) -> Selection | None:
        chosen: IntArray = np.empty(event.experts.shape, np.int64)
        loop = self.give(event, event.own, resident=event.resident, chosen=chosen)
        return Selection(chosen) if loop.run(event) else None


AlwaysKept = Annotated[
    int, Range(least=0, below="top_k", why=": keeping all of them leaves nothing to change")
]
"""A number of experts that a token keeps whatever is cached."""
FewerExperts = Annotated[
    int, Range(least=1, below="top_k", why=": keeping all of them is routing=standard")
]
"""A number of experts that a token is left with."""


def fewer_experts(given: int | None, top_k: int) -> int:
    """Return the number of `FewerExperts`, by default one less than the router chooses."""
    if top_k == 1:
        raise ValueError("the router selects one expert per token: there is none to leave out.")
    return top_k - 1 if given is None else given

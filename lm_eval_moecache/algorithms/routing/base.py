"""The routing axis: logits in, a changed selection (or none) out."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection
from functools import cached_property
from typing import Annotated, ClassVar

from lm_eval_moecache.algorithms.costs import NO_SCORES, RankCost, cheapest, choose_once
from lm_eval_moecache.algorithms.parameters import Algorithm, OverRows
from lm_eval_moecache.records.arrays import FloatArray, softmax
from lm_eval_moecache.records.event import Event
from lm_eval_moecache.records.ranges import Range
from lm_eval_moecache.records.selection import Selection
from lm_eval_moecache.records.tokens import Tokens, tokens_of


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
    def select(self, event: Event, resident: Collection[int]) -> Selection | None:
        """Return the experts [tokens, top_k] to execute, heaviest first, or None for the router's.

        `event.logits` are [tokens, experts] and must not be changed. `resident` holds keys.
        """


class RoutingOverRows(OverRows, RoutingAlgorithm):
    """Base of the rules that decide the tokens of many rows at once, each by its own residents."""

    uses_residents: ClassVar[bool] = True
    """Whether it looks at the residents: else all tokens of a text may choose at once."""

    @abstractmethod
    def choose(self, tokens: Tokens) -> Selection | None:
        """Return the experts [tokens, top_k] to execute, heaviest first, or None for the router's.

        What it returns for a token depends on that token's row alone.
        """

    def select(self, event: Event, resident: Collection[int]) -> Selection | None:
        kept = self.row_state(event.layer, event.num_tokens)
        return self.choose(tokens_of(event, resident, self.geometry.num_experts, kept))


class RoutingByCost(RoutingOverRows):
    """Base of the rules that take a token's cheapest experts, by a cost of each rank.

    They stay in the order of their ranks.
    """

    uses_logits: ClassVar[bool] = True
    uses_scores: ClassVar[bool] = False
    """Whether `cost` looks at softmax scores."""
    state_size: ClassVar[int] = 3

    @abstractmethod
    def cost(self) -> RankCost:
        """Return what an expert costs, as a function of numbers that numba can compile."""

    @cached_property
    def stated_cost(self) -> RankCost:
        """What `cost` returned the first time."""
        return self.cost()

    def scores(self, logits: FloatArray) -> FloatArray:
        """Return softmax scores, where the cost looks at them."""
        return softmax(logits) if self.uses_scores else NO_SCORES

    def get_ready(self) -> None:
        choose_once(self)

    @classmethod
    def is_plain(cls) -> bool:
        """Whether `cost` is all that it decides by: then machine code may do the rest."""
        return cls.choose is RoutingByCost.choose and cls.on_pass is RoutingAlgorithm.on_pass

    def choose(self, tokens: Tokens) -> Selection | None:
        chosen = cheapest(tokens, self.stated_cost, self.scores(tokens.logits))
        return None if chosen is None else Selection(chosen)


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

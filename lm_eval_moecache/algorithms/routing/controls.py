"""The router's own choice, and what measures how much an expert's rank matters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from lm_eval_moecache.algorithms.routing.base import RoutingAlgorithm, RoutingOverRows
from lm_eval_moecache.records.event import Event
from lm_eval_moecache.records.ranges import Rank
from lm_eval_moecache.records.selection import Selection


class Standard(RoutingAlgorithm):
    """Uses the router's selection and weights unchanged."""

    name: ClassVar[str] = "standard"
    source: ClassVar[str] = "SpecMD section 3.1.1"
    is_lossless: ClassVar[bool] = True

    def choose(self, event: Event) -> Selection | None:
        return None


@dataclass(eq=False, kw_only=True)
class DropRank(RoutingOverRows):
    """Drops each token's expert of the given rank and all lighter ones, or that one only.

    Mixture of Cache-Conditional Experts section 2.3, Figure 2 left: "completely removing experts
    ranked at or above a specified index" (`scope=from`). `scope=only` is the counterpart of
    `swap_rank` at one rank. Weights are renormalised only with `renormalize`.
    Cost: O(1) per token.

    Parameters: rank, from 1, the heaviest, to top_k (default 2, from which on all four models of
    the figure suffer).
    """

    name: ClassVar[str] = "drop_rank"
    source: ClassVar[str] = "Cache-conditional experts section 2.3, Figure 2 (left)"

    rank: Rank = 2
    scope: Literal["from", "only"] = "from"
    renormalize: bool = False

    def choose(self, event: Event) -> Selection | None:
        keep = np.ones(event.experts.shape, dtype=bool)
        keep[:, self.rank - 1 : self.rank if self.scope == "only" else None] = False
        return Selection(event.experts, keep, self.renormalize)


@dataclass(eq=False, kw_only=True)
class SwapRank(RoutingOverRows):
    """Replaces each token's expert of one rank by a random expert that the token did not select.

    Mixture of Cache-Conditional Experts section 2.3, Figure 2 right. The substitute is drawn
    uniformly and, as in equation 1, has its own weight from the unmodified logits, not that of
    the expert it replaces. Draws depend only on the seed, the pass and the layer.
    Cost: O(E) per token.

    Parameters: rank, from 1, the heaviest, to top_k (default 1).
    """

    name: ClassVar[str] = "swap_rank"
    source: ClassVar[str] = "Cache-conditional experts section 2.3, Figure 2 (right)"
    draws: ClassVar[bool] = True

    rank: Rank = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.geometry.top_k == self.geometry.num_experts:
            raise ValueError("the router selects every expert: there is none to swap in.")

    def choose(self, event: Event) -> Selection | None:
        draws = self.drawn(event, event.rows)
        np.put_along_axis(draws, event.experts, -1.0, axis=-1)
        experts = event.experts.copy()
        experts[:, self.rank - 1] = draws.argmax(axis=-1)
        return Selection(experts)

"""Evictions that rank residents: one function of an expert's features, lowest first."""

from __future__ import annotations

from inspect import unwrap
from typing import Any, ClassVar, Literal

from lm_eval_moecache.algorithms.eviction.base import EvictionAlgorithm
from lm_eval_moecache.algorithms.features import Rank


class RankedEviction(EvictionAlgorithm):
    """An eviction that ranks residents by their features.

    A subclass sets `rank`, a plain function in the subset of Python that numba compiles (see
    `features.Rank`), or returns another one depending on its parameters. The engine has the
    features in its tables and asks for nothing else.
    Cost: O(layers + residents of a layer) per victim.
    """

    rank: Any
    """A `Rank`, which says who leaves: the lowest."""
    recency: ClassVar[Literal["", "use", "loading"]] = ""
    """Whether the rank is the order of use or that of loading, in which residents are kept: their
    first one leaves, at once."""
    ages: ClassVar[bool] = False
    """Whether the order within a layer changes with every event, used or not."""
    moves: ClassVar[bool] = True
    """Whether a rank can change with the layer being served."""
    only_best: ClassVar[bool] = False
    by_token: ClassVar[bool] = False
    forecasts: ClassVar[bool] = False
    growth = parameter = keep = 0.0
    """See `features.Now`."""

    @property
    def plain_rank(self) -> Rank:
        """The rank function itself, without wrappers around the algorithm's methods."""
        found: Rank = unwrap(self.rank)
        return found

"""Skipping by mass: keeps the heaviest experts up to a share of the weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from lm_eval_moecache.algorithms.routing.base import RoutingOverRows
from lm_eval_moecache.records.ranges import Range
from lm_eval_moecache.records.selection import Selection
from lm_eval_moecache.records.tokens import Tokens

Mass = Annotated[float, Range(above=0, below=1, why=", which keeps all")]


@dataclass(eq=False, kw_only=True)
class SkipMass(RoutingOverRows):
    """Keeps a token's heaviest experts until their share of its weight reaches p, cached or not.

    colibri#704 (`TOPP`; the same in #676 and the first engine): sorted by weight, the expert that
    crosses p is the last one kept, and "the dropped weight simply does not contribute".
    Cost: O(k log k) per token.

    Parameters: p, share of a token's weight, above 0 and below 1 (0.9; the source has it off by
    default); renormalize, share the skipped weight among the kept ones (false).
    """

    source: ClassVar[str] = "colibri#704, #676 (TOPP)"
    uses_weights: ClassVar[bool] = True

    p: Mass = 0.9
    renormalize: bool = False

    def choose(self, tokens: Tokens) -> Selection | None:
        order = np.argsort(-tokens.weights, axis=-1, kind="stable")
        sorted_weights = np.take_along_axis(tokens.weights, order, axis=-1).astype(np.float64)
        before = sorted_weights.cumsum(axis=-1) - sorted_weights
        keep = np.empty(order.shape, dtype=bool)
        total = sorted_weights.sum(axis=-1, keepdims=True)
        np.put_along_axis(keep, order, before < self.p * total, axis=-1)
        return None if keep.all() else Selection(tokens.experts, keep, self.renormalize)

"""Cached substitution: a light absent expert is replaced by the resident one with the best gate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from lm_eval_moecache.algorithms.miss.base import MissOverRows, substituted, weight_shares
from lm_eval_moecache.records.arrays import FloatArray, IntArray, softmax
from lm_eval_moecache.records.ranges import Share
from lm_eval_moecache.records.selection import Selection
from lm_eval_moecache.records.tokens import Tokens


@dataclass(eq=False, kw_only=True)
class SubstituteCached(MissOverRows):
    """Replaces an absent expert with a share below tau by the resident one with the highest gate.

    colibri#865; heavier absent experts are loaded. Residents that the token already has are not
    candidates. The source does not say which weight applies: `weight=own` is the substitute's gate
    score, `missing` the replaced expert's. Cost: O(E) per absent expert of a token.

    Parameters: tau, share of the token's weight, above 0 and at most 1 (0.1); weight.
    """

    source: ClassVar[str] = "colibri#865 (cached substitution)"
    uses_logits: ClassVar[bool] = True

    tau: Share = 0.1
    weight: Literal["own", "missing"] = "own"

    def choose(self, tokens: Tokens) -> Selection | None:
        scores, shares = softmax(tokens.logits), weight_shares(tokens)

        def cost(places: IntArray, missing: IntArray) -> FloatArray:
            is_it = tokens.experts[places] == missing[:, None]
            light = (np.where(is_it, shares[places], 0).sum(axis=-1) < self.tau)[:, None]
            return np.asarray(np.where(light, -scores[places], np.inf), dtype=np.float32)

        return substituted(tokens, cost, fallback="fetch", weight=self.weight)

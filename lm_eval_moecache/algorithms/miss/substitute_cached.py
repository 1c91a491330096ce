"""Cached substitution: a light absent expert is replaced by the resident one with the best gate."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from lm_eval_moecache.algorithms.miss.base import (
    MissAlgorithm,
    Resolution,
    resolve_substitution,
    weight_shares,
)
from lm_eval_moecache.records.arrays import FloatArray, IntArray, softmax
from lm_eval_moecache.records.event import Event
from lm_eval_moecache.records.ranges import Share


@dataclass(eq=False, kw_only=True)
class SubstituteCached(MissAlgorithm):
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

    def resolve(
        self, event: Event, absent: Sequence[int], resident: Container[int]
    ) -> Resolution | None:
        scores, shares = softmax(event.logits), weight_shares(event)

        def cost(tokens: IntArray, missing: IntArray) -> FloatArray:
            is_it = event.experts[tokens] == missing[:, None]
            light = (np.where(is_it, shares[tokens], 0).sum(axis=-1) < self.tau)[:, None]
            return np.asarray(np.where(light, -scores[tokens], np.inf), dtype=np.float32)

        return resolve_substitution(
            event, absent, resident, self.geometry, cost, fallback="fetch", weight=self.weight
        )

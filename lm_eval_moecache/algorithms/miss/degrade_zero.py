"""Degrade to zero: while decoding, light absent experts are dropped."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import ClassVar

from lm_eval_moecache.algorithms.miss.base import (
    MissAlgorithm,
    Resolution,
    absent_entries,
    keep_one,
    left_out,
    weight_shares,
)
from lm_eval_moecache.records.event import PREFILL, Event
from lm_eval_moecache.records.ranges import Share


@dataclass(eq=False, kw_only=True)
class DegradeZero(MissAlgorithm):
    """While decoding, drops absent experts whose share of the token's weight is below tau.

    colibri#906: each token keeps at least one expert, the heaviest if all would go, and the kept
    ones are renormalised. Prefills load everything. Cost: O(k) per token.

    Parameters: tau, share of the token's weight, above 0 and at most 1 (0.1: the source leaves it
    to the user).
    """

    source: ClassVar[str] = "colibri#906 (degrade to zero)"
    uses_weights: ClassVar[bool] = True
    only_decodes: ClassVar[bool] = True

    tau: Share = 0.1

    def resolve(
        self, event: Event, absent: Sequence[int], resident: Container[int]
    ) -> Resolution | None:
        if event.phase == PREFILL:
            return None
        shares = weight_shares(event)
        keep = ~(absent_entries(event, resident, self.geometry) & (shares < self.tau))
        keep_one(keep, shares)
        return left_out(event, absent, keep, self.geometry, renormalize=True)

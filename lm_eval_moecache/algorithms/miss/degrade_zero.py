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
    still_needed,
    weight_shares,
)
from lm_eval_moecache.records.event import PREFILL, Event, resident_mask
from lm_eval_moecache.records.ranges import Share
from lm_eval_moecache.records.selection import Selection


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

    tau: Share = 0.1

    def resolve(
        self, event: Event, absent: Sequence[int], resident: Container[int]
    ) -> Resolution | None:
        if event.phase == PREFILL:
            return None
        is_resident = resident_mask(event.layer, self.geometry.num_experts, resident)
        shares = weight_shares(event)
        keep = ~(absent_entries(event.experts, is_resident) & (shares < self.tau))
        keep_one(keep, shares)
        if keep.all():
            return None
        fetch = still_needed(event, absent, event.experts, keep, self.geometry.num_experts)
        return Resolution(fetch, Selection(event.experts, keep, renormalize=True))

"""Degrade to zero: while decoding, light absent experts are dropped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lm_eval_moecache.algorithms.miss.base import MissOverRows, keep_one, unless_all, weight_shares
from lm_eval_moecache.records.event import PREFILL
from lm_eval_moecache.records.ranges import Share
from lm_eval_moecache.records.selection import Selection
from lm_eval_moecache.records.tokens import Tokens


@dataclass(eq=False, kw_only=True)
class DegradeZero(MissOverRows):
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

    def choose(self, tokens: Tokens) -> Selection | None:
        if tokens.phase == PREFILL:
            return None
        shares = weight_shares(tokens)
        keep = ~(tokens.is_missing & (shares < self.tau))
        keep_one(keep, shares)
        return unless_all(tokens, keep, renormalize=True)

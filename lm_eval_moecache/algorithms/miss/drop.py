"""Drop: light absent experts are dropped, heavy ones are loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from lm_eval_moecache.algorithms.miss.base import MissOverRows, unless_all
from lm_eval_moecache.records.ranges import Range
from lm_eval_moecache.records.selection import Selection
from lm_eval_moecache.records.tokens import Tokens

FewerExperts = Annotated[
    int, Range(least=0, below="top_k", why=": with none to drop it is miss=fetch")
]


@dataclass(eq=False, kw_only=True)
class Drop(MissOverRows):
    """Fetches a token's absent expert if it is among the h heaviest, and drops it otherwise.

    SpecMD section 3.1.2: models are "resilient beyond rank 2", so it drops "only low-rank experts
    and always fetch[es] high-rank ones" after Skliar et al.: their pruning of ranks >= h, limited
    to absent experts (ranks from 0, so h are safe). A dropped expert's weight is lost, as
    renormalising is not mentioned; `renormalize` shares it among the kept ones.
    Cost: O(1) per token and expert.

    Parameters: h, experts that are never dropped, 0 to top_k - 1 (2).
    """

    source: ClassVar[str] = "SpecMD section 3.1.2 (drop)"

    h: FewerExperts = 2
    renormalize: bool = False

    def choose(self, tokens: Tokens) -> Selection | None:
        light = np.arange(self.geometry.top_k) >= self.h
        return unless_all(tokens, ~(tokens.is_missing & light), self.renormalize)

"""LRU by the last token that needed an expert: prompt-tail promotion."""

from __future__ import annotations

from typing import ClassVar

from lm_eval_moecache.algorithms.features import Expert, Layer, Now
from lm_eval_moecache.algorithms.ranked import RankedEviction


class TailLRU(RankedEviction):
    """Evicts the least recently used expert, where recency is that of the last token to need it.

    BigMoeOnEdge#22: every use by a prompt's token promotes, while `lru` counts only the first, so
    that the experts of the prompt's last tokens are the most recent when decoding begins. In events
    of one token it is `lru`.
    Cost: O(layers + residents of a layer) per victim, O(tokens x k) per event.
    """

    source: ClassVar[str] = "BigMoeOnEdge#22 (keep the prompt tail's experts hot)"
    moves: ClassVar[bool] = False
    by_token: ClassVar[bool] = True

    @staticmethod
    def rank(expert: Expert, home: Layer, now: Now) -> tuple[float, float]:
        return float(expert.last_use), 0.0

"""First in, first out."""

from __future__ import annotations

from typing import ClassVar

from lm_eval_moecache.algorithms.features import Expert, Layer, Now
from lm_eval_moecache.algorithms.ranked import RankedEviction


class FIFO(RankedEviction):
    """Evicts the expert that has been resident longest, used or not.

    A prefetched expert counts from its arrival.
    Cost: O(layers + residents of a layer) per victim, O(1) per use.
    """

    source: ClassVar[str] = "the textbook baseline; SpecMD section 4.2 uses its order in a queue"
    moves: ClassVar[bool] = False

    @staticmethod
    def rank(expert: Expert, home: Layer, now: Now) -> tuple[float, float]:
        return float(expert.loaded), 0.0

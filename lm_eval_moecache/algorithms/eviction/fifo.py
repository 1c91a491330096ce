"""First in, first out."""

from __future__ import annotations

from typing import ClassVar

from lm_eval_moecache.algorithms.features import LOADED, Features
from lm_eval_moecache.algorithms.ranked import RankedEviction


def oldest_load(f: Features, key: int, home: int, layer: int) -> tuple[float, float]:
    return float(f.keys[key, LOADED]), 0.0


class FIFO(RankedEviction):
    """Evicts the expert that has been resident longest, used or not.

    A prefetched expert counts from the moment it lands. Cost: O(1) per call, beside the pinned
    keys it steps over.
    """

    source: ClassVar[str] = "the textbook baseline; SpecMD section 4.2 uses its order in a queue"
    rank = staticmethod(oldest_load)

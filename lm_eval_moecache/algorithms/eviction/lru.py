"""Least recently used."""

from __future__ import annotations

from typing import ClassVar

from lm_eval_moecache.algorithms.features import Expert, Layer, Now
from lm_eval_moecache.algorithms.ranked import RankedEviction


class LRU(RankedEviction):
    """Evicts the expert whose last use lies furthest back.

    The experts of one event are equally recent; the one needed first, in a decode step the one with
    the heaviest routing weight, leaves first. A prefetched expert counts as used on arrival;
    predicting a resident expert is not a use: SP-MoE section 4.4, where an expert found in the
    cache is put last again, is read as happening on its use.
    Cost: O(layers + residents of a layer) per victim, O(1) per use.
    """

    source: ClassVar[str] = "Eliseev & Mazur 2023 (Mixtral offloading); SpecMD appendix B"
    moves: ClassVar[bool] = False

    @staticmethod
    def rank(expert: Expert, home: Layer, now: Now) -> tuple[float, float]:
        return float(expert.last_use), 0.0

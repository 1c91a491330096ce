"""Shallow-first: shallow layers are kept, deep ones leave."""

from __future__ import annotations

from typing import ClassVar

from lm_eval_moecache.algorithms.features import Expert, Layer, Now
from lm_eval_moecache.algorithms.ranked import RankedEviction


class ShallowFirst(RankedEviction):
    """Favours shallow layers: evicts an expert of the deepest layer that has residents.

    Fate (Fang et al. 2025), which according to BuddyMoE section 6 "uses cross-layer gate signals
    to prefetch next-layer experts and a shallow-favoring cache". The degree is not specified: read
    as strict; within a layer the longest unused expert leaves first.
    Cost: O(layers + residents of a layer) per victim, O(1) per use.
    """

    source: ClassVar[str] = "Fang et al. 2025 (Fate), as in BuddyMoE section 6"
    compares_layers: ClassVar[bool] = True
    moves: ClassVar[bool] = False

    @staticmethod
    def rank(expert: Expert, home: Layer, now: Now) -> tuple[float, float]:
        return float(-home.index), float(expert.last_use)

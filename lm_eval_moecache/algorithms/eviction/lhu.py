"""Least high-precision used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from lm_eval_moecache.algorithms.features import Expert, Layer, Now
from lm_eval_moecache.algorithms.ranked import RankedEviction


class LHU(RankedEviction):
    """Evicts the expert used least often at high precision.

    SpecMD appendix B after HOBBIT: it "tracks high-precision expert usage frequency", as misses of
    such experts "incur significantly higher latency", and "must be combined with fetch cascade
    precision policies". A use is an event that executes the expert at the best level, however many
    tokens it serves; the count survives eviction, and uses at lower levels do not count. Ties go
    to the smaller key.
    Cost: O(layers + residents of a layer) per victim, O(1) per use.
    """

    source: ClassVar[str] = "SpecMD appendix B (LHU); HOBBIT (Tang et al. 2024)"
    pairs_with: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "miss": ("fetch_lowest", "fetch_priority", "drop_cascade", "cascade")
    }
    pairs_because: ClassVar[str] = (
        "it counts uses at high precision only, and this loads nothing at a lower one"
    )
    moves: ClassVar[bool] = False
    only_best: ClassVar[bool] = True

    @staticmethod
    def rank(expert: Expert, home: Layer, now: Now) -> tuple[float, float]:
        return float(expert.uses), 0.0

"""An eviction that ranks residents: one function of an expert's features, lowest first."""

from __future__ import annotations

from typing import ClassVar

from lm_eval_moecache import Expert, Layer, Now, RankedEviction


class AgedLFU(RankedEviction):
    """Evicts the expert with the fewest uses per turn since its last one; ties to the oldest.

    LFU never forgets; dividing by the age lets an expert that was popular long ago leave.
    """

    source: ClassVar[str] = "the worked example of a package of one's own"
    ages: ClassVar[bool] = True

    @staticmethod
    def rank(expert: Expert, home: Layer, now: Now) -> tuple[float, float]:
        # Plain arithmetic on the features, so that numba can compile it.
        return expert.uses / (1.0 + now.turns - expert.turn), float(expert.last_use)

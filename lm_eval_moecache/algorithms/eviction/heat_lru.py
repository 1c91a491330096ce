"""LRU that protects frequently used experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lm_eval_moecache.algorithms.features import Expert, Layer, Now
from lm_eval_moecache.algorithms.ranked import RankedEviction
from lm_eval_moecache.records.ranges import Count


@dataclass(eq=False, kw_only=True)
class HeatLRU(RankedEviction):
    """Evicts the least recently used of the experts used at most `protect_above` times.

    Uses count while the expert is resident and restart when it is loaded again, as in the source;
    the use that caused the load does not count. If every resident is hotter, plain LRU decides.
    Cost: O(layers + residents of a layer) per victim, O(1) per use.

    Parameters: protect_above, the most uses of an unprotected expert (4).
    """

    source: ClassVar[str] = "TheTom/llama-cpp-turboquant#300 (heat-protected eviction)"
    moves: ClassVar[bool] = False

    protect_above: Count = 4

    @staticmethod
    def rank(expert: Expert, home: Layer, now: Now) -> tuple[float, float]:
        return (1.0 if expert.hits > now.parameter else 0.0), float(expert.last_use)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.parameter = float(self.protect_above)

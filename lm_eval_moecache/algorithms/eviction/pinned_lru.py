"""Half pinned, half LRU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lm_eval_moecache.algorithms.features import Expert, Layer, Now
from lm_eval_moecache.algorithms.ranked import RankedEviction
from lm_eval_moecache.records.ranges import ProperShare


@dataclass(eq=False, kw_only=True)
class PinnedLRU(RankedEviction):
    """Keeps a share of the experts that first filled the cache, and the most recently used others.

    With `warm=` the kept experts are the hottest of the profile, as in engines that pin hot experts
    and cache the others. Without it they are the last of those that first filled the cache. Kept
    experts leave only where all other residents are pinned by the running event.
    Cost: O(layers + residents of a layer) per victim, O(1) per use.

    Parameters: share of the cache that is kept, above 0 and below 1 (0.5).
    """

    source: ClassVar[str] = "engines' half-pinned caches (thecodacus/llama.cpp#5, imp#2061)"
    moves: ClassVar[bool] = False

    share: ProperShare = 0.5

    @staticmethod
    def rank(expert: Expert, home: Layer, now: Now) -> tuple[float, float]:
        # The last founders to arrive are kept, because `warm` loads the hottest last.
        if expert.founder > max(0, now.founders - int(home.slots * now.parameter)):
            return 1.0, float(expert.founder)
        return 0.0, float(expert.last_use)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.parameter = self.share

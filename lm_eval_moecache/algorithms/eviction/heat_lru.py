"""LRU that protects what was used often."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from typing import ClassVar

from lm_eval_moecache.algorithms.eviction.base import EvictionAlgorithm
from lm_eval_moecache.records.event import Event
from lm_eval_moecache.records.geometry import Geometry


class HeatLRU(EvictionAlgorithm):
    """Evicts the least recently used of the experts used at most `protect_above` times.

    Where every resident is hotter, plain LRU decides. Uses are events that need the expert; they
    are counted over the whole run, as the source keeps its table when an expert leaves.
    Cost: O(residents) per victim, O(1) per use.

    Parameters: protect_above, uses that an expert may have and still leave first (4).
    """

    source: ClassVar[str] = "TheTom/llama.cpp#300 (heat-protected LRU)"

    def __init__(self, geometry: Geometry, *, seed: int = 0, protect_above: int = 4) -> None:
        super().__init__(geometry, seed=seed)
        if protect_above < 1:
            raise ValueError(f"eviction.protect_above={protect_above} must be 1 or more.")
        self._protect_above = protect_above
        self._uses: Counter[int] = Counter()
        self._order: dict[int, None] = {}
        """Least recently used first."""

    def on_insert(self, key: int, prefetched: bool) -> None:
        self._order[key] = None

    def on_event(self, event: Event) -> None:
        for key in event.keys:
            self._uses[key] += 1
            if key in self._order:
                del self._order[key]
                self._order[key] = None

    def on_evict(self, key: int) -> None:
        del self._order[key]

    def victim(self, pinned: Container[int], layer: int) -> int | None:
        free = [key for key in self._order if key not in pinned]
        cool = (key for key in free if self._uses[key] <= self._protect_above)
        return next(cool, free[0] if free else None)

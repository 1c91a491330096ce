"""LRU that protects frequently used experts."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import ClassVar

from lm_eval_moecache.algorithms.eviction.base import RecencyRule
from lm_eval_moecache.records.event import Event
from lm_eval_moecache.records.ranges import Count


@dataclass(eq=False, kw_only=True)
class HeatLRU(RecencyRule):
    """Evicts the least recently used of the experts used at most `protect_above` times.

    Uses count while the expert is resident and restart when it is loaded again, as in the source;
    the use that caused the load does not count. If every resident is hotter, plain LRU decides.
    Cost: O(residents) per victim, O(1) per use.

    Parameters: protect_above, the most uses of an unprotected expert (4).
    """

    source: ClassVar[str] = "TheTom/llama-cpp-turboquant#300 (heat-protected eviction)"

    protect_above: Count = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        self._uses: dict[int, int] = {}
        self._loading: set[int] = set()

    def on_pass(self, pass_index: int) -> None:
        self._loading.clear()

    def on_insert(self, key: int, prefetched: bool) -> None:
        super().on_insert(key, prefetched)
        self._uses[key] = 0
        if not prefetched:
            self._loading.add(key)

    def on_event(self, event: Event) -> None:
        super().on_event(event)
        for key in event.keys:
            if key in self._uses and key not in self._loading:
                self._uses[key] += 1
        self._loading.difference_update(event.keys)

    def on_evict(self, key: int) -> None:
        super().on_evict(key)
        del self._uses[key]

    def victim(self, pinned: Container[int], layer: int) -> int | None:
        free = [key for key in self.order if key not in pinned]
        cool = (key for key in free if self._uses[key] <= self.protect_above)
        return next(cool, free[0] if free else None)

"""S3-FIFO: three queues, none of which is reordered by hits."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import ClassVar

from lm_eval_moecache.algorithms.eviction.base import GhostQueue, HitRule
from lm_eval_moecache.records.ranges import Count, ProperShare


@dataclass(eq=False, kw_only=True)
class S3FIFO(HitRule):
    """Evicts one-hit experts from a small FIFO early; the others live in a main FIFO with CLOCK.

    Yang et al., SOSP 2023. A new expert enters `small` (a tenth of the cache); at its end it moves
    to `main` if it was hit `threshold` times, else it leaves and enters a ghost queue with the
    length of nine tenths of the cache. An expert loaded while in the ghost queue enters `main`
    directly, where an expert that was hit goes round again with its count (at most 3) reduced. As
    in libCacheSim, the count restarts in `main`, and until the cache has first been full an expert
    that finds `small` full enters `main`. Pinned experts are skipped and keep place and count.
    Cost: O(residents) per victim, else O(1).

    Parameters: small_share (0.1) and ghost_share (0.9) of the cache; threshold, hits (2).
    """

    name: ClassVar[str] = "s3_fifo"
    source: ClassVar[str] = "Yang et al., SOSP 2023; as libCacheSim's S3FIFO"

    small_share: ProperShare = 0.1
    ghost_share: ProperShare = 0.9
    threshold: Count = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        self._small: dict[int, int] = {}
        self._main: dict[int, int] = {}
        """Key -> hits, the oldest first, in both."""
        self._ghost = GhostQueue()
        self._was_full = False
        self._next: tuple[int | None, dict[int, int], dict[int, int]] = (None, {}, {})
        """The last answer of `victim`, and both queues when it leaves."""

    def _small_size(self) -> int:
        return int(self.num_slots * self.small_share)

    def on_miss(self, key: int) -> None:
        self._ghost.recall(key)

    def admit(self, key: int) -> None:
        came_back = self._ghost.admit(key)
        crowded = not self._was_full and len(self._small) >= self._small_size()
        (self._main if came_back or crowded else self._small)[key] = 0

    def hit(self, key: int) -> None:
        for queue in (self._small, self._main):
            if key in queue:
                queue[key] += 1

    def forget(self, key: int) -> None:
        chosen, small, main = self._next
        if key == chosen:
            self._small, self._main = small, main
            self._was_full = True
        self._next = (None, {}, {})
        if key in self._main:
            del self._main[key]
            return
        del self._small[key]
        self._ghost.add(key, int(self.num_slots * self.ghost_share))

    def victim(self, pinned: Container[int], layer: int) -> int | None:
        small, main = dict(self._small), dict(self._main)
        found = self._search(small, main, pinned)
        self._next = (found, small, main)
        return found

    def _search(
        self, small: dict[int, int], main: dict[int, int], pinned: Container[int]
    ) -> int | None:
        """Return the victim; moves the keys that the search passes."""
        main_size = self.num_slots - self._small_size()
        if len(main) <= main_size:
            for key in [key for key in small if key not in pinned]:
                if small[key] < self.threshold:
                    return key
                del small[key]
                main[key] = 0
        while any(key not in pinned for key in main):
            for key in [key for key in main if key not in pinned]:
                if not main[key]:
                    return key
                main[key] = min(main.pop(key), 3) - 1
        return next((key for key in small if key not in pinned), None)

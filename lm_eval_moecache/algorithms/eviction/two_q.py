"""2Q: a short FIFO for new experts, LRU for those that return."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import ClassVar

from lm_eval_moecache.algorithms.eviction.base import GhostQueue, HitRule
from lm_eval_moecache.records.ranges import ProperShare


@dataclass(eq=False, kw_only=True)
class TwoQ(HitRule):
    """Evicts from a FIFO of first-time experts while that is above its share, else by LRU.

    Johnson and Shasha, VLDB 1994 (2Q full version). A new expert enters `A1in`, a FIFO that hits do
    not reorder; keys evicted from it enter the ghost list `A1out`, and the LRU list `Am` when
    loaded again. Pinned experts are skipped; if one list has no candidate, the other provides the
    victim. Cost: O(1) per call, not counting pinned keys.

    Parameters: in_share (0.25) and out_share (0.5), sizes of A1in and A1out as shares of the cache.
    """

    source: ClassVar[str] = "Johnson and Shasha, VLDB 1994; as libCacheSim's TwoQ"

    in_share: ProperShare = 0.25
    out_share: ProperShare = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        self._in: dict[int, None] = {}
        self._out = GhostQueue()
        self._main: dict[int, None] = {}

    def on_miss(self, key: int) -> None:
        self._out.recall(key)

    def admit(self, key: int) -> None:
        (self._main if self._out.admit(key) else self._in)[key] = None

    def hit(self, key: int) -> None:
        if key in self._main:
            del self._main[key]
            self._main[key] = None

    def forget(self, key: int) -> None:
        if key in self._main:
            del self._main[key]
            return
        del self._in[key]
        self._out.add(key, int(self.num_slots * self.out_share))

    def victim(self, pinned: Container[int], layer: int) -> int | None:
        from_new = len(self._in) > int(self.num_slots * self.in_share) or not self._main
        first, second = (self._in, self._main) if from_new else (self._main, self._in)
        return next((key for keys in (first, second) for key in keys if key not in pinned), None)

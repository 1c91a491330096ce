"""ARC: recency and frequency, balanced by the hits in two ghost lists."""

from __future__ import annotations

from collections.abc import Container
from typing import ClassVar

from lm_eval_moecache.algorithms.eviction.base import HitRule


class ARC(HitRule):
    """Evicts from a list of experts seen once or from one of those hit, whichever is above target.

    Megiddo and Modha, FAST 2003. T1 holds experts loaded and not hit since, T2 those that were hit;
    the ghost lists B1 and B2 hold the keys evicted from them. Loading an expert in B1 raises the
    target size p of T1, loading one in B2 lowers it. Pinned experts are skipped; if one list has
    no candidate, the other provides the victim. Cost: O(1) per call, not counting pinned keys.
    """

    name: ClassVar[str] = "arc"
    source: ClassVar[str] = "Megiddo and Modha, FAST 2003, figure 4; as libCacheSim's ARC"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._t1: dict[int, None] = {}
        self._t2: dict[int, None] = {}
        self._b1: dict[int, None] = {}
        self._b2: dict[int, None] = {}
        """Least recently used first in each."""
        self._p = 0.0
        self._incoming = -1
        """The key for which room is made now."""
        self._was_in: int = 0
        """1 or 2 where that key was in B1 or B2, else 0."""

    def on_miss(self, key: int) -> None:
        if key == self._incoming:
            return
        self._incoming, self._was_in = key, 0
        ones, twos = len(self._b1), len(self._b2)
        if key in self._b1:
            self._was_in = 1
            self._p = min(float(self.num_slots), self._p + max(twos / ones, 1.0))
            del self._b1[key]
        elif key in self._b2:
            self._was_in = 2
            self._p = max(0.0, self._p - max(ones / twos, 1.0))
            del self._b2[key]

    def admit(self, key: int) -> None:
        self.on_miss(key)  # not called yet if there was room
        (self._t2 if self._was_in else self._t1)[key] = None
        self._incoming, self._was_in = -1, 0

    def hit(self, key: int) -> None:
        for resident in (self._t1, self._t2):
            if key in resident:
                del resident[key]
                self._t2[key] = None
                return

    def forget(self, key: int) -> None:
        if key in self._t2:
            del self._t2[key]
            self._b2[key] = None
        else:
            del self._t1[key]
            # With T1 as large as the cache, B1 has no room.
            if len(self._t1) + 1 < self.num_slots or self._was_in:
                self._b1[key] = None
        while self._b1 and len(self._t1) + len(self._b1) >= self.num_slots and not self._was_in:
            del self._b1[next(iter(self._b1))]
        total = len(self._t1) + len(self._t2) + len(self._b1) + len(self._b2)
        while self._b2 and total >= 2 * self.num_slots and not self._was_in:
            del self._b2[next(iter(self._b2))]
            total -= 1

    def victim(self, pinned: Container[int], layer: int) -> int | None:
        ones = len(self._t1)
        from_t1 = ones > self._p or (ones == self._p and self._was_in == 2) or not self._t2
        first, second = (self._t1, self._t2) if ones and from_t1 else (self._t2, self._t1)
        return next((key for keys in (first, second) for key in keys if key not in pinned), None)

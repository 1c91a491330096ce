"""CLOCK, or second chance."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from lm_eval_moecache.algorithms.eviction.base import SecondChance


class Clock(SecondChance):
    """Evicts the longest-resident expert that was not hit since the hand last passed it.

    Corbato 1968. One bit per resident, set by a hit; the hand clears it in passing, which gives
    that expert another round. Pinned experts are skipped and keep their bit and place. Cost: O(1)
    amortised per call, not counting pinned keys.
    """

    source: ClassVar[str] = "Corbato 1968; as libCacheSim's Clock with a one-bit counter"

    def in_order(self) -> Iterable[int]:
        return self._hit

    def forget(self, key: int) -> None:
        chosen, passed = self._passed
        if key == chosen:
            for each in passed:
                del self._hit[each]
                self._hit[each] = False
        self._hit.pop(key, None)
        self._passed = (-1, [])

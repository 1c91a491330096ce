"""CLOCK, or second chance."""

from __future__ import annotations

from collections.abc import Container
from typing import ClassVar

from lm_eval_moecache.algorithms.eviction.base import HitRule


class Clock(HitRule):
    """Evicts the longest-resident expert that was not hit since the hand last passed it.

    Corbato 1968. One bit per resident, set by a hit; the hand clears it in passing, which gives
    that expert another round. Pinned experts are skipped and keep their bit and place. Cost: O(1)
    amortised per call, not counting pinned keys.
    """

    source: ClassVar[str] = "Corbato 1968; as libCacheSim's Clock with a one-bit counter"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._hit: dict[int, bool] = {}
        """Resident key -> its bit, the next under the hand first."""
        self._passed: tuple[int, list[int]] = (-1, [])
        """The last answer of `victim`, and whom the hand passes on its way there."""

    def admit(self, key: int) -> None:
        self._hit[key] = False

    def hit(self, key: int) -> None:
        if key in self._hit:
            self._hit[key] = True

    def forget(self, key: int) -> None:
        chosen, passed = self._passed
        if key == chosen:
            for each in passed:
                del self._hit[each]
                self._hit[each] = False
        self._hit.pop(key, None)
        self._passed = (-1, [])

    def victim(self, pinned: Container[int], layer: int) -> int | None:
        passed: list[int] = []
        for key, was_hit in self._hit.items():
            if key in pinned:
                continue
            if not was_hit:
                self._passed = (key, passed)
                return key
            passed.append(key)
        # All were hit: the hand returns to the first.
        self._passed = (passed[0] if passed else -1, passed)
        return passed[0] if passed else None

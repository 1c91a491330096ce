"""SIEVE: lazy promotion, quick demotion."""

from __future__ import annotations

from collections.abc import Container
from typing import ClassVar

from lm_eval_moecache.algorithms.eviction.base import HitRule


class Sieve(HitRule):
    """Evicts the first expert that was not hit, the hand moving from old to new.

    Zhang et al., NSDI 2024. As CLOCK, but a spared expert keeps its place in the order of arrival:
    the hand goes on to newer experts, so that those loaded for one use leave soon. It restarts at
    the oldest after it has met the newest. Pinned experts are skipped and keep their bit.
    Cost: O(residents) per victim, else O(1).
    """

    source: ClassVar[str] = "Zhang et al., NSDI 2024; as libCacheSim's Sieve"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._hit: dict[int, bool] = {}
        """Resident key -> its bit, the oldest first."""
        self._hand: int | None = None
        """Where the next search begins; None for the oldest."""
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
                self._hit[each] = False
        if key == chosen or key == self._hand:
            order = list(self._hit)
            after = order.index(key) + 1
            self._hand = order[after] if after < len(order) else None
        del self._hit[key]
        self._passed = (-1, [])

    def victim(self, pinned: Container[int], layer: int) -> int | None:
        order = list(self._hit)
        start = 0 if self._hand is None else order.index(self._hand)
        passed: list[int] = []
        for key in order[start:] + order[:start]:
            if key in pinned:
                continue
            if not self._hit[key]:
                self._passed = (key, passed)
                return key
            passed.append(key)
        self._passed = (passed[0] if passed else -1, passed)
        return passed[0] if passed else None

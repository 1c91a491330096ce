"""SIEVE: lazy promotion, quick demotion."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from lm_eval_moecache.algorithms.eviction.base import SecondChance


class Sieve(SecondChance):
    """Evicts the first expert that was not hit, the hand moving from old to new.

    Zhang et al., NSDI 2024. As CLOCK, but a spared expert keeps its place in the order of arrival:
    the hand goes on to newer experts, so that those loaded for one use leave soon. It restarts at
    the oldest after it has met the newest. Pinned experts are skipped and keep their bit.
    Cost: O(residents) per victim, else O(1).
    """

    source: ClassVar[str] = "Zhang et al., NSDI 2024; as libCacheSim's Sieve"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._hand: int | None = None
        """Where the next search begins; None for the oldest."""

    def in_order(self) -> Iterable[int]:
        order = list(self._hit)
        start = 0 if self._hand is None else order.index(self._hand)
        return order[start:] + order[:start]

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

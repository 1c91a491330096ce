"""An eviction rule of one's own: SIEVE (Zhang et al., NSDI 2024), a FIFO with second chances.

Run it from this folder: `moecache replay TRACE --eviction my_eviction.Sieve`.
"""

from __future__ import annotations

from collections.abc import Container
from typing import ClassVar

from lm_eval_moecache.algorithms.eviction.base import HitRule


class Sieve(HitRule):
    """A hand moves from the oldest key to the newest; what was hit since its last visit stays."""

    source: ClassVar[str] = "Zhang et al. 2024 (SIEVE)"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._hit: dict[int, bool] = {}  # in order of insertion
        self._hand: int | None = None

    def admit(self, key: int) -> None:
        self._hit[key] = False

    def hit(self, key: int) -> None:
        if key in self._hit:
            self._hit[key] = True

    def victim(self, pinned: Container[int], layer: int) -> int | None:
        keys = list(self._hit)
        start = keys.index(self._hand) if self._hand in self._hit else 0
        around = [key for key in keys[start:] + keys[:start] if key not in pinned]
        return next((key for key in around if not self._hit[key]), around[0] if around else None)

    def forget(self, key: int) -> None:
        keys = list(self._hit)
        for passed in keys[keys.index(self._hand) if self._hand in self._hit else 0 :]:
            if passed == key:
                break
            self._hit[passed] = False
        self._hand = next(iter(keys[keys.index(key) + 1 :]), None)
        del self._hit[key]

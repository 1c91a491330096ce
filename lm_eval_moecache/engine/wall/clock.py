"""The time of the machine."""

from __future__ import annotations

import time
from collections.abc import Callable


class WallClock:
    """Work takes as long as it takes, so there is nothing to account."""

    def __init__(self, synchronize: Callable[[], None]) -> None:
        self.synchronize = synchronize
        self._origin_s = time.perf_counter()

    @property
    def now(self) -> float:
        return time.perf_counter() - self._origin_s

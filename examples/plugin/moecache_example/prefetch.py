"""A prefetcher: what a layer used last is wanted at its next turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import ClassVar

from lm_eval_moecache import Event, Geometry, Prefetch


class Repeat(Prefetch):
    """Proposes for the next layer what that layer used in its last turns, the latest first.

    A token's experts often resemble those of the token before. Needs no predictions, so it replays
    any trace. Parameters: `turns`, the turns of a layer that it remembers (default 1).
    """

    source: ClassVar[str] = "the worked example of a package of one's own"

    def __init__(self, geometry: Geometry, *, seed: int = 0, turns: int = 1) -> None:
        super().__init__(geometry, seed=seed)
        if turns < 1:
            raise ValueError(f"prefetch.turns={turns} must be 1 or more.")
        self._used = [deque[Sequence[int]](maxlen=turns) for _ in range(geometry.num_layers)]

    def propose(self, event: Event) -> Sequence[int]:
        """Called once for each event, after its experts are known; returns keys, no duplicates."""
        self._used[event.layer].appendleft(list(event.keys))
        coming = self._used[(event.layer + 1) % self.geometry.num_layers]
        return list(dict.fromkeys(key for keys in coming for key in keys))

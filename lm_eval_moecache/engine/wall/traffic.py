"""Prefetches on the real link: when each is issued, withdrawn and settled."""

from __future__ import annotations

from collections.abc import Sequence, Set

from lm_eval_moecache.engine.wall.link import WallLink
from lm_eval_moecache.engine.wall.slots import SlottedCache


class Traffic:
    """Issues prefetches a little ahead of their turn, so that the link does not run dry.

    An issued prefetch has taken another expert's place already. One is issued at a time, one more
    where the link ran dry between two visits (at most as many as a token needs), and one less
    where several still waited.
    """

    def __init__(
        self, caches: Sequence[SlottedCache], link: WallLink, num_experts: int, widest: int
    ) -> None:
        self._caches = caches
        self._link = link
        self._num_experts = num_experts
        self._window, self._widest = 1, widest
        self._was_issued = False

    def drain(self, pinned: Set[int], layer: int) -> None:
        """Land what has arrived, then issue what may come next."""
        link = self._link
        self.settle(link.arrivals())
        if link.num_issued == 0 and self._was_issued:
            self._window = min(self._window + 1, self._widest)
        elif link.num_issued > 1:
            self._window = max(self._window - 1, 1)
        self._issue(pinned, layer)
        self._was_issued = link.num_issued > 0

    def _issue(self, pinned: Set[int], layer: int) -> None:
        link = self._link
        while link.num_issued < self._window:
            key = link.head()
            if key is None:
                return
            cache = self._caches[key // self._num_experts]
            nbytes = cache.size_of(key)
            if key in cache.resident:
                link.withdraw(key)
            elif cache.make_room(nbytes, pinned, layer):
                cache.reserve(key)
                link.issue(key, cache.slots[key], nbytes)
            else:
                return

    def settle(self, keys: Sequence[int]) -> None:
        """Make arrived keys resident."""
        for key in keys:
            self._caches[key // self._num_experts].land(key)

    def cancel(self, due: int, wanted: Set[int]) -> None:
        """Drop the prefetches of events up to `due`, also issued ones that have not begun."""
        self._link.cancel_due(due)
        for key in self._link.withdraw_issued(due, wanted):
            self._caches[key // self._num_experts].withdraw(key)

"""Prefetches on the real link: when each is issued, withdrawn and settled."""

from __future__ import annotations

from collections.abc import Sequence, Set

from lm_eval_moecache.engine.prefetches import Prefetches
from lm_eval_moecache.engine.wall.link import WallLink
from lm_eval_moecache.engine.wall.slots import PlacedCache
from lm_eval_moecache.engine.wall.worker import Transfer


def transfer_of(cache: PlacedCache, key: int, level: int) -> Transfer:
    """Return what brings a key, which has been given a slot, there."""
    nbytes = cache.size_of(key, level)
    return Transfer(key, cache.slots[key], nbytes, level=level, drops=cache.take_dropped())


class Traffic:
    """Issues prefetches a little ahead of their turn, so that the link does not run dry.

    An issued prefetch has taken another expert's place already. One is issued at a time, one more
    where the link ran dry between two visits (at most as many as a token needs), and one less
    where several still waited.
    """

    def __init__(
        self,
        caches: Sequence[PlacedCache],
        link: WallLink,
        prefetches: Prefetches,
        num_experts: int,
        widest: int,
    ) -> None:
        self._caches = caches
        self._link = link
        self._prefetches = prefetches
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
        """Issue as many as the window takes; of a batch, all that is left of it."""
        link, batch = self._link, None
        while link.num_issued < self._window or batch is not None:
            key, before = link.head(), batch
            batch = link.batch_of_head()
            if key is None or (link.num_issued >= self._window and batch != before):
                return
            cache = self._caches[key // self._num_experts]
            level = self._prefetches.level_of(key)
            if key in cache.resident:
                link.withdraw(key)
            elif cache.make_room(cache.size_of(key, level), pinned, layer):
                cache.reserve(key, level)
                link.issue(transfer_of(cache, key, level))
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

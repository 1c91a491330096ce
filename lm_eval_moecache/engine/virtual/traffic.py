"""Prefetches on the virtual link: when each starts, and that it lands."""

from __future__ import annotations

from collections.abc import Sequence, Set

from lm_eval_moecache.engine.cache import ExpertCache
from lm_eval_moecache.engine.prefetches import Prefetches
from lm_eval_moecache.engine.virtual.link import VirtualLink


class Traffic:
    """Moves queued prefetches over the link, as far as time and the caches allow."""

    def __init__(
        self,
        caches: Sequence[ExpertCache],
        link: VirtualLink,
        prefetches: Prefetches,
        num_experts: int,
    ) -> None:
        self._caches = caches
        self._link = link
        self._prefetches = prefetches
        self._num_experts = num_experts

    def drain(self, now: float, pinned: Set[int], layer: int) -> None:
        """Let the link work through its prefetches up to `now`.

        A transfer that could start at `now` itself is left: a demand at this instant goes first.
        """
        link = self._link
        while True:
            if link.inflight is not None:
                if link.busy_until > now:
                    return
                self.land()
            # Nothing starts before the link is free, whatever waits.
            head = link.peek() if link.busy_until < now else None
            if head is None or head[1] >= now:
                return
            key, start_s = head
            cache = self._caches[key // self._num_experts]
            level = self._prefetches.level_of(key)
            nbytes = cache.size_of(key, level)
            if key in cache.resident:
                link.withdraw(key)
            elif cache.make_room(nbytes, pinned, layer, key):
                cache.reserve(key, level)
                link.start(key, nbytes, start_s)
            else:
                # Everything else is in use until `now`.
                link.postpone(key, now)
                return

    def work_off(self, keys: Set[int], pinned: Set[int], layer: int) -> float:
        """Move what was asked for before a demand of these keys, which a fifo link does first.

        Where every key is pending that is up to the last of them, else all that waits. What finds
        no room, as all else is pinned, is dropped. Returns when the last of the keys that were
        pending is there, or 0.
        """
        link, ready_s = self._link, 0.0
        absent = any(not link.is_pending(key) for key in keys)
        while link.active and (absent or any(link.is_pending(key) for key in keys)):
            if link.inflight is not None:
                if link.inflight in keys:
                    ready_s = link.busy_until
                self.land()
                continue
            head = link.peek()
            assert head is not None, "an active link without a transfer"
            key, start_s = head
            cache = self._caches[key // self._num_experts]
            level = self._prefetches.level_of(key)
            nbytes = cache.size_of(key, level)
            if key in cache.resident or not cache.make_room(nbytes, pinned, layer, key):
                link.withdraw(key)
            else:
                cache.reserve(key, level)
                link.start(key, nbytes, start_s)
        return ready_s

    def land(self) -> None:
        """Make the prefetch in flight resident."""
        key = self._link.land()
        self._caches[key // self._num_experts].land(key)

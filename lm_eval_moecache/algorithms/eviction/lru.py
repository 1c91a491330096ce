"""Least recently used."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container
from typing import ClassVar

from lm_eval_moecache.algorithms.eviction.base import EvictionAlgorithm
from lm_eval_moecache.records.event import Event
from lm_eval_moecache.records.geometry import Geometry


class LRU(EvictionAlgorithm):
    """Evicts the expert whose last use lies furthest back.

    The experts of one event are equally recent; the one needed first, which in a decode step is
    the one with the heaviest routing weight, leaves first. An expert that a prefetch brought
    counts as used when it lands; one that is resident when it is predicted is not used by that:
    SP-MoE section 4.4, where an expert found in the cache is put last again, is read as on its use.
    Cost: O(1) per call, beside the pinned keys it steps over.
    """

    source: ClassVar[str] = "Eliseev & Mazur 2023 (Mixtral offloading); SpecMD appendix B"

    def __init__(self, geometry: Geometry, *, seed: int = 0) -> None:
        super().__init__(geometry, seed=seed)
        self._order: OrderedDict[int, None] = OrderedDict()

    def on_insert(self, key: int, prefetched: bool) -> None:
        self._order[key] = None

    def on_event(self, event: Event) -> None:
        order = self._order
        move = order.move_to_end
        for key in event.keys:
            if key in order:
                move(key)

    def on_evict(self, key: int) -> None:
        del self._order[key]

    def victim(self, pinned: Container[int], layer: int) -> int | None:
        for key in self._order:
            if key not in pinned:
                return key
        return None

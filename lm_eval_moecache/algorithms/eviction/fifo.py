"""First in, first out."""

from __future__ import annotations

from collections.abc import Container
from typing import ClassVar

from lm_eval_moecache.algorithms.eviction.base import EvictionAlgorithm
from lm_eval_moecache.records.geometry import Geometry


class FIFO(EvictionAlgorithm):
    """Evicts the expert that has been resident longest, used or not.

    A prefetched expert counts from the moment it lands. Cost: O(1) per call, beside the pinned
    keys it steps over.
    """

    source: ClassVar[str] = "the textbook baseline; SpecMD section 4.2 uses its order in a queue"

    def __init__(self, geometry: Geometry, *, seed: int = 0) -> None:
        super().__init__(geometry, seed=seed)
        self._order: dict[int, None] = {}

    def on_insert(self, key: int, prefetched: bool) -> None:
        self._order[key] = None

    def on_evict(self, key: int) -> None:
        del self._order[key]

    def victim(self, pinned: Container[int], layer: int) -> int | None:
        return next((key for key in self._order if key not in pinned), None)

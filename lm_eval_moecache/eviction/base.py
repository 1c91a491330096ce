"""The eviction axis: events in, one key out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container
from typing import ClassVar

from lm_eval_moecache.core.records import Event, Geometry


class EvictionAlgorithm(ABC):
    """Decides who leaves; the cache alone knows sizes, pins and residency.

    The cache guarantees the order `on_insert` -> any number of `on_event` / `on_predicted` ->
    `on_evict` for each key, and `on_pass` before the first event of each pass. One instance
    serves one cache (with a capacity of `n/layer`, one layer). An algorithm must be
    deterministic in its constructor's arguments and the calls it receives; ties go to the
    smaller key.
    """

    source: ClassVar[str]
    """The paper and section it implements."""
    uses_weights: ClassVar[bool] = False
    """Whether `Event.experts` and `Event.weights` are needed in every pass."""
    is_offline: ClassVar[bool] = False
    """Whether it needs the future, so that only a replay can run it."""

    def __init__(self, geometry: Geometry, *, seed: int = 0) -> None:
        self.geometry = geometry
        self.seed = seed

    def on_pass(self, pass_index: int) -> None:
        """Note that a new pass over the model begins."""
        return

    @abstractmethod
    def on_insert(self, key: int, prefetched: bool) -> None:
        """Note that a key became resident; `prefetched` says that no event has asked for it."""

    def on_event(self, event: Event) -> None:
        """Note the use of `event.keys`, in order of need, after the event was executed.

        Keys that are not resident any more (an event larger than the cache) may be among them.
        """
        return

    def on_predicted(self, key: int) -> None:
        """Note that a prefetcher wants a key that is resident already."""
        return

    @abstractmethod
    def on_evict(self, key: int) -> None:
        """Forget a key: the cache has evicted it."""

    @abstractmethod
    def victim(self, pinned: Container[int], layer: int) -> int | None:
        """Name the resident key to evict while `layer` is being served, or None.

        Never a pinned key; None only where every key it knows is pinned. State does not change
        until `on_evict`.
        """

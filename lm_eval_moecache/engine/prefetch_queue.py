"""Prefetches on their way: proposed, waiting for the link, moving, landing, and judged."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set

from lm_eval_moecache.algorithms.prefetch.base import PrefetchAlgorithm
from lm_eval_moecache.engine.cache import ExpertCache
from lm_eval_moecache.engine.virtual.link import Link
from lm_eval_moecache.records.event import Event
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.ledger import PassRecord

Chooser = Callable[[Event, int, Sequence[int]], Sequence[int]]
"""(event, layer, its keys, most wanted first) -> the level of each."""


class PrefetchQueue:
    """Moves what the prefetcher proposes over the link, as far as time and the caches allow."""

    def __init__(
        self,
        geometry: Geometry,
        caches: Sequence[ExpertCache],
        link: Link,
        algorithm: PrefetchAlgorithm,
    ) -> None:
        self._num_layers = geometry.num_layers
        self._num_experts = geometry.num_experts
        self._caches = caches
        self._link = link
        self.propose: Callable[[Event], Sequence[int]] = algorithm.propose
        """Where the keys to prefetch come from: a replay may know them from the recorded run."""
        self._levels: dict[int, int] = {}
        """Key -> level to prefetch it at, where that is not the best."""
        self._predictions: dict[int, set[int]] = {}
        self._num_batches = 0

    def forget(self) -> None:
        """Judge no event by what was predicted for it so far."""
        self._predictions.clear()

    def judge(self, event: Event, record: PassRecord) -> None:
        """Count what was predicted for an event, and how much of it the event needs."""
        predicted = self._predictions.pop(event.layer, None)
        if predicted is not None:
            record.predicted += len(predicted)
            record.predicted_right += len(predicted.intersection(event.keys))
            record.predictable += len(event.keys)

    def submit(self, event: Event, ready_s: float, choose: Chooser | None = None) -> None:
        """Queue what the prefetcher proposes at an event, known from `ready_s` on.

        `choose` says at which level; what is near or on its way stays at the level it has.
        """
        num_experts, link = self._num_experts, self._link
        proposed = self.propose(event)
        levels = {} if choose is None else self._choose(event, proposed, choose)
        layer = -1
        for key in proposed:
            if key // num_experts != layer:
                layer = key // num_experts
                wanted = self._predictions.setdefault(layer, set())
                cache = self._caches[layer]
                pass_index = event.pass_index + (layer <= event.layer)
                due = pass_index * self._num_layers + layer
            wanted.add(key)
            if key in cache.resident:
                cache.eviction.on_predicted(key)
            elif not link.is_pending(key):
                link.submit(key, due, ready_s)
                if levels or self._levels:
                    self._levels[key] = levels.get(key, 0)

    def submit_draft(
        self, keys: Sequence[int], pass_index: int, ready_s: float, batched: bool
    ) -> None:
        """Queue one layer's keys, proposed while drafting for a pass that has not begun."""
        link = self._link
        self._num_batches += 1
        for key in keys:
            layer = key // self._num_experts
            self._predictions.setdefault(layer, set()).add(key)
            cache = self._caches[layer]
            if key in cache.resident:
                cache.eviction.on_predicted(key)
            elif not link.is_pending(key):
                due = pass_index * self._num_layers + layer
                link.submit(key, due, ready_s, self._num_batches if batched else None)
                if self._levels:
                    self._levels[key] = 0

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
            head = link.peek()
            if head is None or head[1] >= now:
                return
            key, start_s = head
            cache = self._caches[key // self._num_experts]
            level = self._levels.get(key, 0)
            nbytes = cache.size_of(key, level)
            if key in cache.resident:
                link.withdraw(key)
            elif cache.make_room(nbytes, pinned, layer):
                cache.reserve(key, level)
                link.start(key, nbytes, start_s)
            else:
                # Everything else is in use until `now`.
                link.postpone(key, now)
                return

    def _choose(self, event: Event, keys: Sequence[int], choose: Chooser) -> dict[int, int]:
        by_layer: dict[int, list[int]] = {}
        for key in keys:
            by_layer.setdefault(key // self._num_experts, []).append(key)
        found: dict[int, int] = {}
        for layer, own in by_layer.items():
            found.update(zip(own, choose(event, layer, own), strict=True))
        return found

    def land(self) -> None:
        key = self._link.land()
        self._caches[key // self._num_experts].land(key)

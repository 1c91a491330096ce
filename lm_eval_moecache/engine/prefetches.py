"""Prefetches as they are proposed, queued for the link, and judged; moving is the executor's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lm_eval_moecache.algorithms.miss.base import MissAlgorithm
from lm_eval_moecache.engine.cache import ExpertCache
from lm_eval_moecache.engine.decide import Rules
from lm_eval_moecache.engine.link import Link
from lm_eval_moecache.records.event import Event
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.ledger import PassRecord


class Prefetches:
    """Asks the prefetcher, queues what it proposes for the link, and judges it by what came."""

    def __init__(
        self,
        geometry: Geometry,
        caches: Sequence[ExpertCache],
        link: Link,
        rules: Rules,
    ) -> None:
        self._num_layers = geometry.num_layers
        self._num_experts = geometry.num_experts
        self._caches = caches
        self._link = link
        self._rules = rules
        self.propose: Callable[[Event], Sequence[int]] = rules.algorithms.prefetch.propose
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

    def level_of(self, key: int) -> int:
        """Return the level at which a queued key is to be loaded."""
        return self._levels.get(key, 0)

    def submit(self, event: Event, ready_s: float) -> None:
        """Queue what the prefetcher proposes at an event, known from `ready_s` on.

        Where there is a ladder the miss algorithm says at which level; what is resident or on its
        way stays at the level it has.
        """
        num_experts, link = self._num_experts, self._link
        proposed = self.propose(event)
        miss = self._rules.lossy_miss(event) if self._rules.ladder else None
        levels = {} if miss is None else self._choose_levels(event, proposed, miss)
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

    def _choose_levels(
        self, event: Event, keys: Sequence[int], miss: MissAlgorithm
    ) -> dict[int, int]:
        by_layer: dict[int, list[int]] = {}
        for key in keys:
            by_layer.setdefault(key // self._num_experts, []).append(key)
        found: dict[int, int] = {}
        for layer, own in by_layer.items():
            found.update(zip(own, miss.prefetch_levels(event, layer, own), strict=True))
        return found

"""Prefetches as they are proposed, queued for the link, and judged; moving is the executor's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from lm_eval_moecache.algorithms.miss.base import MissAlgorithm
from lm_eval_moecache.engine.cache import ExpertCache
from lm_eval_moecache.engine.decide import Rules
from lm_eval_moecache.engine.link import Link
from lm_eval_moecache.records.event import PASS_START, Event
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.ledger import PassRecord


class Prefetches:
    """Asks the prefetcher, queues what it proposes for the link, and judges it by what came."""

    def __init__(
        self, geometry: Geometry, caches: Sequence[ExpertCache], link: Link, rules: Rules
    ) -> None:
        self._num_layers = geometry.num_layers
        self._num_experts = geometry.num_experts
        self._caches = caches
        self._link = link
        self._rules = rules
        self.answers: Iterator[Sequence[int]] | None = None
        """What is proposed at the events to come, where that is known already; None: ask."""
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
        answers = self.answers
        proposed = self._rules.prefetch.propose(event) if answers is None else next(answers)
        miss = self._rules.lossy_miss(event) if self._rules.ladder else None
        levels = {} if miss is None else self._choose_levels(event, proposed, miss)
        self._queue(proposed, event.pass_index, event.layer, ready_s, levels)

    def submit_draft(
        self, keys: Sequence[int], pass_index: int, ready_s: float, batched: bool
    ) -> None:
        """Queue one layer's keys, proposed while drafting for a pass that has not begun."""
        self._num_batches += 1
        self._queue(
            keys, pass_index, PASS_START, ready_s, {}, self._num_batches if batched else None
        )

    def _queue(
        self,
        keys: Sequence[int],
        pass_index: int,
        after: int,
        ready_s: float,
        levels: Mapping[int, int],
        batch: int | None = None,
    ) -> None:
        """Queue what is not resident; keys of layers up to `after` are for the pass that follows.

        Of the others the eviction is told that they are wanted.
        """
        for layer, own in self._by_layer(keys):
            wanted = self._predictions.get(layer)
            if wanted is None:
                self._predictions[layer] = set(own)
            else:
                wanted.update(own)
            cache = self._caches[layer]
            resident = cache.resident
            absent = [key for key in own if key not in resident]
            if not absent:
                cache.eviction.on_all_predicted(own)
                continue
            if len(absent) < len(own):
                cache.eviction.on_all_predicted([key for key in own if key in resident])
            due = (pass_index + (layer <= after)) * self._num_layers + layer
            fresh = self._link.submit(absent, due, ready_s, batch)
            if levels or self._levels:
                self._levels.update((key, levels.get(key, 0)) for key in fresh)

    def _by_layer(self, keys: Sequence[int]) -> Iterable[tuple[int, Sequence[int]]]:
        """Divide proposals into runs of keys of one layer, in their order."""
        if not keys:
            return ()
        num_experts = self._num_experts
        layer = keys[0] // num_experts
        if min(keys) // num_experts == layer == max(keys) // num_experts:
            return ((layer, keys),)
        runs = groupby(keys, lambda key: key // num_experts)
        return ((layer, list(own)) for layer, own in runs)

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

"""The layer step: everything that happens at one event, in the order in which it happens.

It asks the cache, the link, the clock and the algorithms; none of them calls back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set

import numpy as np

from lm_eval_moecache.engine.algorithms import Algorithms
from lm_eval_moecache.engine.cache import ExpertCache
from lm_eval_moecache.engine.clock import Clock
from lm_eval_moecache.engine.levels import execute_by_level, let_worse_go, not_good_enough
from lm_eval_moecache.engine.prefetch_queue import Chooser, PrefetchQueue
from lm_eval_moecache.engine.virtual.link import Link
from lm_eval_moecache.records.arrays import IntArray, softmax
from lm_eval_moecache.records.event import (
    DROPPED,
    PREFILL,
    Event,
    Fetch,
    num_assignments,
    spell_out,
    token_miss_count,
    unique_in_order,
)
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.ledger import PassRecord
from lm_eval_moecache.records.predictor import PredictorCost, costs
from lm_eval_moecache.records.selection import Selection

Execute = Callable[[Sequence[int]], None]
_NOTHING: frozenset[int] = frozenset()


class LayerStep:
    """Runs events. `caches[layer]` is the pool of that layer: one object for all, or one each."""

    def __init__(
        self,
        geometry: Geometry,
        caches: Sequence[ExpertCache],
        link: Link,
        clock: Clock,
        algorithms: Algorithms,
    ) -> None:
        self._geometry = geometry
        self._caches = caches
        self._link = link
        self._clock = clock
        self._algorithms = algorithms
        self._may_change = not (algorithms.routing.is_lossless and algorithms.miss.is_lossless)
        self._prefetches = algorithms.prefetch.is_active
        self._cached_first = algorithms.miss.cached_first
        self._ladder = len(geometry.precision) > 1
        self._predictor: Sequence[PredictorCost] = ()
        if algorithms.prefetch.uses_predictor:
            assert algorithms.prefetch.artifact is not None, "a predictor without its artifact"
            self._predictor = costs(algorithms.prefetch.artifact)
        self.queue = PrefetchQueue(geometry, caches, link, algorithms.prefetch)
        self._record = PassRecord(-1, PREFILL, 0, 0.0)
        self.observer: Callable[[Event], None] | None = None
        """Shown each event after its routing and before anything moves."""

    def begin_pass(self, record: PassRecord) -> None:
        self._record = record
        self._algorithms.routing.on_pass(record.index)
        self._algorithms.prefetch.on_pass(record.index)

    def enter(self, layer: int, num_tokens: int) -> None:
        """Bring the time to the moment at which the layer's router has decided."""
        self._clock.dense(layer, num_tokens)
        if self._prefetches and self._link.active:
            self.queue.drain(self._clock.now, _NOTHING, layer)

    def run(self, event: Event, execute: Execute | None = None) -> Selection | None:
        """Serve one event from lookup to the end of its last expert; `enter` comes before.

        Returns the changed selection, or None where the router's is executed. `execute` is called
        with the keys of each wave once they are all resident, and may use them until it returns.
        """
        selection, demands = self._decide(event)
        self._serve(event, demands, execute)
        return selection

    def settle(self) -> None:
        """Empty the link: forget what waits for it, let what moves on it land."""
        self._link.clear()
        self.queue.forget()
        if self._link.inflight is not None:
            self._clock.wait_until(self._link.busy_until)
            self.queue.land()

    def _decide(self, event: Event) -> tuple[Selection | None, Sequence[Fetch]]:
        """Look up an event's experts: the changed selection, and what has to be brought near."""
        cache = self._caches[event.layer]
        asked = spell_out(event, self._geometry.num_experts) if self._may_change else None
        selection = self._route(event, cache) if self._may_change else None
        absent = [key for key in event.keys if key not in cache.resident]
        self._count(event, cache, absent)
        if self.observer is not None:
            self.observer(event)
        fetches: Sequence[Fetch] | None = None
        miss = self._algorithms.miss
        if self._is_lossy_here(miss.is_lossless, event):
            if absent or (self._ladder and miss.upgrade):
                fetches, selection = self._resolve(event, cache, absent, selection)
        elif self._ladder:
            # Where lossy algorithms stand aside, what they left at a lower level is not enough.
            absent = not_good_enough(cache, event.keys)
        if selection is not None and asked is not None:
            self._judge(asked, selection)
        return selection, [Fetch(key) for key in absent] if fetches is None else fetches

    def _serve(self, event: Event, demands: Sequence[Fetch], execute: Execute | None) -> None:
        """Bring near what is demanded, execute the event, and let prefetches go on."""
        cache, link, prefetches = self._caches[event.layer], self._link, self._prefetches
        gate_s = ready_s = self._clock.now
        remaining = event.keys
        pinned = set(event.keys) if demands or prefetches else _NOTHING
        if demands:
            ready_s, remaining = self._load(event, cache, demands, pinned, execute)
            if self._cached_first:
                remaining = self._execute_near(event, remaining, demands, execute)
        if prefetches and link.active:
            link.cancel_due(event.pass_index * self._geometry.num_layers + event.layer)
        self._record.stall_s += self._clock.wait_until(ready_s)
        if prefetches:
            ready_s = gate_s + self._predicting_s(event)
            self.queue.submit(event, ready_s, self._chooser(event))
            self._clock.wait_until(ready_s)
        self._execute(event, remaining, execute)
        if prefetches and link.active:
            self.queue.drain(self._clock.now, pinned, event.layer)
        cache.eviction.on_event(event)

    def _predicting_s(self, event: Event) -> float:
        """Return the seconds that the event's predictions take: of gates, or of a predictor."""
        if not self._predictor or not event.predicted:
            return self._clock.gates(len(event.predicted))
        cost = self._predictor[event.layer]
        return self._clock.network(
            cost.num_weights, cost.num_bytes, cost.num_kernels, event.num_tokens
        )

    def _is_lossy_here(self, is_lossless: bool, event: Event) -> bool:
        if is_lossless:
            return False
        return not (self._algorithms.decode_only and event.phase == PREFILL)

    def _chooser(self, event: Event) -> Chooser | None:
        miss = self._algorithms.miss
        if not (self._ladder and self._is_lossy_here(miss.is_lossless, event)):
            return None
        return miss.prefetch_levels

    def _route(self, event: Event, cache: ExpertCache) -> Selection | None:
        routing = self._algorithms.routing
        if not self._is_lossy_here(routing.is_lossless, event):
            return None
        selection = routing.select(event, cache.resident)
        if selection is not None:
            self._adopt(event, selection)
        return selection

    def _resolve(
        self, event: Event, cache: ExpertCache, absent: list[int], selection: Selection | None
    ) -> tuple[Sequence[Fetch] | None, Selection | None]:
        resolution = self._algorithms.miss.resolve(event, absent, cache.resident)
        if resolution is None:
            return None, selection
        changed = resolution.selection
        if changed is not None:
            live = event.experts != DROPPED
            self._record.substituted += int(((changed.experts != event.experts) & live).sum())
            selection = changed if selection is None else changed.after(selection)
            self._adopt(event, selection)
        return resolution.fetch, selection

    def _judge(self, asked: IntArray, selection: Selection) -> None:
        """Count what a changed selection drops, and what the router did not ask for."""
        own = (selection.experts[:, :, None] == asked[:, None, :]).any(axis=-1)
        if selection.keep is not None:
            self._record.dropped += int((~selection.keep).sum())
            own |= ~selection.keep
        self._record.unfaithful += int((~own).sum())

    def _adopt(self, event: Event, selection: Selection) -> None:
        """Make a changed selection the event's own, with the gate scores that belong to it."""
        experts = selection.experts
        if event.weights is not None and event.logits is not None:
            assert event.experts is not None
            scores, live = softmax(event.logits), event.experts != DROPPED
            scores[live.nonzero()[0], event.experts[live]] = event.weights[live]
            event.weights = np.take_along_axis(scores, experts, axis=-1)
            if selection.weights is not None:
                ruled = np.isnan(selection.weights)
                event.weights = np.where(ruled, event.weights, selection.weights)
        if selection.keep is not None:
            experts = np.where(selection.keep, experts, DROPPED)
        event.experts = experts
        event.keys = unique_in_order(event.layer, self._geometry.num_experts, experts[experts >= 0])

    def _count(self, event: Event, cache: ExpertCache, absent: list[int]) -> None:
        """Write the lookups to the ledger, before anything of this event moves."""
        record, link = self._record, self._link
        record.requests += len(event.keys)
        record.token_requests += event.num_tokens * self._geometry.top_k
        if absent:
            missed = absent
            if self._prefetches and link.active:
                missed = [key for key in absent if not link.is_pending(key)]
                record.late += len(absent) - len(missed)
            record.misses += len(missed)
            record.collisions += cache.count_evicted_in_this_pass(missed)
            record.token_misses += token_miss_count(
                event.experts, self._geometry.num_experts, absent
            )
        if not self._prefetches:
            return
        if cache.unused_prefetches:
            fresh = cache.unused_prefetches.intersection(event.keys)
            record.prefetch_hits += len(fresh)
            cache.unused_prefetches -= fresh
        self.queue.judge(event, record)

    def _load(
        self,
        event: Event,
        cache: ExpertCache,
        fetches: Sequence[Fetch],
        pinned: Set[int],
        execute: Execute | None,
    ) -> tuple[float, list[int]]:
        """Bring the fetches near, in waves where they do not fit together.

        Returns when the last one is there, and the keys still to be executed then.
        """
        link, remaining = self._link, event.keys
        ready_s = self._clock.now
        if link.inflight is not None:
            # It lands before any of these can start, and while the compute stands still.
            if link.inflight in pinned:
                ready_s = link.busy_until
            # Off the list: a wave may execute and evict it before its turn comes.
            fetches = [f for f in fetches if cache.arriving.get(f.key, f.level + 1) > f.level]
            self.queue.land()
            cache.unused_prefetches -= pinned
        if self._ladder:
            let_worse_go(cache, fetches)
        for fetch in fetches:
            key = fetch.key
            if link.active and link.is_pending(key):
                link.withdraw(key)
            nbytes = cache.size_of(key, fetch.level)
            if not cache.make_room(nbytes, pinned, event.layer):
                wave = [k for k in remaining if k in cache.resident]
                remaining = [k for k in remaining if k not in cache.resident]
                self._record.stall_s += self._clock.wait_until(ready_s)
                self._execute(event, wave, execute)
                ready_s, pinned = self._clock.now, set(remaining)
                fits = cache.make_room(nbytes, pinned, event.layer)
                assert fits, f"no room for one expert of {nbytes} bytes after its wave"
            ready_s = link.transfer(nbytes, ready_s)
            cache.insert(key, fetch.level)
        return ready_s, remaining

    def _execute_near(
        self, event: Event, keys: list[int], demands: Sequence[Fetch], execute: Execute | None
    ) -> list[int]:
        """Execute what was resident all along, before the wait; return what has to wait."""
        # The compute is busy from here on: predicting does not hide behind the wait.
        self._clock.wait_until(self._clock.now + self._predicting_s(event))
        awaited = {fetch.key for fetch in demands}
        self._execute(event, [key for key in keys if key not in awaited], execute)
        return [key for key in keys if key in awaited]

    def _execute(self, event: Event, keys: list[int], execute: Execute | None) -> None:
        if execute is not None:
            execute(keys)
        if self._ladder:
            cache = self._caches[event.layer]
            self._record.low_precision += execute_by_level(self._clock, cache, event, keys)
        else:
            assignments = num_assignments(event, keys, self._geometry.num_experts)
            self._clock.experts(event.layer, len(keys), assignments)

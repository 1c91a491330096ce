"""Decide: what one event needs, and what is fetched ahead of others, before anything moves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from lm_eval_moecache.algorithms.miss.base import MissAlgorithm, weight_shares
from lm_eval_moecache.algorithms.policy import Policy
from lm_eval_moecache.algorithms.prefetch.base import PrefetchAlgorithm
from lm_eval_moecache.algorithms.routing.base import RoutingAlgorithm
from lm_eval_moecache.engine.cache import ExpertCache, Link
from lm_eval_moecache.records.arrays import IntArray, softmax
from lm_eval_moecache.records.event import (
    DROPPED,
    PASS_START,
    PREFILL,
    Event,
    Fetch,
    token_miss_count,
    unique_in_order,
)
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.ledger import COUNTED, PassRecord
from lm_eval_moecache.records.selection import Selection


class Rules:
    """What decides: an algorithm per axis, and what of them and the model all events share.

    The eviction algorithms live in their caches.
    """

    def __init__(self, geometry: Geometry, policy: Policy, seed: int) -> None:
        self.routing: RoutingAlgorithm = policy.routing.build(geometry, seed)
        self.prefetch: PrefetchAlgorithm = policy.prefetch.build(geometry, seed)
        self.miss: MissAlgorithm = policy.miss.build(geometry, seed)
        self.decode_only = policy.phases == "decode"
        """Whether lossy algorithms stand aside in prefill (`phases=decode`)."""
        self.num_experts, self.top_k = geometry.num_experts, geometry.top_k
        self.may_change = not (self.routing.is_lossless and self.miss.is_lossless)
        """Whether a selection can change at all."""
        self.prefetches = self.prefetch.is_active
        self.ladder = len(geometry.precision) > 1
        """Whether the store has several levels of precision."""
        self.at_best = [Fetch(key) for key in range(geometry.num_layers * geometry.num_experts)]
        """Key -> its fetch at the best level, made once: most demands are one of them."""

    def lets_change(self, is_lossless: bool, event: Event) -> bool:
        """Whether an algorithm may change results at this event (`phases=decode`)."""
        if is_lossless:
            return False
        return not (self.decode_only and event.phase == PREFILL)

    def lossy_miss(self, event: Event) -> MissAlgorithm | None:
        """Return the miss algorithm where it acts on this event, None where all is loaded."""
        return self.miss if self.lets_change(self.miss.is_lossless, event) else None


_COUNTS = frozenset(COUNTED)


@dataclass
class Plan:
    """What an engine carries out, and what became of an event once it has.

    The engine adds the `levels`; all else stays as it was decided. Without slots, so that what
    most events leave at its default costs them nothing.

    Who leaves the cache is not in it: an eviction rule hears of each load and arrival before it is
    asked for the next victim, and with several waves the pins change in between.
    """

    event: Event
    """As it is executed: where the selection was changed, with its experts, weights and keys."""
    demands: Sequence[Fetch]
    """What has to be loaded, in this order."""
    absent: Sequence[int]
    """The looked-up keys that are not resident: late or missed."""
    looked_up: Event
    """After routing and before the miss algorithm: what is counted."""
    selection: Selection | None = field(default=None, init=False)
    """The changed selection, or None where the router's is executed."""
    late: int = field(default=0, init=False)
    collisions: int = field(default=0, init=False)
    token_misses: int = field(default=0, init=False)
    substituted: int = field(default=0, init=False)
    dropped: int = field(default=0, init=False)
    unfaithful: int = field(default=0, init=False)
    avoided: int = field(default=0, init=False)
    weighed_tokens: int = field(default=0, init=False)
    lost_weight: float = field(default=0.0, init=False)
    levels: Mapping[int, int] | None = field(default=None, init=False)
    """Key -> precision level at which it was executed; None where the store has one level."""

    def write_to(self, record: PassRecord) -> None:
        """Write to the ledger what was found absent, and what was changed."""
        record.misses += len(self.absent) - self.late
        for name, value in vars(self).items():
            if name in _COUNTS:
                setattr(record, name, getattr(record, name) + value)


def decide(event: Event, rules: Rules, cache: ExpertCache, link: Link) -> Plan:
    """Return what an event needs, by what the cache holds and what is on its way.

    Changes neither of them, nor the event. Only the routing and miss algorithms may note what they
    were asked (a running average, a draw).
    """
    resident, may_change, at_best = cache.resident, rules.may_change, rules.at_best
    asked = looked_up = event.spelled_out(rules.num_experts) if may_change else event
    selection: Selection | None = None
    routes = may_change and rules.lets_change(rules.routing.is_lossless, asked)
    if routes:
        selection = rules.routing.select(asked, resident)
        if selection is not None:
            looked_up = changed(asked, selection, rules.num_experts)
    absent = [key for key in looked_up.keys if key not in resident]
    if not absent and not (may_change or rules.ladder):
        return Plan(event, (), (), event)
    # What no prefetch has under way; the other absent keys are late.
    missed: Sequence[int] = absent
    if rules.prefetches and link.active:
        missed = link.without_pending(absent)
    miss = rules.lossy_miss(asked)
    executed, demands, substituted = looked_up, None, 0
    wanted = absent
    if miss is None and rules.ladder:
        # Where lossy algorithms have been at work, what they left at a lower level is not enough.
        wanted = [key for key in looked_up.keys if resident.get(key, 1) > 0]
    elif miss is not None:
        unclear = missed if miss.awaits_late else absent
        if unclear or (rules.ladder and miss.upgrade):
            resolution = miss.resolve(looked_up, unclear, resident)
            if resolution is not None:
                demands, change = resolution.fetch, resolution.selection
                if change is not None:
                    moved = (change.experts != looked_up.experts) & (looked_up.experts != DROPPED)
                    substituted = int(moved.sum())
                    selection = change if selection is None else change.after(selection)
                    executed = changed(looked_up, selection, rules.num_experts)
                if len(unclear) < len(absent):
                    demands = _with_late(demands, absent, missed, executed, rules)
    if demands is None:
        demands = [at_best[key] for key in wanted]
    plan = Plan(executed, demands, absent, looked_up)
    plan.late = len(absent) - len(missed)
    plan.collisions = cache.count_evicted_in_this_pass(missed)
    plan.token_misses = token_miss_count(looked_up, rules.num_experts, absent)
    if selection is not None:
        plan.selection, plan.substituted = selection, substituted
        plan.dropped, plan.unfaithful = _judge(asked.experts, selection)
    if miss is not None and absent:
        plan.avoided = len(set(absent).difference(executed.keys))
    if (miss is not None or routes) and len(asked.weights):
        plan.weighed_tokens = asked.num_tokens
        if selection is not None:
            plan.lost_weight = _lost_weight(asked, selection)
    return plan


def _with_late(
    fetches: Sequence[Fetch],
    absent: Sequence[int],
    missed: Sequence[int],
    executed: Event,
    rules: Rules,
) -> list[Fetch]:
    """Return, in order of need, what an algorithm fetches and the late keys that it left as asked.

    Those are executed once they are there: on demand if they have not begun to move.
    """
    late = set(absent).difference(missed).intersection(executed.keys)
    place = {key: index for index, key in enumerate(absent)}
    wanted = [*fetches, *(rules.at_best[key] for key in late)]
    return sorted(wanted, key=lambda fetch: place.get(fetch.key, len(place)))


def changed(event: Event, selection: Selection, num_experts: int) -> Event:
    """Return the event of a changed selection, with the gate scores that belong to it."""
    experts, weights = selection.experts, event.weights
    if len(weights) and len(event.logits):
        scores, live = softmax(event.logits), event.experts != DROPPED
        scores[live.nonzero()[0], event.experts[live]] = weights[live]
        weights = np.take_along_axis(scores, experts, axis=-1)
        if selection.weights is not None:
            ruled = np.isnan(selection.weights)
            weights = np.where(ruled, weights, selection.weights)
    keep, base = selection.keep, event.layer * num_experts
    if keep is None and event.num_tokens == 1:
        keys = [*dict.fromkeys([base + expert for expert in experts.tolist()[0]])]
    else:
        if keep is not None:
            experts = np.where(keep, experts, DROPPED)
        keys = unique_in_order(event.layer, num_experts, experts[experts >= 0])
    return event._replace(keys=keys, experts=experts, weights=weights)


def _lost_weight(asked: Event, selection: Selection) -> float:
    """Return the shares of their tokens' weight whose experts are not executed."""
    kept = selection.experts
    if selection.keep is not None:
        kept = np.where(selection.keep, kept, DROPPED)
    executed = (asked.experts[:, :, None] == kept[:, None, :]).any(axis=-1)
    return float(weight_shares(asked)[~executed].sum(dtype=np.float64))


def _judge(asked: IntArray, selection: Selection) -> tuple[int, int]:
    """Count what a changed selection drops, and what the router did not ask for."""
    if len(asked) == 1 and selection.keep is None:
        own_experts = asked.tolist()[0]
        return 0, sum([expert not in own_experts for expert in selection.experts.tolist()[0]])
    own = (selection.experts[:, :, None] == asked[:, None, :]).any(axis=-1)
    dropped = 0
    if selection.keep is not None:
        dropped = int((~selection.keep).sum())
        own |= ~selection.keep
    return dropped, int((~own).sum())


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

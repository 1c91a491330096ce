"""Decides what an event loads and executes and what is prefetched, before any byte moves."""

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
    """The algorithms that decide, and the facts about them and the model that all events share.

    The eviction algorithms live in their caches.
    """

    def __init__(self, geometry: Geometry, policy: Policy, seed: int) -> None:
        self.routing: RoutingAlgorithm = policy.routing.build(geometry, seed)
        self.prefetch: PrefetchAlgorithm = policy.prefetch.build(geometry, seed)
        self.miss: MissAlgorithm = policy.miss.build(geometry, seed)
        self.decode_only = policy.phases == "decode"
        """Whether lossy algorithms are off during prefill (`phases=decode`)."""
        self.num_experts, self.top_k = geometry.num_experts, geometry.top_k
        self.may_change = not (self.routing.is_lossless and self.miss.is_lossless)
        """Whether any algorithm may change a selection."""
        self.prefetches = self.prefetch.is_active
        self.ladder = len(geometry.precision) > 1
        """Whether the store has several precision levels."""
        self.at_best = [Fetch(key) for key in range(geometry.num_layers * geometry.num_experts)]
        """Key -> its fetch at the best level, made once because most demands are of this kind."""

    def lets_change(self, is_lossless: bool, event: Event) -> bool:
        """Whether a (lossy) algorithm may change results at this event (`phases=decode`)."""
        if is_lossless:
            return False
        return not (self.decode_only and event.phase == PREFILL)

    def lossy_miss(self, event: Event) -> MissAlgorithm | None:
        """Return the miss algorithm if it acts on this event; None if all misses are loaded."""
        return self.miss if self.lets_change(self.miss.is_lossless, event) else None


_COUNTS = frozenset(COUNTED)


@dataclass
class Plan:
    """The decision on an event: what to load and execute, and the counts that follow from it.

    The engine adds the `levels`; all else stays as decided. There are no `__slots__`, so fields
    that most events leave at their defaults cost nothing.

    Victims are not part of it: an eviction rule learns of each load and arrival before it is asked
    for the next victim, and with several waves the pins change in between.
    """

    event: Event
    """The event as executed: a changed selection has its own experts, weights and keys here."""
    demands: Sequence[Fetch]
    """The experts to load, in this order."""
    absent: Sequence[int]
    """The looked-up keys that are not resident, late or missed."""
    looked_up: Event
    """The event after routing and before the miss algorithm, whose lookups are counted."""
    selection: Selection | None = field(default=None, init=False)
    """The changed selection; None where the router's own is executed."""
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
    """Executed key -> its precision level; None where the store has one level."""

    def write_to(self, record: PassRecord) -> None:
        """Add the counts of misses and changes to a pass's record."""
        record.misses += len(self.absent) - self.late
        for name, value in vars(self).items():
            if name in _COUNTS:
                setattr(record, name, getattr(record, name) + value)


def decide(event: Event, rules: Rules, cache: ExpertCache, link: Link) -> Plan:
    """Return the plan for an event, given the cache's residents and the pending prefetches.

    Changes neither cache nor link nor event. Only the routing and miss algorithms may update their
    own state (a running average, a random draw).
    """
    resident, may_change, at_best = cache.resident, rules.may_change, rules.at_best
    original = looked_up = event.spelled_out(rules.num_experts) if may_change else event
    selection: Selection | None = None
    routes = may_change and rules.lets_change(rules.routing.is_lossless, original)
    if routes:
        selection = rules.routing.select(original, resident)
        if selection is not None:
            looked_up = changed(original, selection, rules.num_experts)
    absent = [key for key in looked_up.keys if key not in resident]
    if not absent and not (may_change or rules.ladder):
        return Plan(event, (), (), event)
    # Misses have no pending prefetch; the other absent keys are late.
    missed: Sequence[int] = absent
    if rules.prefetches and link.active:
        missed = link.without_pending(absent)
    miss = rules.lossy_miss(original)
    executed, demands, substituted = looked_up, None, 0
    demanded = absent
    if miss is None and rules.ladder:
        # Lossy algorithms may have left residents at a lower level, which does not suffice here.
        demanded = [key for key in looked_up.keys if resident.get(key, 1) > 0]
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
        demands = [at_best[key] for key in demanded]
    plan = Plan(executed, demands, absent, looked_up)
    plan.late = len(absent) - len(missed)
    plan.collisions = cache.count_evicted_in_this_pass(missed)
    plan.token_misses = token_miss_count(looked_up, rules.num_experts, absent)
    if selection is not None:
        plan.selection, plan.substituted = selection, substituted
        plan.dropped, plan.unfaithful = _judge(original.experts, selection)
    if miss is not None and absent:
        plan.avoided = len(set(absent).difference(executed.keys))
    if (miss is not None or routes) and len(original.weights):
        plan.weighed_tokens = original.num_tokens
        if selection is not None:
            plan.lost_weight = _lost_weight(original, selection)
    return plan


def _with_late(
    fetches: Sequence[Fetch],
    absent: Sequence[int],
    missed: Sequence[int],
    executed: Event,
    rules: Rules,
) -> list[Fetch]:
    """Return, in order of need, an algorithm's fetches and the late keys that it leaves in place.

    Late keys are executed on arrival, and become demands if they have not begun to move.
    """
    late = set(absent).difference(missed).intersection(executed.keys)
    place = {key: index for index, key in enumerate(absent)}
    demands = [*fetches, *(rules.at_best[key] for key in late)]
    return sorted(demands, key=lambda fetch: place.get(fetch.key, len(place)))


def changed(event: Event, selection: Selection, num_experts: int) -> Event:
    """Return the event with a changed selection: its experts, keys and gate scores."""
    experts, weights = selection.experts, event.weights
    if len(weights) and len(event.logits):
        scores, executed = softmax(event.logits), event.experts != DROPPED
        scores[executed.nonzero()[0], event.experts[executed]] = weights[executed]
        weights = np.take_along_axis(scores, experts, axis=-1)
        if selection.weights is not None:
            by_rule = np.isnan(selection.weights)
            weights = np.where(by_rule, weights, selection.weights)
    keep, base = selection.keep, event.layer * num_experts
    if keep is None and event.num_tokens == 1:
        keys = [*dict.fromkeys([base + expert for expert in experts.tolist()[0]])]
    else:
        if keep is not None:
            experts = np.where(keep, experts, DROPPED)
        keys = unique_in_order(event.layer, num_experts, experts[experts >= 0])
    return event._replace(keys=keys, experts=experts, weights=weights)


def _lost_weight(event: Event, selection: Selection) -> float:
    """Return the weight shares (1 per token) of chosen experts that are not executed, summed."""
    executed_experts = selection.experts
    if selection.keep is not None:
        executed_experts = np.where(selection.keep, executed_experts, DROPPED)
    executed = (event.experts[:, :, None] == executed_experts[:, None, :]).any(axis=-1)
    return float(weight_shares(event)[~executed].sum(dtype=np.float64))


def _judge(chosen: IntArray, selection: Selection) -> tuple[int, int]:
    """Count a selection's dropped entries, and executed ones that the router did not choose."""
    if len(chosen) == 1 and selection.keep is None:
        router_experts = chosen.tolist()[0]
        return 0, sum([expert not in router_experts for expert in selection.experts.tolist()[0]])
    faithful = (selection.experts[:, :, None] == chosen[:, None, :]).any(axis=-1)
    dropped = 0
    if selection.keep is not None:
        dropped = int((~selection.keep).sum())
        faithful |= ~selection.keep
    return dropped, int((~faithful).sum())


class Prefetches:
    """Queues the prefetcher's proposals for the link, and counts how many of them events need."""

    def __init__(
        self, geometry: Geometry, caches: Sequence[ExpertCache], link: Link, rules: Rules
    ) -> None:
        self._num_layers = geometry.num_layers
        self._num_experts = geometry.num_experts
        self._caches = caches
        self._link = link
        self._rules = rules
        self.answers: Iterator[Sequence[int]] | None = None
        """The proposals of the coming events where they are known already; None: ask."""
        self._levels: dict[int, int] = {}
        """Key -> precision level to prefetch it at; the best where absent."""
        self._predictions: dict[int, set[int]] = {}
        self._num_batches = 0

    def forget(self) -> None:
        """Discard all predictions: no event will be counted against them."""
        self._predictions.clear()

    def judge(self, event: Event, record: PassRecord) -> None:
        """Count the keys predicted for an event, and those of them that it needs."""
        predicted = self._predictions.pop(event.layer, None)
        if predicted is not None:
            record.predicted += len(predicted)
            record.predicted_right += len(predicted.intersection(event.keys))
            record.predictable += len(event.keys)

    def level_of(self, key: int) -> int:
        """Return the precision level at which a queued key is to be loaded."""
        return self._levels.get(key, 0)

    def submit(self, event: Event, ready_s: float) -> None:
        """Queue the prefetcher's proposals at an event, which are ready at `ready_s`.

        With a precision ladder the miss algorithm chooses the levels; resident and pending experts
        keep theirs.
        """
        answers = self.answers
        proposed = self._rules.prefetch.propose(event) if answers is None else next(answers)
        miss = self._rules.lossy_miss(event) if self._rules.ladder else None
        levels = {} if miss is None else self._choose_levels(event, proposed, miss)
        self._queue(proposed, event.pass_index, event.layer, ready_s, levels)

    def submit_draft(
        self, keys: Sequence[int], pass_index: int, ready_s: float, batched: bool
    ) -> None:
        """Queue one layer's keys, proposed while drafting for a pass that has not yet begun."""
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
        """Queue the absent keys; those of layers up to `after` are for the next pass.

        Resident keys are reported to the eviction algorithm as predicted.
        """
        for layer, layer_keys in self._by_layer(keys):
            predicted = self._predictions.get(layer)
            if predicted is None:
                self._predictions[layer] = set(layer_keys)
            else:
                predicted.update(layer_keys)
            cache = self._caches[layer]
            resident = cache.resident
            absent = [key for key in layer_keys if key not in resident]
            if not absent:
                cache.eviction.on_all_predicted(layer_keys)
                continue
            if len(absent) < len(layer_keys):
                cache.eviction.on_all_predicted([key for key in layer_keys if key in resident])
            due = (pass_index + (layer <= after)) * self._num_layers + layer
            fresh = self._link.submit(absent, due, ready_s, batch)
            if levels or self._levels:
                self._levels.update((key, levels.get(key, 0)) for key in fresh)

    def _by_layer(self, keys: Sequence[int]) -> Iterable[tuple[int, Sequence[int]]]:
        """Split proposals into runs of keys of one layer, in order."""
        if not keys:
            return ()
        num_experts = self._num_experts
        layer = keys[0] // num_experts
        if min(keys) // num_experts == layer == max(keys) // num_experts:
            return ((layer, keys),)
        runs = groupby(keys, lambda key: key // num_experts)
        return ((layer, list(run)) for layer, run in runs)

    def _choose_levels(
        self, event: Event, keys: Sequence[int], miss: MissAlgorithm
    ) -> dict[int, int]:
        by_layer: dict[int, list[int]] = {}
        for key in keys:
            by_layer.setdefault(key // self._num_experts, []).append(key)
        levels: dict[int, int] = {}
        for layer, layer_keys in by_layer.items():
            levels.update(
                zip(layer_keys, miss.prefetch_levels(event, layer, layer_keys), strict=True)
            )
        return levels

"""Decide: what one event needs, found out before anything of it moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from lm_eval_moecache.algorithms.miss.base import MissAlgorithm, weight_shares
from lm_eval_moecache.algorithms.policy import Policy
from lm_eval_moecache.algorithms.prefetch.base import PrefetchAlgorithm
from lm_eval_moecache.algorithms.routing.base import RoutingAlgorithm
from lm_eval_moecache.engine.cache import ExpertCache
from lm_eval_moecache.engine.link import Link
from lm_eval_moecache.records.arrays import IntArray, softmax
from lm_eval_moecache.records.event import (
    DROPPED,
    PREFILL,
    Event,
    Fetch,
    token_miss_count,
    unique_in_order,
)
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.ledger import PassRecord
from lm_eval_moecache.records.selection import Selection


@dataclass(frozen=True, slots=True)
class Rules:
    """What decides: an algorithm per axis, and what of them and the model all events share.

    The eviction algorithms live in their caches.
    """

    routing: RoutingAlgorithm
    prefetch: PrefetchAlgorithm
    miss: MissAlgorithm
    decode_only: bool
    """Whether lossy algorithms stand aside in prefill (`phases=decode`)."""
    num_experts: int
    top_k: int
    may_change: bool
    """Whether a selection can change at all."""
    prefetches: bool
    ladder: bool
    """Whether the store has several levels of precision."""
    at_best: tuple[Fetch, ...]
    """Key -> its fetch at the best level, made once: most demands are one of them."""

    @staticmethod
    def of(geometry: Geometry, policy: Policy, seed: int) -> Rules:
        """Build the policy's algorithms for a model."""
        routing = policy.routing.build(geometry, seed)
        prefetch = policy.prefetch.build(geometry, seed)
        miss = policy.miss.build(geometry, seed)
        return Rules(
            routing=routing,
            prefetch=prefetch,
            miss=miss,
            decode_only=policy.phases == "decode",
            num_experts=geometry.num_experts,
            top_k=geometry.top_k,
            may_change=not (routing.is_lossless and miss.is_lossless),
            prefetches=prefetch.is_active,
            ladder=len(geometry.precision) > 1,
            at_best=tuple(map(Fetch, range(geometry.num_layers * geometry.num_experts))),
        )

    def lets_change(self, is_lossless: bool, event: Event) -> bool:
        """Whether an algorithm may change results at this event (`phases=decode`)."""
        if is_lossless:
            return False
        return not (self.decode_only and event.phase == PREFILL)

    def lossy_miss(self, event: Event) -> MissAlgorithm | None:
        """Return the miss algorithm where it acts on this event, None where all is loaded."""
        return self.miss if self.lets_change(self.miss.is_lossless, event) else None


@dataclass
class Plan:
    """What an executor carries out, and what became of an event once it has.

    The executor adds the `levels`; all else stays as it was decided. Without slots, so that what
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
        record.late += self.late
        record.misses += len(self.absent) - self.late
        record.collisions += self.collisions
        record.token_misses += self.token_misses
        record.substituted += self.substituted
        record.dropped += self.dropped
        record.unfaithful += self.unfaithful
        record.avoided += self.avoided
        record.weighed_tokens += self.weighed_tokens
        record.lost_weight += self.lost_weight


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

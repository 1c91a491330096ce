"""Decides what an event executes and demands, before any byte moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lm_eval_moecache.algorithms.miss.base import MissAlgorithm, weight_shares
from lm_eval_moecache.algorithms.parameters import OverRows
from lm_eval_moecache.algorithms.policy import Policy
from lm_eval_moecache.algorithms.prefetch.base import PrefetchAlgorithm
from lm_eval_moecache.algorithms.registry import is_own
from lm_eval_moecache.algorithms.routing.base import RoutingAlgorithm
from lm_eval_moecache.records.arrays import FloatArray, IntArray, each_token, softmax
from lm_eval_moecache.records.event import (
    DROPPED,
    PREFILL,
    UNSEEN_SCORES,
    Event,
    Fetch,
    unique_in_order,
)
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.ledger import Counters
from lm_eval_moecache.records.selection import Selection
from lm_eval_moecache.records.tokens import Tokens


class Rules:
    """The algorithms that decide, and the facts about them and the model that all events share.

    The eviction algorithms are the caches'.
    """

    def __init__(
        self, geometry: Geometry, policy: Policy, seed: int, like: Rules | None = None
    ) -> None:
        """`like` are rules of the same setting: what they have read and worked out is shared."""

        def made(axis: str) -> Any:
            rule = getattr(like, axis, None)
            if isinstance(rule, OverRows) and is_own(type(rule)):
                return rule.reset_copy()
            return getattr(policy, axis).build(geometry, seed)

        self.routing: RoutingAlgorithm = made("routing")
        self.prefetch: PrefetchAlgorithm = made("prefetch")
        self.miss: MissAlgorithm = made("miss")
        self._geometry = geometry
        self.decode_only = policy.phases == "decode"
        """Whether lossy algorithms are off during prefill (`phases=decode`)."""
        self.num_experts, self.top_k = geometry.num_experts, geometry.top_k
        self.is_lossy = not (self.routing.is_lossless and self.miss.is_lossless)
        """Whether any algorithm may change a selection."""
        self.reads_changed_weights = True
        """Whether an algorithm looks at the weights of a changed selection."""
        self.prefetches = self.prefetch.is_active
        self.ladder = len(geometry.precision) > 1
        """Whether the store has several precision levels."""

    def restart(self, policy: Policy, seed: int) -> None:
        """Put every algorithm back into the state it was made in."""
        for axis in ("routing", "prefetch", "miss"):
            # What was planned for a draft stage is no state of its rule.
            if not getattr(getattr(self, axis), "needs_draft", False):
                copy_state(getattr(self, axis), getattr(policy, axis).build(self._geometry, seed))

    def get_ready(self) -> None:
        """Load or make the machine code of the rules that may change a selection."""
        for rule in (self.routing, self.miss):
            if not rule.is_lossless:
                rule.get_ready()

    def applies(self, rule: RoutingAlgorithm | MissAlgorithm, event: Event) -> bool:
        """Whether a rule may change results at this event (`phases=decode`)."""
        return not (rule.is_lossless or (self.decode_only and event.phase == PREFILL))

    def lossy_miss(self, event: Event) -> MissAlgorithm | None:
        """Return the miss algorithm if it acts on this event; None if all misses are loaded."""
        return self.miss if self.applies(self.miss, event) else None


def copy_state(algorithm: Any, new: Any) -> None:
    """Give an algorithm the state of another of its kind, where others hold on to the object."""
    vars(algorithm).clear()
    vars(algorithm).update(vars(new))


@dataclass
class Plan:
    """The decision on an event: what it executes, and what it demands.

    Victims are not part of it: an eviction rule learns of each load and arrival before it is asked
    for the next victim, and with several waves the pins change in between.
    """

    event: Event
    """The event as executed: a changed selection has its own experts, weights and keys here."""
    looked_up: Event
    """The event after routing and before the miss algorithm, whose lookups are counted."""
    demands: Sequence[Fetch] | None = None
    """The experts to load, in this order; None for those looked up that are not at the best level.
    """
    selection: Selection | None = None
    """The changed selection; None where the router's own is executed."""
    levels: Mapping[int, int] | None = field(default=None, init=False)
    """Executed key -> its precision level; None where the store has one level."""


def route(event: Event, rules: Rules, resident: Mapping[int, int]) -> Plan:
    """Let the routing algorithm choose, given the residents of the event's layer."""
    selection = rules.routing.select(event, resident)
    if selection is None:
        return Plan(event, event)
    looked_up = changed(event, selection, rules)
    return Plan(looked_up, looked_up, selection=selection)


def resolve(
    plan: Plan,
    original: Event,
    rules: Rules,
    absent: Sequence[int],
    missed: Sequence[int],
    resident: Mapping[int, int],
    count: Counters,
) -> None:
    """Let the miss algorithm choose, and count what the decision changes.

    `absent` are the looked-up keys that are not resident, `missed` those of them of which no
    prefetch is on its way. Changes neither cache nor link; the algorithms may update their own
    state (a running average, a random draw).
    """
    looked_up, miss, substituted = plan.looked_up, rules.lossy_miss(original), 0
    if miss is not None:
        asked = missed if miss.awaits_late else absent
        if asked or (rules.ladder and miss.upgrade):
            resolution = miss.resolve(looked_up, asked, resident)
            if resolution is not None:
                plan.demands, change = resolution.fetch, resolution.selection
                if change is not None:
                    moved = (change.experts != looked_up.experts) & (looked_up.experts != DROPPED)
                    if change.keep is not None:
                        moved &= change.keep
                    substituted = int(moved.sum())
                    first = plan.selection
                    plan.selection = change if first is None else change.after(first)
                    plan.event = changed(looked_up, plan.selection, rules)
                if len(asked) < len(absent):
                    plan.demands = _with_late(plan.demands, absent, missed, plan.event)
        if plan.demands is None and rules.ladder:
            # Residents at a lower level suffice where the rule has acted.
            plan.demands = [Fetch(key) for key in absent]
        if absent:
            count.avoided += len(set(absent).difference(plan.event.keys))
    if plan.selection is not None:
        dropped, unfaithful = _judge(original.experts, plan.selection)
        count.substituted += substituted
        count.dropped += dropped
        count.unfaithful += unfaithful
    if (miss is not None or rules.applies(rules.routing, original)) and len(original.weights):
        if absent or (plan.selection is not None and plan.selection.changes(original.experts)):
            count.weighed_tokens += original.num_tokens
        if plan.selection is not None:
            count.lost_weight += _lost_weight(original, plan.selection)


def _with_late(
    fetches: Sequence[Fetch],
    absent: Sequence[int],
    missed: Sequence[int],
    executed: Event,
) -> list[Fetch]:
    """Return, in order of need, an algorithm's fetches and the late keys that it leaves in place.

    Late keys are executed on arrival, and become demands if they have not begun to move.
    """
    late = set(absent).difference(missed).intersection(executed.keys)
    place = {key: index for index, key in enumerate(absent)}
    demands = [*fetches, *map(Fetch, late)]
    return sorted(demands, key=lambda fetch: place.get(fetch.key, len(place)))


def changed(event: Event, selection: Selection, rules: Rules) -> Event:
    """Return the event with a changed selection: its experts, keys and gate scores."""
    experts, num_experts = selection.experts, rules.num_experts
    weights = weights_of(event, selection) if rules.reads_changed_weights else UNSEEN_SCORES
    keep, base = selection.keep, event.layer * num_experts
    if keep is None and event.num_tokens == 1:
        keys = [*dict.fromkeys([base + expert for expert in experts.tolist()[0]])]
    else:
        if keep is not None:
            experts = np.where(keep, experts, DROPPED)
        keys = unique_in_order(event.layer, num_experts, experts[experts >= 0])
    return event._replace(keys=keys, experts=experts, weights=weights)


def weights_of(event: Event | Tokens, selection: Selection) -> FloatArray:
    """Return the gate scores of a changed selection's experts, [tokens, top_k]."""
    experts, weights = selection.experts, event.weights
    if not (len(weights) and len(event.logits)):
        return weights
    scores, executed = softmax(event.logits), event.experts != DROPPED
    scores[executed.nonzero()[0], event.experts[executed]] = weights[executed]
    weights = scores[each_token(experts), experts]
    if selection.weights is None:
        return weights
    return np.where(np.isnan(selection.weights), weights, selection.weights)


def _lost_weight(event: Event, selection: Selection) -> float:
    """Return the weight shares (1 per token) of chosen experts that are not executed, summed."""
    if len(event.experts) == 1 and selection.keep is None:
        # The same sum, a third of the time: doubles hold a few float32 shares without rounding.
        chosen, kept = event.experts.tolist()[0], selection.experts.tolist()[0]
        shares = zip(chosen, weight_shares(event.experts, event.weights).tolist()[0], strict=True)
        return float(sum([share for expert, share in shares if expert not in kept]))
    executed_experts = selection.experts
    if selection.keep is not None:
        executed_experts = np.where(selection.keep, executed_experts, DROPPED)
    executed = (event.experts[:, :, None] == executed_experts[:, None, :]).any(axis=-1)
    return float(weight_shares(event.experts, event.weights)[~executed].sum(dtype=np.float64))


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

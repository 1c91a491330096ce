"""What an event does where the store has several rungs of precision."""

from __future__ import annotations

from collections.abc import Sequence

from lm_eval_moecache.core.cache import ExpertCache
from lm_eval_moecache.core.clock import Clock
from lm_eval_moecache.core.records import Event, Fetch, num_assignments


def not_good_enough(cache: ExpertCache, keys: Sequence[int]) -> list[int]:
    """Return the keys that are not near at the best rung."""
    return [key for key in keys if cache.resident.get(key, 1) > 0]


def let_worse_go(cache: ExpertCache, fetches: Sequence[Fetch]) -> None:
    """Free copies that are about to be loaded again: to this event they are of no use."""
    for fetch in fetches:
        held = cache.resident.get(fetch.key)
        if held is not None:
            assert held > fetch.rung, f"key {fetch.key} is near at rung {held} already"
            cache.let_go(fetch.key)


def execute_by_rung(clock: Clock, cache: ExpertCache, event: Event, keys: Sequence[int]) -> int:
    """Account for keys at the rungs at which they are near: a set of kernels for each.

    Writes the rungs to the event; returns the assignments executed below the best rung.
    """
    num_experts = cache.num_experts
    event.rungs = event.rungs or {}
    by_rung: dict[int, list[int]] = {}
    for key in keys:
        event.rungs[key] = cache.resident[key]
        by_rung.setdefault(cache.resident[key], []).append(key)
    lower = 0
    for rung, own in sorted(by_rung.items()):
        assignments = num_assignments(event, own, num_experts)
        clock.experts(event.layer, len(own), assignments, rung)
        lower += assignments if rung else 0
    return lower

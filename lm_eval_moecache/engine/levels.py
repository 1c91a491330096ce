"""What an event does where the store has several levels of precision."""

from __future__ import annotations

from collections.abc import Sequence

from lm_eval_moecache.engine.cache import ExpertCache
from lm_eval_moecache.engine.clock import Clock
from lm_eval_moecache.records.event import Event, Fetch, num_assignments


def not_good_enough(cache: ExpertCache, keys: Sequence[int]) -> list[int]:
    """Return the keys that are not near at the best level."""
    return [key for key in keys if cache.resident.get(key, 1) > 0]


def let_worse_go(cache: ExpertCache, fetches: Sequence[Fetch]) -> None:
    """Free copies that are about to be loaded again: to this event they are of no use."""
    for fetch in fetches:
        held = cache.resident.get(fetch.key)
        if held is not None:
            assert held > fetch.level, f"key {fetch.key} is near at level {held} already"
            cache.let_go(fetch.key)


def execute_by_level(clock: Clock, cache: ExpertCache, event: Event, keys: Sequence[int]) -> int:
    """Account for keys at the levels at which they are near: a set of kernels for each.

    Writes the levels to the event; returns the assignments executed below the best level.
    """
    num_experts = cache.num_experts
    event.levels = event.levels or {}
    by_level: dict[int, list[int]] = {}
    for key in keys:
        event.levels[key] = cache.resident[key]
        by_level.setdefault(cache.resident[key], []).append(key)
    lower = 0
    for level, own in sorted(by_level.items()):
        assignments = num_assignments(event, own, num_experts)
        clock.experts(event.layer, len(own), assignments, level)
        lower += assignments if level else 0
    return lower

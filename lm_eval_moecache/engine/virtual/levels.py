"""What the virtual executor does where the store has several levels of precision."""

from __future__ import annotations

from collections.abc import Sequence

from lm_eval_moecache.engine.cache import ExpertCache
from lm_eval_moecache.engine.virtual.clock import VirtualClock
from lm_eval_moecache.records.event import Event, Fetch, num_assignments


def release_worse(cache: ExpertCache, fetches: Sequence[Fetch]) -> None:
    """Free copies that are about to be loaded again: to this event they are of no use."""
    for fetch in fetches:
        held = cache.resident.get(fetch.key)
        if held is not None:
            assert held > fetch.level, f"key {fetch.key} is resident at level {held} already"
            cache.release_for_upgrade(fetch.key)


def execute_by_level(
    clock: VirtualClock, event: Event, levels: dict[int, int], num_experts: int
) -> int:
    """Account for keys at the levels at which they are resident: a set of kernels for each.

    `levels` are those keys' own. Returns the assignments executed below the best level.
    """
    by_level: dict[int, list[int]] = {}
    for key, level in levels.items():
        by_level.setdefault(level, []).append(key)
    lower = 0
    for level, own in sorted(by_level.items()):
        assignments = num_assignments(event, own, num_experts)
        clock.experts(event.layer, len(own), assignments, level)
        lower += assignments if level else 0
    return lower

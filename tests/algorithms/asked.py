"""How rules that choose are asked here: about one row, with some experts of its layer resident."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from lm_eval_moecache.records.event import DROPPED, Event
from lm_eval_moecache.records.selection import Selection
from lm_eval_moecache.testing.contracts import placed


def choose(rule: Any, event: Event, resident: Collection[int] = ()) -> Selection | None:
    """Return what a rule chooses with these experts of the layer resident."""
    flags = np.isin(np.arange(event.num_experts), [*resident])
    selection: Selection | None = rule.choose(placed(event, rule, flags))
    return selection


def executed(event: Event, selection: Selection | None) -> Any:
    """Return the experts [tokens, top_k] that are executed."""
    if selection is None:
        return event.experts
    if selection.keep is None:
        return selection.experts
    return np.where(selection.keep, selection.experts, DROPPED)


def resolve(
    rule: Any, event: Event, resident: Mapping[int, int]
) -> tuple[Selection | None, dict[int, int]]:
    """Return what a miss rule chooses, and which experts are then loaded at which level.

    `resident` are experts with the level of each.
    """
    selection = choose(rule, event, resident)
    levels, loaded = rule.levels(event.experts, event.weights), dict[int, int]()
    for expert, level in zip(
        executed(event, selection).ravel().tolist(), levels.ravel().tolist(), strict=True
    ):
        if expert >= 0:
            loaded[expert] = min(level, loaded.get(expert, level))
    for expert, held in resident.items():
        if expert in loaded and not (rule.upgrade and loaded[expert] < held):
            del loaded[expert]
    return selection, loaded

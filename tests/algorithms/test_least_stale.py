"""Least-Stale on a three-layer trace worked by hand, in both readings of its order."""

from __future__ import annotations

from typing import Any

import pytest

from lm_eval_moecache.algorithms.registry import find_algorithm
from lm_eval_moecache.records.event import DECODE, Event
from lm_eval_moecache.testing.streams import make_geometry

# Layer 0 has the keys 0-3, layer 1 4-7, layer 2 8-11.
GEOMETRY = make_geometry(num_layers=3, num_experts=4, top_k=2)


def after_one_pass(**parameters: Any) -> Any:
    """One pass has used two experts a layer, and the next has begun."""
    eviction = find_algorithm("eviction", "least_stale")(GEOMETRY, **parameters)
    eviction.on_pass(0)
    for layer, keys in enumerate([(0, 1), (4, 5), (8, 9)]):
        use(eviction, 0, layer, *keys)
    eviction.on_pass(1)
    return eviction


def use(eviction: Any, pass_index: int, layer: int, *keys: int) -> None:
    known = order_of_leaving(eviction, 0, peek=True)
    for key in keys:
        if key not in known:
            eviction.on_insert(key, False)
    eviction.on_event(Event(pass_index, layer, DECODE, 1, list(keys)))


def order_of_leaving(eviction: Any, layer: int, peek: bool = False) -> list[int]:
    """Ask for one victim after the other while `layer` is served; with `peek` none is evicted."""
    found: list[int] = []
    while (key := eviction.victim(set(found), layer)) is not None:
        found.append(key)
        if not peek:
            eviction.on_evict(key)
    return found


@pytest.mark.parametrize(
    ("layer", "protect", "expected"),
    [
        # Pass 1 is at layer 1 and has used 0 again: 1, 4 and 5 are stale and reached, then 8 and 9
        # are stale and to come, and 0 and 2 are current.
        (1, "coming", [1, 4, 5, 8, 9, 0, 2]),
        (1, "none", [1, 4, 5, 8, 9, 0, 2]),
        # At layer 0 the next turn is layer 1's: the layer furthest from its turn goes first.
        (0, "coming", [1, 8, 9, 4, 5, 0, 2]),
        # Layer order alone: layer 1 loses its experts just before it needs them.
        (0, "none", [1, 4, 5, 8, 9, 0, 2]),
    ],
)
def test_stale_experts_of_layers_reached_leave_first_and_those_to_come_are_protected(
    layer: int, protect: str, expected: list[int]
) -> None:
    eviction = after_one_pass(protect=protect)
    use(eviction, 1, 0, 0, 2)
    assert order_of_leaving(eviction, layer) == expected


def test_current_experts_to_come_are_the_last_to_leave() -> None:
    eviction = after_one_pass()
    use(eviction, 1, 0, 0, 1)
    for key in (6, 10):
        eviction.on_insert(key, True)
    eviction.on_predicted(4)
    assert order_of_leaving(eviction, 0) == [8, 9, 5, 0, 1, 10, 6, 4]


def test_a_prefetch_into_the_next_pass_is_not_stale_there() -> None:
    eviction = after_one_pass()
    for layer, keys in enumerate([(0, 1), (4, 5), (8, 9)]):
        use(eviction, 1, layer, *keys)
    # The last layer foresees the first one's next turn: 3 is fetched, 1 is there already.
    eviction.on_insert(3, True)
    eviction.on_predicted(1)
    eviction.on_pass(2)
    assert order_of_leaving(eviction, 0) == [0, 8, 9, 4, 5, 3, 1]
    # It is for that pass alone.
    again = after_one_pass()
    use(again, 1, 0, 0)
    again.on_predicted(1)
    for pass_index in (2, 3):
        again.on_pass(pass_index)
    assert order_of_leaving(again, 0)[:2] == [0, 1]

"""The Pareto front: the runs that no other run beats in both directions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def pareto_front(
    items: Sequence[T], first: Callable[[T], float | None], second: Callable[[T], float | None]
) -> set[int]:
    """Return the positions of the items on the front, where more of both is better.

    Items without one of the figures are not compared; of equal items, all are on the front.
    """
    points = [(i, first(item), second(item)) for i, item in enumerate(items)]
    known = [(i, x, y) for i, x, y in points if x is not None and y is not None]
    return {
        i
        for i, x, y in known
        if not any(a >= x and b >= y and (a > x or b > y) for _, a, b in known)
    }

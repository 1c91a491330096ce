"""A link that serves several requests at once: when each of them has arrived."""

from __future__ import annotations

from functools import lru_cache


def read_shares(reads: int) -> tuple[float, ...]:
    """Return which part of an expert each of its reads brings, in their order.

    An expert is three projections of as many weights each: gate, up, down. Read by two, as engines
    do that keep gate and up in one tensor, the first read brings two of the three.
    """
    return (2 / 3, 1 / 3) if reads == 2 else (1 / reads,) * reads


@lru_cache(maxsize=4096)
def arrivals(
    sizes: tuple[float, ...], *, lanes: int, lane_rate: float, link_rate: float, latency_s: float
) -> tuple[float, ...]:
    """Return when each request has arrived, in seconds from the first one's start.

    Requests are served in their order, as many at once as there are `lanes`. Each waits its
    latency and then moves at `lane_rate`, or at its share of `link_rate` where too many move
    (bytes/s). Cost: O(requests x lanes).
    """
    times = [0.0] * len(sizes)
    waiting: dict[int, float] = {}
    """Request in a lane -> seconds until it moves."""
    moving: dict[int, float] = {}
    """Request in a lane -> bytes that are left."""
    now, begun = 0.0, 0
    while begun < len(sizes) or waiting or moving:
        while begun < len(sizes) and len(waiting) + len(moving) < lanes:
            waiting[begun] = latency_s
            begun += 1
        rate = min(lane_rate, link_rate / max(len(moving), 1))
        steps = [(wait_s, request) for request, wait_s in waiting.items()]
        steps += [(left / rate, request) for request, left in moving.items()]
        step_s, first = min(steps)
        now += step_s
        waiting = {request: wait_s - step_s for request, wait_s in waiting.items()}
        moving = {request: left - rate * step_s for request, left in moving.items()}
        if first in waiting:
            del waiting[first]
            moving[first] = float(sizes[first])
        else:
            del moving[first]
            times[first] = now
    return tuple(times)

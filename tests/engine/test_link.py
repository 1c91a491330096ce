"""The lanes of the virtual link in small steps of time; `test_oracle.py` compares all else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lm_eval_moecache.engine.replay import replay
from lm_eval_moecache.engine.virtual.costs import arrivals
from lm_eval_moecache.trace.trace import Trace
from tests.engine import traces


@pytest.mark.parametrize("seed", range(5))
def test_arrivals_are_those_of_small_steps(seed: int) -> None:
    """The oracle: time in steps of a ten-thousandth of a second."""
    rng = np.random.default_rng(seed)
    sizes = rng.uniform(1, 20, size=7).tolist()
    lanes, lane_rate, link_rate, latency_s = 3, 10.0, 22.0, 0.05
    step_s, now = 1e-4, 0.0
    active: list[list[float]] = []
    stepped, waiting = [0.0] * 7, list(range(7))
    while waiting or active:
        while waiting and len(active) < lanes:
            request = waiting.pop(0)
            active.append([request, latency_s, sizes[request]])
        moving = [transfer for transfer in active if transfer[1] <= 1e-9]
        now += step_s
        for transfer in active:
            if transfer in moving:
                transfer[2] -= min(lane_rate, link_rate / len(moving)) * step_s
            else:
                transfer[1] -= step_s
        for transfer in [transfer for transfer in active if transfer[2] <= 0]:
            stepped[int(transfer[0])] = now
            active.remove(transfer)
    computed = arrivals(
        tuple(sizes), lanes=lanes, lane_rate=lane_rate, link_rate=link_rate, latency_s=latency_s
    )
    assert computed == pytest.approx(stepped, abs=0.003)


def test_an_effective_rate_is_the_nominal_times_its_share(trace: Trace) -> None:
    nominal, setting = traces.HARDWARE.link_bytes_per_s, traces.setting("on_demand", "30%")
    passes = [
        replay(trace, replace(setting, hardware=replace(traces.HARDWARE, **link))).ledger.passes
        for link in ({"link_efficiency": 0.5}, {"link_bytes_per_s": nominal / 2})
    ]
    assert passes[0] == passes[1]

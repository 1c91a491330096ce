"""How long work takes on a device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_REPEATS = 7


def typical_s(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of the median of several runs: how fast the machine is as it is used."""
    from lm_eval_moecache.model.device import synchronize

    times = []
    for _ in range(_REPEATS + 1):
        synchronize(device)
        start = time.perf_counter()
        work()
        synchronize(device)
        times.append(time.perf_counter() - start)
    # The first one also allocates and compiles.
    return statistics.median(times[1:])

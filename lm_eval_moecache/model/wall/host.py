"""The host's part of a layer: experts executed where they are stored, beside the device's part.

Shapes: T tokens, D hidden size, H width of the first product.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

from lm_eval_moecache.engine.engine import Engine
from lm_eval_moecache.engine.host import HostCosts
from lm_eval_moecache.model.device import synchronize
from lm_eval_moecache.model.grouped import GroupedCall, Matrices, up_name

AT_ONCE = 8
"""Experts whose weights are read from a file, or decoded, together."""
FEW, MANY = 1, 32
"""Tokens of the two measurements that a line is laid through."""
TRIALS = 5
Elsewhere = Callable[[nn.Module, Sequence[int]], Matrices]
"""Returns experts of a layer as they are stored in host memory."""


class Host:
    """One thread that executes experts on the host while the caller goes on."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "moecache-host")

    def run(
        self, call: GroupedCall, elsewhere: Elsewhere, module: nn.Module, experts: Sequence[int]
    ) -> Future[float]:
        """Execute the assignments to these experts; the result is the seconds it took."""
        # Modes are each thread's own: this one has to be as the caller.
        inference = torch.is_inference_mode_enabled()

        def work() -> float:
            start_s = time.perf_counter()
            with torch.inference_mode() if inference else torch.no_grad():
                for start in range(0, len(experts), AT_ONCE):
                    some = experts[start : start + AT_ONCE]
                    places = ((expert, place) for place, expert in enumerate(some))
                    call.run(places, elsewhere(module, some))
            return time.perf_counter() - start_s

        return self._pool.submit(work)

    def close(self) -> None:
        """End the thread. Safe to call twice."""
        self._pool.shutdown()


@torch.no_grad()
def measure_host(
    engine: Engine, elsewhere: Elsewhere, module: nn.Module, device: torch.device
) -> HostCosts:
    """Measure one expert of the first layer on the host, on the device, and over the link."""
    up = getattr(module, up_name(module))
    _, rows, columns = up.shape
    hidden_size, width = (rows, columns) if module.is_transposed else (columns, rows)

    def ones(*shape: int, on: Any = device) -> torch.Tensor:
        return torch.ones(shape, dtype=up.dtype, device=on)

    def on_host(tokens: int) -> Callable[[], object]:
        hidden_TD, index = ones(tokens, hidden_size, on="cpu"), torch.zeros((tokens, 1)).long()

        def once() -> None:
            call = GroupedCall(module, hidden_TD, index, torch.ones((tokens, 1)), len(up))
            call.run([(0, 0)], elsewhere(module, [0]))

        return once

    def on_device(tokens: int) -> Callable[[], object]:
        """The two products alone: what else a kernel does is the same for every expert."""
        hidden_TD, up_DH = ones(tokens, hidden_size), ones(hidden_size, width)
        down_HD = ones(width // 2, hidden_size)

        def once() -> None:
            (hidden_TD @ up_DH)[:, : width // 2] @ down_HD
            synchronize(device)

        return once

    host_fixed, host_each = _line(on_host)
    device_fixed, device_each = _line(on_device)
    hidden = ones(1, hidden_size)
    return HostCosts(
        host_fixed_s=host_fixed,
        host_each_s=host_each,
        device_fixed_s=device_fixed,
        device_each_s=device_each,
        load_s=engine.time_load(1),
        way_s=0.0 if device.type == "cpu" else _fastest(hidden.cpu),
    )


def _line(of_tokens: Callable[[int], Callable[[], object]]) -> tuple[float, float]:
    """Return the seconds that a call takes at all, and for each token more."""
    few_s, many_s = _fastest(of_tokens(FEW)), _fastest(of_tokens(MANY))
    each_s = max(many_s - few_s, 0.0) / (MANY - FEW)
    return max(few_s - FEW * each_s, 0.0), each_s


def _fastest(function: Callable[[], object]) -> float:
    """Return the least of a few times, after a first call that does not count."""
    seconds = []
    for _ in range(1 + TRIALS):
        start_s = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start_s)
    return min(seconds[1:])

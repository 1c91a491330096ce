"""The host's part of a layer: experts executed where they are stored, beside the device's part.

Shapes: T tokens, D hidden size, H width of the first product.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from lm_eval_moecache.engine.engine import Engine
from lm_eval_moecache.engine.host import HostCosts
from lm_eval_moecache.model.device import synchronize
from lm_eval_moecache.model.grouped import GroupedCall, up_name
from lm_eval_moecache.model.wall.kernels import Layer

AT_ONCE = 8
"""Experts whose weights are read from a file, or decoded, together."""
FEW, MANY = 1, 32
"""Tokens of the two measurements that a line is laid through."""
TRIALS = 5


class Host:
    """One thread that executes experts on the host while the caller goes on."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "moecache-host")

    def run(
        self, call: GroupedCall, layer: Layer, module: nn.Module, experts: Sequence[int]
    ) -> Future[float]:
        """Execute the assignments to these experts; the result is the seconds it took."""
        mode = _grad_mode()

        def work() -> float:
            start_s = time.perf_counter()
            with mode():
                for start in range(0, len(experts), AT_ONCE):
                    some = experts[start : start + AT_ONCE]
                    places = ((expert, place) for place, expert in enumerate(some))
                    call.run(places, layer.elsewhere(module, some))
            return time.perf_counter() - start_s

        return self._pool.submit(work)

    def close(self) -> None:
        """End the thread. Safe to call twice."""
        self._pool.shutdown()


def _grad_mode() -> Callable[[], AbstractContextManager[Any]]:
    """Return what a thread has to enter to be as the caller: modes are each thread's own."""
    return torch.inference_mode if torch.is_inference_mode_enabled() else torch.no_grad


def measure_host(
    engine: Engine, layer: Layer, module: nn.Module, device: torch.device
) -> HostCosts:
    """Measure one expert of the first layer on the host, on the device, and over the link."""
    with torch.no_grad():
        host = [_on_host_s(layer, module, tokens) for tokens in (FEW, MANY)]
        on_device = [_on_device_s(module, device, tokens) for tokens in (FEW, MANY)]
    (host_fixed, host_each), (device_fixed, device_each) = _line(host), _line(on_device)
    return HostCosts(
        host_fixed_s=host_fixed,
        host_each_s=host_each,
        device_fixed_s=device_fixed,
        device_each_s=device_each,
        load_s=engine.time_load(1),
        way_s=_way_s(module, device),
    )


def _line(seconds: Sequence[float]) -> tuple[float, float]:
    few_s, many_s = seconds
    each_s = max(many_s - few_s, 0.0) / (MANY - FEW)
    return max(few_s - FEW * each_s, 0.0), each_s


def _fastest(function: Callable[[], Any]) -> float:
    """Return the least of a few times, after a first call that does not count."""
    seconds = []
    for _ in range(1 + TRIALS):
        start_s = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start_s)
    return min(seconds[1:])


def _shape(module: nn.Module) -> tuple[int, torch.dtype]:
    parameter = getattr(module, up_name(module))
    return int(parameter.shape[1 if module.is_transposed else 2]), parameter.dtype


def _on_host_s(layer: Layer, module: nn.Module, tokens: int) -> float:
    hidden_size, dtype = _shape(module)
    hidden_TD = torch.ones((tokens, hidden_size), dtype=dtype)
    index, ones = torch.zeros((tokens, 1), dtype=torch.int64), torch.ones((tokens, 1))

    def once() -> None:
        call = GroupedCall(module, hidden_TD, index, ones, layer.num_experts)
        call.run([(0, 0)], layer.elsewhere(module, [0]))

    return _fastest(once)


def _on_device_s(module: nn.Module, device: torch.device, tokens: int) -> float:
    """Time the two products alone: what else a kernel does is the same for every expert."""
    hidden_size, dtype = _shape(module)
    up = getattr(module, up_name(module))
    width = int(up.shape[2 if module.is_transposed else 1])
    hidden_TD = torch.ones((tokens, hidden_size), dtype=dtype, device=device)
    up_DH = torch.ones((hidden_size, width), dtype=dtype, device=device)
    down_HD = torch.ones((width // 2, hidden_size), dtype=dtype, device=device)

    def once() -> None:
        (hidden_TD @ up_DH)[:, : width // 2] @ down_HD
        synchronize(device)

    return _fastest(once)


def _way_s(module: nn.Module, device: torch.device) -> float:
    if device.type == "cpu":
        return 0.0
    hidden_size, dtype = _shape(module)
    hidden = torch.ones((1, hidden_size), dtype=dtype, device=device)
    return _fastest(lambda: hidden.cpu())

"""CPU cost of the cache: microseconds per MoE layer and decode step, by policy.

A random model of OLMoE's layers, experts and top-k (16, 64, 8) with matrices too small to matter.
Measures the decoding thread's CPU time inside the router hooks and the hooks around the pass, which
other jobs on the machine affect little. The unit is the least that a cache-aware hook can cost on
this machine (floor.py); at 16 rows three times as many units are allowed.

    python benchmarks/bookkeeping.py [--policies on_demand,specmd] [--clock virtual] [--rows 1,16]
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import mean, median
from typing import Any

import torch
from floor import unit_us
from grid import arguments
from setup import SHAPES, random_model, run, take, virtual, wall

from lm_eval_moecache.model.hook import Row, WrappedModel
from lm_eval_moecache.model.moe_layers import find_moe_layers

SHAPE = {**SHAPES["narrow"], "vocab_size": 512}
TARGETS = {"on_demand": 2.0, "specmd": 4.5, "mixture_cache": 4.5, "buddymoe": 6.5}
"""Units at one row."""


class Hooks:
    """Sums this thread's CPU time in the hooks of a wrapped model, pass by pass."""

    def __init__(self, wrapped: WrappedModel) -> None:
        self.seconds: list[float] = []
        """Per pass."""
        model = wrapped.model
        routers = [layer.router._forward_hooks for layer in find_moe_layers(model)]
        for hooks in (model._forward_pre_hooks, model._forward_hooks, *routers):
            for key, hook in hooks.items():
                hooks[key] = self._timed(hook)
        self.handle = model.register_forward_pre_hook(self._begin, prepend=True)

    def _begin(self, *args: Any) -> None:
        self.seconds.append(0.0)

    def _timed(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            start = time.thread_time_ns()
            result = hook(*args)
            self.seconds[-1] += (time.thread_time_ns() - start) / 1e9
            return result

        return timed


def microseconds(model: Any, options: Any, policy: str, rows: int) -> list[float]:
    """Return the mean per layer and decode step for each of a few runs."""
    means, prompt = [], torch.arange(2, 18).repeat(rows, 1)
    for _ in range(5):
        if options.clock == "wall":
            loader = take(model, torch.device("cpu"))
            wrapped = wall(model, loader, policy, options.capacity)
        else:
            wrapped = virtual(model, policy, options.capacity)
        engine, served = wrapped.engine, list[Row]()
        if rows > 1:
            # Each a request of its own, as in an evaluation.
            served = [Row(None if engine.can_defer else engine.fresh()) for _ in range(rows)]
            wrapped.rows = [*served]
        hooks = Hooks(wrapped)
        run(model, prompt, options.tokens)
        start = time.thread_time()
        for row in served:
            if row.engine is None:
                row.serve(engine.fresh())
        seconds = (time.thread_time() - start) / options.tokens + mean(hooks.seconds[1:])
        wrapped.unwrap()
        hooks.handle.remove()
        means.append(1e6 * seconds / SHAPE["num_hidden_layers"])
    return means


def main() -> None:
    defaults = {"policies": ",".join(TARGETS), "clock": ("virtual", "wall"), "rows": "1,16"}
    options = arguments(__doc__, capacity="25%", tokens=64, **defaults)
    torch.set_num_threads(1)
    model = random_model(SHAPE)
    print(f"{options.clock} clock at {options.capacity}; CPU microseconds per layer and step")
    for rows in map(int, options.rows.split(",")):
        unit = unit_us(rows)
        print(f"{rows} rows, unit {unit:.1f} us")
        for policy in options.policies.split(","):
            costs_us = microseconds(model, options, policy, rows)
            units, verdict = min(costs_us) / unit, ""
            if policy in TARGETS:
                most = TARGETS[policy] * (1 if rows == 1 else 3)
                verdict = f", target {most:g}: {'met' if units <= most else 'missed'}"
            print(
                f"{policy}: median {median(costs_us):.0f} (best {min(costs_us):.0f}), "
                f"{units:.1f} units{verdict}",
                flush=True,
            )


if __name__ == "__main__":
    main()

"""CPU cost of the cache: microseconds per MoE layer and decode step, by policy.

A random model of OLMoE's layers, experts and top-k (16, 64, 8) with matrices too small to matter.
Measures the decoding thread's CPU time inside the router hooks and the hooks around the pass, which
other jobs on the machine affect little.

    python benchmarks/bookkeeping.py [--policies on_demand,specmd] [--clock virtual]
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import mean, median
from typing import Any

import torch
from grid import arguments
from setup import SHAPES, random_model, run, take, virtual, wall

from lm_eval_moecache.model.hook import WrappedModel
from lm_eval_moecache.model.moe_layers import find_moe_layers

SHAPE = {**SHAPES["narrow"], "vocab_size": 512}
TARGETS_US = {"on_demand": 12, "specmd": 40, "mixture_cache": 30, "buddymoe": 60}


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


def microseconds(model: Any, clock: str, policy: str, capacity: str, tokens: int) -> list[float]:
    """Return the mean per layer and decode step for each of a few runs."""
    means = []
    for _ in range(5):
        if clock == "wall":
            wrapped = wall(model, take(model, torch.device("cpu")), policy, capacity)
        else:
            wrapped = virtual(model, policy, capacity)
        hooks = Hooks(wrapped)
        run(model, torch.arange(2, 18)[None], tokens)
        wrapped.unwrap()
        hooks.handle.remove()
        means.append(1e6 * mean(hooks.seconds[1:]) / SHAPE["num_hidden_layers"])
    return means


def main() -> None:
    defaults = {"policies": ",".join(TARGETS_US), "clock": ("virtual", "wall")}
    options = arguments(__doc__, capacity="25%", tokens=64, **defaults)
    torch.set_num_threads(1)
    model = random_model(SHAPE)
    print(f"{options.clock} clock at {options.capacity}; CPU microseconds per layer and step")
    for policy in options.policies.split(","):
        costs_us = microseconds(model, options.clock, policy, options.capacity, options.tokens)
        target, verdict = TARGETS_US.get(policy), ""
        if target is not None:
            verdict = f", target {target}: {'met' if min(costs_us) <= target else 'missed'}"
        print(f"{policy}: median {median(costs_us):.0f} (best {min(costs_us):.0f}){verdict}")


if __name__ == "__main__":
    main()

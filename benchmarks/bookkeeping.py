"""What the cache costs the processor: microseconds per MoE layer and decode step, by policy.

A random model of OLMoE's layers, experts and top-k (16, 64, 8) with matrices too small to matter.
The CPU time of the thread that decodes, inside the router hooks and inside those around the pass,
which other jobs on the machine change little.

    python benchmarks/bookkeeping.py [--policies on_demand,specmd] [--clock virtual] [--profile]
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from setup import SHAPES, random_model, run, take, virtual, wall

from lm_eval_moecache.algorithms import ranked
from lm_eval_moecache.model.moe_layers import find_moe_layers
from lm_eval_moecache.model.wrap import WrappedModel

SHAPE = {**SHAPES["narrow"], "vocab_size": 512}
TARGETS_US = {"on_demand": 12, "specmd": 40, "mixture_cache": 50}


class Hooks:
    """Adds up this thread's CPU time in the hooks of a wrapped model, pass by pass."""

    def __init__(self, wrapped: WrappedModel) -> None:
        self.seconds: list[float] = []
        """Of each pass."""
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


def wrap(model: Any, clock: str, policy: str, capacity: str) -> WrappedModel:
    if clock == "wall":
        return wall(model, take(model, torch.device("cpu")), policy, capacity)
    return virtual(model, policy, capacity)


def microseconds(model: Any, clock: str, policy: str, capacity: str, tokens: int) -> list[float]:
    """Return the mean per layer and decode step, of each of a few runs."""
    found = []
    prompt = torch.arange(2, 18)[None]
    for _ in range(5):
        wrapped = wrap(model, clock, policy, capacity)
        hooks = Hooks(wrapped)
        run(model, prompt, tokens)
        wrapped.unwrap()
        hooks.handle.remove()
        found.append(1e6 * statistics.mean(hooks.seconds[1:]) / SHAPE["num_hidden_layers"])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policies", default=",".join(TARGETS_US))
    parser.add_argument("--capacity", default="25%")
    parser.add_argument("--clock", default="virtual", choices=("virtual", "wall"))
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--profile", action="store_true", help="where the time of a run goes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    # As in a run of some hundred tokens: the victims of ranking rules are found by compiled code.
    ranked._PLAIN_VICTIMS = 1
    model = random_model(SHAPE)
    print(f"{options.clock} clock at {options.capacity}; CPU microseconds per layer and step")
    for policy in options.policies.split(","):
        if options.profile:
            profile = cProfile.Profile()
            wrapped = wrap(model, options.clock, policy, options.capacity)
            profile.runcall(run, model, torch.arange(2, 18)[None], options.tokens)
            wrapped.unwrap()
            pstats.Stats(profile).sort_stats("tottime").print_stats("lm_eval_moecache", 25)
        found = microseconds(model, options.clock, policy, options.capacity, options.tokens)
        target = TARGETS_US.get(policy)
        judged = ""
        if target is not None:
            judged = f", target {target}: {'met' if min(found) <= target else 'missed'}"
        print(f"{policy}: median {statistics.median(found):.0f} (best {min(found):.0f}){judged}")


if __name__ == "__main__":
    main()

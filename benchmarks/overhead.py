"""Decode speed of `moecache` against plain transformers, and the cost of the bookkeeping.

One process, one model: plain and wrapped decoding in turn, `--rounds` pairs, median of the paired
ratios. Then the time spent inside the router hooks, per MoE layer and decode step.

    python benchmarks/overhead.py [--policy on_demand] [--capacity 100%] [--shape olmoe2]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from setup import random_model
from transformers import AutoModelForCausalLM

from lm_eval_moecache.algorithms.policy import load_policy
from lm_eval_moecache.engine.engine import Engine, Setting
from lm_eval_moecache.model.moe_layers import describe, find_moe_layers
from lm_eval_moecache.model.wrap import WrappedModel
from lm_eval_moecache.records.hardware import load_hardware
from lm_eval_moecache.records.sizes import parse_capacity
from lm_eval_moecache.tiny import MODEL_DIR


def decode_seconds(model: Any, prompt: torch.Tensor, tokens: int) -> float:
    """Time `tokens` greedy decode steps after a prefill."""
    with torch.no_grad():
        output = model(prompt, use_cache=True)
        cache, token = output.past_key_values, output.logits[:, -1:].argmax(-1)
        start = time.perf_counter()
        for _ in range(tokens):
            output = model(token, past_key_values=cache, use_cache=True)
            token = output.logits[:, -1:].argmax(-1)
        return time.perf_counter() - start


def wrap(model: Any, policy: str, capacity: str) -> WrappedModel:
    layers = find_moe_layers(model)
    geometry = describe(model, layers, "benchmark")
    setting = Setting(
        policy=load_policy(policy),
        capacity=parse_capacity(capacity, geometry),
        hardware=load_hardware("a100-5GBps"),
    )
    return WrappedModel(model, layers, Engine(geometry, setting))


def timed(function: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        start = time.perf_counter()
        result = function(*args)
        seconds.append(time.perf_counter() - start)
        return result

    return run


def hook_seconds(wrapped: WrappedModel, prompt: torch.Tensor, tokens: int) -> list[float]:
    """Time each router hook of the decode steps, apart from everything around it."""
    seconds: list[float] = []
    for layer in find_moe_layers(wrapped.model):
        for key, hook in layer.router._forward_hooks.items():
            layer.router._forward_hooks[key] = timed(hook, seconds)
    decode_seconds(wrapped.model, prompt, tokens)
    return seconds[wrapped.engine.geometry.num_layers :]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pretrained", default=str(MODEL_DIR))
    parser.add_argument("--shape", help="a random model of benchmarks/setup.py instead")
    parser.add_argument("--policy", default="on_demand")
    parser.add_argument("--capacity", default="100%")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=21)
    options = parser.parse_args()
    if options.shape:
        options.pretrained, model = options.shape, random_model(options.shape)
    else:
        model = AutoModelForCausalLM.from_pretrained(options.pretrained, dtype=torch.bfloat16)
    model.eval()
    prompt = torch.arange(2, 66)[None] % model.config.vocab_size
    ratios, plain_s = [], []
    decode_seconds(model, prompt, options.tokens)
    for _ in range(options.rounds):
        plain_s.append(decode_seconds(model, prompt, options.tokens))
        wrapped = wrap(model, options.policy, options.capacity)
        decode_seconds(model, prompt, 4)
        ratios.append(plain_s[-1] / decode_seconds(model, prompt, options.tokens))
        wrapped.unwrap()
    wrapped = wrap(model, options.policy, options.capacity)
    hooks = hook_seconds(wrapped, prompt, options.tokens)
    wrapped.unwrap()
    step_ms = statistics.median(plain_s) / options.tokens * 1000
    print(f"model {options.pretrained}, policy {options.policy}, capacity {options.capacity}")
    print(f"plain decode: {step_ms:.3f} ms a token")
    print(
        f"speed of moecache / plain: median {statistics.median(ratios):.3f} of {len(ratios)} "
        f"pairs (lowest {min(ratios):.3f}, highest {max(ratios):.3f})"
    )
    print(
        f"bookkeeping: median {statistics.median(hooks) * 1e6:.1f} us, mean "
        f"{statistics.mean(hooks) * 1e6:.1f} us per MoE layer and decode step"
    )


if __name__ == "__main__":
    main()

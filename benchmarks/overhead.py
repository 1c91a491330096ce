"""Decode speed of `moecache` under the virtual clock against plain transformers.

One process, one model: plain and wrapped decoding in turn, each of them first in every second pair,
`--rounds` pairs, median of the paired ratios. What the bookkeeping alone costs: bookkeeping.py.

    python benchmarks/overhead.py [--policy on_demand] [--capacity 100%] [--shape olmoe2]
"""

from __future__ import annotations

import argparse
import statistics
import time
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
    for index in range(options.rounds):
        seconds = {}
        for is_ours in (False, True) if index % 2 == 0 else (True, False):
            wrapped = wrap(model, options.policy, options.capacity) if is_ours else None
            decode_seconds(model, prompt, 4)
            seconds[is_ours] = decode_seconds(model, prompt, options.tokens)
            if wrapped is not None:
                wrapped.unwrap()
        plain_s.append(seconds[False])
        ratios.append(seconds[False] / seconds[True])
    step_ms = statistics.median(plain_s) / options.tokens * 1000
    print(f"model {options.pretrained}, policy {options.policy}, capacity {options.capacity}")
    print(f"plain decode: {step_ms:.3f} ms a token")
    print(
        f"speed of moecache / plain: median {statistics.median(ratios):.3f} of {len(ratios)} "
        f"pairs (lowest {min(ratios):.3f}, highest {max(ratios):.3f})"
    )


if __name__ == "__main__":
    main()

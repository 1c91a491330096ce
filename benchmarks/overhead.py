"""Decode speed of `moecache` under the virtual clock against plain transformers.

One process, one model: plain and wrapped decoding in turn, each of them first in every second pair,
`--rounds` pairs, median of the paired ratios. What the bookkeeping alone costs: bookkeeping.py.

    python benchmarks/overhead.py [--policy on_demand] [--capacity 100%] [--shape olmoe2]
"""

from __future__ import annotations

import argparse
import statistics

import torch
from setup import random_model, run, virtual
from transformers import AutoModelForCausalLM

from lm_eval_moecache.tiny import MODEL_DIR


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
    run(model, prompt, options.tokens)
    for index in range(options.rounds):
        seconds = {}
        for is_ours in (False, True) if index % 2 == 0 else (True, False):
            wrapped = virtual(model, options.policy, options.capacity) if is_ours else None
            run(model, prompt, 4)
            seconds[is_ours] = run(model, prompt, options.tokens)[1]
            if wrapped is not None:
                wrapped.unwrap()
        plain_s.append(seconds[False])
        ratios.append(seconds[False] / seconds[True])
    print(f"model {options.pretrained}, policy {options.policy}, capacity {options.capacity}")
    print(f"plain decode: {1000 * statistics.median(plain_s):.3f} ms a token")
    print(
        f"speed of moecache / plain: median {statistics.median(ratios):.3f} of {len(ratios)} "
        f"pairs (lowest {min(ratios):.3f}, highest {max(ratios):.3f})"
    )


if __name__ == "__main__":
    main()

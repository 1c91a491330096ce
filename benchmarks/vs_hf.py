"""Our clocks against plain transformers: the cost of slots, hooks, bookkeeping.

One model, plain and wrapped in turn, alternating which runs first; medians of the paired ratios
(plain seconds / ours). bookkeeping.py measures the bookkeeping alone.

    python benchmarks/vs_hf.py [--shape cpu|olmoe2|olmoe|mixtral] [--device auto] [--clock wall]
    python benchmarks/vs_hf.py --clock virtual --policy mixture_cache --capacity 4/layer
    python benchmarks/vs_hf.py --pretrained FOLDER
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from grid import arguments
from setup import COMMON, device_of, prompts, random_model, run, spread, take, virtual, wall
from transformers import AutoModelForCausalLM


def model_of(options: argparse.Namespace) -> Any:
    if options.pretrained is None:
        return random_model(options.shape)
    return AutoModelForCausalLM.from_pretrained(options.pretrained, dtype=torch.bfloat16).eval()


def main() -> None:
    defaults = {"pretrained": None, "clock": ("wall", "virtual"), "prompt": 128, "rounds": 21}
    options = arguments(__doc__, capacity="100%", **COMMON | defaults)
    device = device_of(options.device)
    plain, cached = model_of(options).to(device), model_of(options)
    if options.clock == "wall":
        wrapped = wall(cached, take(cached, device), options.policy, options.capacity)
    else:
        wrapped = virtual(cached.to(device), options.policy, options.capacity)
    texts = prompts(options.rounds + 4, options.prompt, plain.config.vocab_size, device)
    for prompt in texts[-4:]:
        run(plain, prompt, options.tokens)
        run(cached, prompt, options.tokens)
    pairs = []
    for index, prompt in enumerate(texts[: options.rounds]):
        order = (plain, cached) if index % 2 == 0 else (cached, plain)
        times = [run(model, prompt, options.tokens) for model in order]
        pairs.append(times if order[0] is plain else times[::-1])
    wrapped.unwrap()
    print(
        f"{options.pretrained or options.shape} on {device}, {options.clock} clock, "
        f"{options.policy} at {options.capacity}, {options.rounds} pairs"
    )
    print(f"plain: prefill of {options.prompt} tokens {spread([1e3 * p[0] for p, _ in pairs])} ms")
    print(f"plain: decode {spread([1e3 * p[1] for p, _ in pairs])} ms a token")
    for phase, place in (("prefill: ", 0), ("decode:  ", 1)):
        ratios = [plain_s[place] / our_s[place] for plain_s, our_s in pairs]
        print(f"speed of moecache / plain, {phase}{spread(ratios)}")


if __name__ == "__main__":
    main()

"""The wall clock at 100% capacity against plain transformers: what the slots and hooks cost.

One model, plain and wrapped in turn, each of them first in every second pair; medians of the paired
ratios (plain seconds / ours).

    python benchmarks/vs_hf.py [--shape cpu|olmoe2|olmoe|mixtral] [--device auto]
    python benchmarks/vs_hf.py --pretrained FOLDER
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from setup import device_of, prompts, random_model, run, spread, take, wall
from transformers import AutoModelForCausalLM


def model_of(options: argparse.Namespace) -> Any:
    if options.pretrained is None:
        return random_model(options.shape)
    return AutoModelForCausalLM.from_pretrained(options.pretrained, dtype=torch.bfloat16).eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="cpu")
    parser.add_argument("--pretrained", help="a checkpoint instead of a random model")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--policy", default="on_demand")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=21)
    options = parser.parse_args()
    device = device_of(options.device)
    plain = model_of(options).to(device)
    ours = model_of(options)
    wrapped = wall(ours, take(ours, device), options.policy, "100%")
    texts = prompts(options.rounds + 4, options.prompt, plain.config.vocab_size, device)
    for prompt in texts[-4:]:
        run(plain, prompt, options.tokens)
        run(ours, prompt, options.tokens)
    prefill, decode, plain_s = [], [], []
    for index, prompt in enumerate(texts[: options.rounds]):
        order = (plain, ours) if index % 2 == 0 else (ours, plain)
        times = [run(model, prompt, options.tokens) for model in order]
        theirs, mine = times if order[0] is plain else reversed(times)
        prefill.append(theirs[0] / mine[0])
        decode.append(theirs[1] / mine[1])
        plain_s.append(theirs)
    wrapped.unwrap()
    print(
        f"{options.pretrained or options.shape} on {device}, {options.policy} at 100%, "
        f"{options.rounds} pairs"
    )
    print(f"plain: prefill of {options.prompt} tokens {spread([1e3 * p for p, _ in plain_s])} ms")
    print(f"plain: decode {spread([1e3 * d for _, d in plain_s])} ms a token")
    print(f"speed of moecache / plain, prefill: {spread(prefill)}")
    print(f"speed of moecache / plain, decode:  {spread(decode)}")


if __name__ == "__main__":
    main()

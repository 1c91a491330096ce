"""How much of the link the wall clock uses while the link is the bottleneck.

Copy bandwidth is measured by the mover itself, expert after expert with nothing else running. Then
a model decodes on demand with a small cache: bytes moved over the time in which a transfer was on
its way. Once with the link as it is, once throttled to `--bandwidth`.

    python benchmarks/link.py [--shape cpu|olmoe|mixtral] [--device auto] [--bandwidth 1GB/s]
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from setup import device_of, prompts, random_model, run, spread, take, wall

from lm_eval_moecache.core.sizes import parse_bandwidth
from lm_eval_moecache.core.worker import Transfer


def copy_bandwidth(wrapped: Any, rounds: int) -> list[float]:
    """Return bytes per second of copying every expert into the slots, round after round."""
    pools, geometry = wrapped._store.pools, wrapped.engine.geometry
    nbytes, slots = geometry.expert_bytes[0][0], wrapped.engine.pools[0].num_slots
    keys = range(geometry.num_layers * geometry.num_experts)
    rates = []
    for _ in range(rounds):
        start = time.perf_counter()
        waiting = []
        for key in keys:
            waiting.append(pools.begin(Transfer(key, key % slots, nbytes)))
            if len(waiting) == pools.depth:
                pools.finish(waiting.pop(0))
        for token in waiting:
            pools.finish(token)
        rates.append(len(keys) * nbytes / (time.perf_counter() - start))
    return rates[1:]


def achieved(wrapped: Any, texts: list[torch.Tensor], tokens: int) -> tuple[list[float], float]:
    """Return bytes per second of a busy link for each text, and the share of time it was busy."""
    link, rates = wrapped.engine.link, []
    begin, busy_before = time.perf_counter(), link.busy_s
    for prompt in texts:
        moved, busy_s = link.bytes_moved, link.busy_s
        run(wrapped.model, prompt, tokens)
        rates.append((link.bytes_moved - moved) / (link.busy_s - busy_s))
    return rates, (link.busy_s - busy_before) / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="cpu")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--policy", default="on_demand")
    parser.add_argument("--capacity", default="15%")
    parser.add_argument("--bandwidth", default="1GB/s")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    device = device_of(options.device)
    model = random_model(options.shape)
    loader = take(model, device)
    texts = prompts(options.rounds, 16, model.config.vocab_size, device)
    rate = parse_bandwidth(options.bandwidth)
    print(f"{options.shape} on {device}, {options.policy} at {options.capacity}")
    for name, throttle in (("as it is", None), (f"throttled to {options.bandwidth}", rate)):
        wrapped = wall(model, loader, options.policy, options.capacity, throttle)
        copies = copy_bandwidth(wrapped, options.rounds + 1)
        run(model, texts[0], 2)
        rates, busy = achieved(wrapped, texts, options.tokens)
        wrapped.unwrap()
        bound = [throttle] * len(copies) if throttle is not None else copies
        shares = [mine / top for mine, top in zip(rates, bound, strict=True)]
        print(f"link {name}: copies alone {spread([r / 1e9 for r in copies])} GB/s")
        print(f"link {name}: in a run {spread([r / 1e9 for r in rates])} GB/s, busy {busy:.0%}")
        print(f"link {name}: share of what there is {spread(shares)}")


if __name__ == "__main__":
    main()

"""How much of the link the wall clock uses while the link is the bottleneck.

A model decodes on demand with a small cache. The rate is the bytes that its decode steps demand
over the time in which a demand is outstanding: from the first request until the model continues
with the last expert, including thread wake-up and handover. It is compared with one large copy from
host memory (pinned, to a device) outside our code, or with the rate of `--bandwidth`. So are plain
copies of single experts, and of batches of them that are waited for at once.

    python benchmarks/link.py [--shape cpu|olmoe|mixtral] [--device auto] [--bandwidth 1GB/s]
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from grid import arguments
from setup import COMMON, described, device_of, prompts, random_model, run, spread, take, wall

from lm_eval_moecache.engine.engine import Engine
from lm_eval_moecache.engine.wall.link import Transfer
from lm_eval_moecache.model.device import locked_copy, synchronize
from lm_eval_moecache.records.event import DECODE
from lm_eval_moecache.records.sizes import parse_bandwidth

COPY_BYTES = 2**28


def copy_bandwidth(
    device: torch.device, rounds: int, piece: int = COPY_BYTES, batch: int = 1
) -> list[float]:
    """Return the rate in each round, in bytes per second, of a large copy from host memory.

    In pieces of so many bytes: `batch` copies are queued, then waited for.
    """
    source = torch.ones(COPY_BYTES, dtype=torch.uint8)
    if device.type != "cpu":
        source = locked_copy(source)
    target = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device)
    pairs = list(zip(source.split(piece), target.split(piece), strict=True))
    rates = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        for index, (read, written) in enumerate(pairs, 1):
            written.copy_(read, non_blocking=True)
            if index % batch == 0:
                synchronize(device)
        synchronize(device)
        rates.append(COPY_BYTES / (time.perf_counter() - start))
    return rates[1:]


class Outstanding:
    """Counts the bytes that decode steps demand and the seconds with a demand outstanding."""

    def __init__(self, engine: Engine) -> None:
        self.nbytes, self.seconds = 0, 0.0
        self._engine, self._since = engine, 0.0
        self._link: Any = engine.link
        self._demand, self._arrivals = self._link.demand, self._link.arrivals
        self._link.demand, self._link.arrivals = self.demand, self.arrivals

    def demand(self, transfer: Transfer) -> None:
        if self._engine.alone.phase == DECODE:
            self._since = self._since or time.perf_counter()
            self.nbytes += transfer.nbytes
        self._demand(transfer)

    def arrivals(self) -> list[int]:
        landed: list[int] = self._arrivals()
        if self._since and not self._link.demanded():
            self.seconds += time.perf_counter() - self._since
            self._since = 0.0
        return landed


def achieved(wrapped: Any, texts: list[torch.Tensor], tokens: int) -> tuple[list[float], float]:
    """Return each text's demand rate in bytes per second, and the share of time spent waiting."""
    rates, waited_s, decoded_s = [], 0.0, 0.0
    outstanding = Outstanding(wrapped.engine)
    for prompt in texts:
        outstanding.nbytes, outstanding.seconds = 0, 0.0
        decoded_s += tokens * run(wrapped.model, prompt, tokens)[1]
        waited_s += outstanding.seconds
        rates.append(outstanding.nbytes / outstanding.seconds)
    return rates, waited_s / decoded_s


def main() -> None:
    defaults = {"capacity": "15%", "bandwidth": "1GB/s", "rounds": 7}
    options = arguments(__doc__, **COMMON | defaults)
    device = device_of(options.device)
    model = random_model(options.shape)
    loader = take(model, device)
    texts = prompts(options.rounds, 16, model.config.vocab_size, device)
    rate = parse_bandwidth(options.bandwidth)
    print(f"{options.shape} on {device}, {options.policy} at {options.capacity}")
    whole = statistics.median(copy_bandwidth(device, options.rounds))
    expert = described(model)[1].expert_bytes[0][0]
    for batch in (1, 4, 16, 64):
        rates = copy_bandwidth(device, options.rounds, expert, batch)
        shares = [copied / whole for copied in rates]
        print(f"copies of experts, {batch} at once: share of one large copy {spread(shares)}")
    for name, throttle in (("as it is", None), (f"throttled to {options.bandwidth}", rate)):
        wrapped = wall(model, loader, options.policy, options.capacity, throttle)
        run(model, texts[0], 2)
        copies = copy_bandwidth(device, options.rounds)
        rates, share = achieved(wrapped, texts, options.tokens)
        wrapped.unwrap()
        bound = [throttle] * len(copies) if throttle is not None else copies
        shares = [measured / limit for measured, limit in zip(rates, bound, strict=True)]
        print(f"link {name}: one large copy {spread([r / 1e9 for r in copies])} GB/s")
        print(f"link {name}: in a run {spread([r / 1e9 for r in rates])} GB/s, awaited {share:.0%}")
        print(f"link {name}: share of what there is {spread(shares)}")


if __name__ == "__main__":
    main()

"""Does the virtual clock tell the truth? Its prediction from a calibrated profile against the wall.

The profile of this machine is measured first (`moecache profile hardware`), its link replaced by
`--bandwidth`, to which the wall clock is throttled, with the time of an empty transfer through the
worker as latency. Then the same texts run under both clocks, for
three compositions at two capacities: medians of TTFT and TPOT, and virtual / wall.

    python benchmarks/clock_fidelity.py [--shape cpu|olmoe|mixtral] [--device auto]
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from typing import Any

import torch
from setup import device_of, prompts, random_model, run, take, virtual, wall

from lm_eval_moecache.engine.wall.worker import Transfer, Worker
from lm_eval_moecache.profiling.hardware import measure
from lm_eval_moecache.records.event import PREFILL
from lm_eval_moecache.records.ledger import PassRecord
from lm_eval_moecache.records.sizes import parse_bandwidth


class Nothing:
    """A mover that moves nothing."""

    depth = 1

    def fence(self) -> object:
        return None

    def place(self, transfer: Transfer) -> None:
        return

    def begin(self, transfer: Transfer) -> object:
        return None

    def finish(self, token: object) -> float | None:
        return None

    def synchronize(self) -> None:
        return


def empty_transfer_s() -> float:
    """Return the median seconds from a demand to the caller's going on."""
    worker, seconds = Worker(Nothing()), []
    for key in range(200):
        start = time.perf_counter()
        worker.put(Transfer(key, 0, 0), demanded=True)
        worker.wait_for({key})
        worker.collect()
        seconds.append(time.perf_counter() - start)
        # As long as between two events: both threads have gone to sleep.
        time.sleep(0.002)
    worker.close()
    return statistics.median(seconds)


def medians(passes: list[PassRecord]) -> tuple[float, float]:
    """Return the median seconds of a prefill and of a decode step."""
    first = [p.duration_s for p in passes if p.phase == PREFILL]
    return statistics.median(first), statistics.median(
        p.duration_s for p in passes if p.phase != PREFILL
    )


def passes_of(wrapped: Any, texts: list[torch.Tensor], tokens: int) -> list[PassRecord]:
    """Run the texts, and return the passes of all but the first."""
    for prompt in texts:
        run(wrapped.model, prompt, tokens)
    wrapped.unwrap()
    passes: list[PassRecord] = wrapped.engine.ledger.passes
    return passes[1 + tokens :]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="cpu")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--policies", default="on_demand,mixtral_offloading,specmd")
    parser.add_argument("--capacities", default="25%,50%")
    parser.add_argument("--bandwidth", default="0.5GB/s")
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    device = device_of(options.device)
    rate = parse_bandwidth(options.bandwidth)
    measured = measure("calibrated", str(device), "bfloat16", 2**28, 2048)
    hardware = dataclasses.replace(
        measured, link_bytes_per_s=rate, link_latency_s=empty_transfer_s()
    )
    print(dataclasses.replace(measured, source=""))
    model = random_model(options.shape).to(device)
    moved = random_model(options.shape)
    loader = take(moved, device)
    texts = prompts(options.rounds + 1, options.prompt, model.config.vocab_size, device)
    print(f"{options.shape} on {device}, link {options.bandwidth}; milliseconds, virtual / wall")
    for policy in options.policies.split(","):
        for capacity in options.capacities.split(","):
            told = passes_of(virtual(model, policy, capacity, hardware), texts, options.tokens)
            real = passes_of(wall(moved, loader, policy, capacity, rate), texts, options.tokens)
            row = [f"{policy} at {capacity}:"]
            for name, a, b in zip(("TTFT", "TPOT"), medians(told), medians(real), strict=True):
                row.append(f"{name} {1e3 * a:.1f} / {1e3 * b:.1f} = {a / b:.3f}")
            misses = [sum(p.misses + p.late for p in passes) for passes in (told, real)]
            print(*row, f"misses and late {misses[0]} / {misses[1]}", flush=True)


if __name__ == "__main__":
    main()

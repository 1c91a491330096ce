"""Is the virtual clock accurate? Compares its predictions from a calibrated profile with the wall.

First measures the machine (`moecache profile hardware`) and, for each policy, what decoding a model
of this shape costs on the wall clock beyond reading and moving bytes (its option `--pretrained`),
with the link throttled to `--bandwidth` and at none of the tested capacities. Then runs the same
texts under both clocks, for three compositions at three capacities. All of this is repeated
`--sweeps` times, since machines change speed; each cell reports the sweep with the median ratio.

    python benchmarks/clock_fidelity.py [--shape cpu|olmoe|mixtral] [--device auto]
"""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any, NamedTuple

import torch
from grid import arguments
from setup import device_of, prompts, random_model, run, take, virtual, wall

from lm_eval_moecache.engine.setting import AS_THEY_ARRIVE, TOGETHER
from lm_eval_moecache.profiling._measure import measure, measure_on_wall
from lm_eval_moecache.records.event import PREFILL
from lm_eval_moecache.records.hardware import Hardware
from lm_eval_moecache.records.ledger import PassRecord
from lm_eval_moecache.records.sizes import parse_bandwidth

BAR = 0.15
"""Largest relative error of a prediction."""


def overheads(hardware: Hardware) -> str:
    """Format the calibrated overheads, in microseconds, and the memory rate."""
    names = ("kernel", "layer", "pass", "wait")
    figures = [f"{name} {1e6 * getattr(hardware, name + '_overhead_s'):.1f}" for name in names]
    return f"{', '.join(figures)} us, memory {hardware.memory_bytes_per_s / 1e9:.2f} GB/s"


def speed(passes: list[PassRecord], tokens: int) -> tuple[float, float]:
    """Return the median TTFT and TPOT over the requests, in seconds."""
    first = [p.duration_s for p in passes if p.phase == PREFILL]
    steps = [p.duration_s for p in passes if p.phase != PREFILL]
    requests = [steps[i : i + tokens] for i in range(0, len(steps), tokens)]
    return statistics.median(first), statistics.median(map(statistics.mean, requests))


def passes_of(wrapped: Any, texts: list[torch.Tensor], tokens: int) -> list[PassRecord]:
    """Run the texts and return the passes of all but the first."""
    for prompt in texts:
        run(wrapped.model, prompt, tokens)
    wrapped.unwrap()
    passes: list[PassRecord] = wrapped.engine.ledger.passes
    return passes[1 + tokens :]


class Cell(NamedTuple):
    """A composition at a capacity: TTFT and TPOT as predicted and measured, in seconds; misses."""

    told: tuple[float, float]
    real: tuple[float, float]
    misses: tuple[int, int]


def measured(
    models: tuple[Any, Any, Any], policy: str, capacity: str, hardware: Hardware, options: Any
) -> Cell:
    """Run the same texts under both clocks."""
    model, moved, loader = models
    rate = parse_bandwidth(options.bandwidth)
    texts = prompts(options.rounds + 1, options.prompt, model.config.vocab_size, model.device)
    # On the wall clock a prefill executes experts as they arrive, a decode step all together.
    arriving, together = (
        passes_of(virtual(model, policy, capacity, hardware, execute), texts, options.tokens)
        for execute in (AS_THEY_ARRIVE, TOGETHER)
    )
    real = passes_of(wall(moved, loader, policy, capacity, rate), texts, options.tokens)
    misses = [sum(p.misses + p.late for p in passes) for passes in (together, real)]
    told = speed(arriving, options.tokens)[0], speed(together, options.tokens)[1]
    return Cell(told, speed(real, options.tokens), (misses[0], misses[1]))


def row_of(cells: list[Cell], met: dict[str, int]) -> str:
    """Format a row of the table and count the figures within the bar."""
    row = []
    for place, name in enumerate(met):
        ratios = [cell.told[place] / cell.real[place] for cell in cells]
        middle = sorted(range(len(cells)), key=ratios.__getitem__)[len(cells) // 2]
        predicted_ms, measured_ms = (1e3 * times[place] for times in cells[middle][:2])
        holds = abs(ratios[middle] - 1) <= BAR
        met[name] += holds
        row.append(f"{name} {predicted_ms:.1f} / {measured_ms:.1f} = {ratios[middle]:.3f}")
        row.append(f"({min(ratios):.2f} to {max(ratios):.2f}) {'met' if holds else 'MISSED'};")
    return " ".join(row)


def main() -> None:
    axes = {"policies": "on_demand,mixtral_offloading,specmd", "capacities": "25%,50%,75%"}
    settings = {"bandwidth": "0.5GB/s", "prompt": 32, "tokens": 12, "rounds": 3, "sweeps": 3}
    options = arguments(__doc__, shape="cpu", device="auto", **axes, **settings)
    device = device_of(options.device)
    machine = measure("calibrated", str(device), "bfloat16", 2**28, 2048)
    print(dataclasses.replace(machine, source=""))
    model, moved = random_model(options.shape).to(device), random_model(options.shape)
    models = (model, moved, take(moved, device))
    rate = parse_bandwidth(options.bandwidth)
    policies, capacities = options.policies.split(","), options.capacities.split(",")
    cells: dict[str, list[Cell]] = {}
    for _ in range(options.sweeps):
        for policy in policies:
            hardware = measure_on_wall(machine, moved, models[2], policy, rate)
            print(f"{policy}: {overheads(hardware)}", flush=True)
            for capacity in capacities:
                cell = measured(models, policy, capacity, hardware, options)
                cells.setdefault(f"{policy} at {capacity}", []).append(cell)
    print(f"{options.shape} on {device}, link {options.bandwidth}; milliseconds, virtual / wall")
    met = {"TTFT": 0, "TPOT": 0}
    for name, sweeps in cells.items():
        misses = [sum(counts) for counts in zip(*(cell.misses for cell in sweeps), strict=True)]
        print(f"{name}: {row_of(sweeps, met)} misses and late {misses[0]} / {misses[1]}")
    for name, count in met.items():
        print(f"{name} within {BAR:.0%}: {count} of {len(cells)} cells")


if __name__ == "__main__":
    main()

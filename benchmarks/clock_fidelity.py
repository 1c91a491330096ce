"""Is the virtual clock accurate? Compares its predictions from a calibrated profile with the wall.

First measures the machine (`moecache profile hardware`) and, for each policy, what decoding a model
of this shape costs on the wall clock beyond reading and moving bytes (its option `--pretrained`),
with the link throttled to `--bandwidth` and at none of the tested capacities. Then runs the same
texts under both clocks, for three compositions at three capacities. All of this is repeated
`--sweeps` times, since machines change speed; each cell reports the sweep with the median ratio.

    python benchmarks/clock_fidelity.py [--shape cpu|olmoe|mixtral] [--device auto]
    python benchmarks/clock_fidelity.py --page results/wall_clock

The second form measures nothing: it puts the printed outputs that lie in the folder
(`clock_fidelity*.txt`) as tables into its README.md.
"""

from __future__ import annotations

import dataclasses
import re
import statistics
from pathlib import Path
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
    words = model.config.vocab_size
    texts = prompts(options.rounds + 1, options.prompt, words, model.device)
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


# --- the page ---

KINDS = {
    "clock_fidelity.txt": "with instructions for bf16",
    "clock_fidelity_avx2.txt": "without (AVX2)",
}
"""File of a run's output -> the kind of CPU that it ran on."""
BEGIN, END = "<!-- clock_fidelity -->\n", "<!-- end of clock_fidelity -->"
_ROW = re.compile(
    r"^(\w+) at (\d+%): TTFT \S+ / \S+ = ([\d.]+) \(.*?\) \w+; "
    r"TPOT \S+ / \S+ = ([\d.]+) \(.*?\) \w+;",
    re.MULTILINE,
)


def page_tables(folder: Path) -> str:
    """Return the tables of the outputs in a folder: what holds in how many cells, and each cell."""
    runs = {
        kind: [(f"{row[0]} | {row[1]}", float(row[2]), float(row[3])) for row in rows]
        for file, kind in KINDS.items()
        if (rows := _ROW.findall((folder / file).read_text()))
    }
    head = "| a CPU | TTFT within 15% | TPOT within 15% |\n|---|---|---|\n"
    lines = []
    for kind, rows in runs.items():
        cells = []
        for ratios in zip(*(row[1:] for row in rows), strict=True):
            met = sum(abs(ratio - 1) <= BAR for ratio in ratios)
            cells.append(f"{met} of {len(ratios)} ({min(ratios):.3f} to {max(ratios):.3f})")
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    columns = [f"{name} {kind}" for kind in runs for name in ("TTFT", "TPOT")]
    cells = [f"| policy | capacity | {' | '.join(columns)} |", "|---" * (2 + len(columns)) + "|"]
    by_cell = [dict((cell, ratios) for cell, *ratios in rows) for rows in runs.values()]
    for cell in by_cell[0]:
        ratios = [ratio for cells_of in by_cell for ratio in cells_of.get(cell, ())]
        told = [f"{r:.3f}" if abs(r - 1) <= BAR else f"**{r:.3f}**" for r in ratios]
        cells.append(f"| {cell} | {' | '.join(told)} |")
    return head + "\n".join([*lines, "", *cells, ""])


def write_page(folder: Path) -> None:
    """Replace the tables in the folder's README.md."""
    path = folder / "README.md"
    before, _, rest = path.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    assert end, f"{path} lacks the comments around its tables"
    path.write_text(before + BEGIN + page_tables(folder) + END + after)


def main() -> None:
    axes = {"policies": "on_demand,mixtral_offloading,specmd", "capacities": "25%,50%,75%"}
    settings = {"bandwidth": "0.5GB/s", "prompt": 32, "tokens": 12, "rounds": 3, "sweeps": 3}
    options = arguments(__doc__, shape="cpu", device="auto", page=None, **axes, **settings)
    if options.page is not None:
        return write_page(Path(options.page))
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

"""Load time of `store=ram` and `store=disk` against plain transformers: fresh processes, in turn.

    python benchmarks/load.py [--shape cpu] [--rounds 5] [--cold]

A random model is written once. Each round loads it three times, each time in a process of its own,
from the moment its libraries are imported until the first answer could begin; `plain` touches
every page, as a file that is only mapped is no loaded model. Ratios are of one round, their median
is what counts. `--cold` has the system forget the file's pages before each load.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from grid import arguments
from setup import forget_cached, load_whole, random_model
from vs_accelerate import ours

WAYS = ("plain", "ram", "disk")


def load(way: str, folder: str, capacity: str) -> float:
    """Return the seconds that one load takes."""
    start_s = time.perf_counter()
    if way == "plain":
        load_whole(folder)
    else:
        ours(folder, "on_demand", capacity, torch.device("cpu"), way)
    return time.perf_counter() - start_s


def main() -> None:
    options = arguments(__doc__, shape="cpu", rounds=5, capacity="50%", cold=False)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        random_model(options.shape).save_pretrained(folder)
        nbytes = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
        print(f"{options.shape}, {nbytes / 1e6:.0f} MB, {'cold' if options.cold else 'warm'} cache")
        for way in WAYS * options.rounds:
            if options.cold:
                forget_cached(folder)
            with multiprocessing.get_context("spawn").Pool(1) as fresh:
                seconds[way].append(fresh.apply(load, (way, folder, options.capacity)))
    for way, own in seconds.items():
        ratios = [a / b for a, b in zip(own, seconds["plain"], strict=True)]
        print(
            f"{way}: median {median(own):.2f} s, of plain's {median(ratios):.2f} "
            f"({min(ratios):.2f} to {max(ratios):.2f})"
        )


if __name__ == "__main__":
    main()

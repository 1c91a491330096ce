"""Load time of `store=ram` and `store=disk` against plain transformers: fresh processes, in turn.

    python benchmarks/load.py [--shape cpu] [--rounds 5] [--cold]

A random model is written once. Each round loads it three times, each time in a process of its own,
from the moment its libraries are imported until the first answer could begin; `plain` touches
every page, as a file that is only mapped is no loaded model. Ratios are of one round, their median
is what counts. `--cold` has the system forget the file's pages before each load.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from memory_limit import forget_cached
from setup import load_whole, random_model
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--capacity", default="50%")
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        print(load(options.way, options.folder, options.capacity))
        return
    with tempfile.TemporaryDirectory() as folder:
        random_model(options.shape).save_pretrained(folder)
        nbytes = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
        print(f"{options.shape}, {nbytes / 1e6:.0f} MB, {'cold' if options.cold else 'warm'} cache")
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(options.rounds):
            for way in WAYS:
                if options.cold:
                    forget_cached(folder)
                command = [sys.executable, __file__, "--way", way, "--folder", folder]
                command += ["--capacity", options.capacity]
                told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
                seconds[way].append(float(told.split()[-1]))
    for way in WAYS:
        ratios = [a / b for a, b in zip(seconds[way], seconds["plain"], strict=True)]
        low, high = min(ratios), max(ratios)
        print(
            f"{way}: median {statistics.median(seconds[way]):.2f} s, "
            f"of plain's {statistics.median(ratios):.2f} ({low:.2f} to {high:.2f})"
        )


if __name__ == "__main__":
    main()

"""AdapMoE's cache sizes by layer against equal ones, on text they were not solved on.

Usage: python benchmarks/layer_sizes.py [--tiny TRACE.parquet]. Under a minute of one core. Writes
`layer_sizes.json` and `table.md` of results/layer_sizes. Each trace is cut in two: sizes are solved
for on one half and measured on the other, both ways, and on the half that they were solved on.
Misses are LRU's with a cache per layer, empty at the start of each half.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from grid import TRACES, table

from lm_eval_moecache.profiling.layer_sizes import best_sizes, equal_sizes, miss_curves
from lm_eval_moecache.trace.importers import load_trace
from lm_eval_moecache.trace.trace import Trace

SHARES = (5, 10, 25, 50)
Row = dict[str, Any]


def half_curves(trace: Trace) -> list[Any]:
    """Return each half's misses by layer and size: [layers, experts + 1] each.

    Halves are of passes; a prefill that all of a trace begins with is left out, as one event that
    asks for nearly everything says little of sizes.
    """
    geometry = trace.geometry
    first = 1 if trace.num_passes > 1 and trace.requests and len(trace.requests) == 1 else 0
    middle = (first + trace.num_passes) // 2
    curves = []
    for start, stop in pairwise((first, middle, trace.num_passes)):
        curves.append(miss_curves(part_of(trace, start, stop)))
    assert curves[0].shape == (geometry.num_layers, geometry.num_experts + 1)
    return curves


def part_of(trace: Trace, start: int, stop: int) -> Any:
    """Return what `miss_curves` reads of some passes: geometry, keys and their bounds."""
    layers = trace.geometry.num_layers
    bounds = trace.key_bounds[start * layers : stop * layers + 1]
    keys = trace.keys[bounds[0] : bounds[-1]]
    return SimpleNamespace(geometry=trace.geometry, keys=keys, key_bounds=bounds - bounds[0])


def rows_of(name: str, trace: Trace) -> Iterator[Row]:
    halves = half_curves(trace)
    geometry = trace.geometry
    every = geometry.num_layers * geometry.num_experts
    for share in SHARES:
        slots = every * share // 100
        if slots < geometry.num_layers:
            continue
        equal = equal_sizes(geometry.num_layers, slots)
        for solved, measured in ((0, 0), (0, 1), (1, 0), (1, 1)):
            sizes = best_sizes(halves[solved], slots)
            yield {
                "trace": name,
                "share": share,
                "solved_on": solved + 1,
                "measured_on": measured + 1,
                "smallest": min(sizes),
                "largest": max(sizes),
                "equal": rate(halves[measured], equal),
                "adapted": rate(halves[measured], sizes),
            }


def rate(curves: Any, sizes: Sequence[int]) -> float:
    most = curves.shape[1] - 1
    missed = sum(int(c[min(size, most)]) for c, size in zip(curves, sizes, strict=True))
    return missed / int(curves[:, 0].sum())


def render(rows: Sequence[Row]) -> str:
    """One line a trace and capacity: misses of equal sizes, and the change in points."""
    headers = [
        *("Trace", "Capacity", "Equal sizes miss", "Solved and measured on the same half"),
        *("Solved on one half, measured on the other", "Smallest to largest layer"),
    ]
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["trace"], row["share"]), []).append(row)
    cells = [
        [
            name,
            f"{share}%",
            f"{100 * np.mean([r['equal'] for r in own]):.1f}%",
            change([r for r in own if r["solved_on"] == r["measured_on"]]),
            change([r for r in own if r["solved_on"] != r["measured_on"]]),
            f"{min(r['smallest'] for r in own)} to {max(r['largest'] for r in own)}",
        ]
        for (name, share), own in groups.items()
    ]
    return table(headers, cells)


def change(rows: Sequence[Row]) -> str:
    """Return the mean change and both of its parts, in points of the miss rate."""
    found = [100 * (row["adapted"] - row["equal"]) for row in rows]
    return f"{np.mean(found):+.2f} ({', '.join(f'{value:+.2f}' for value in found)})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results/layer_sizes"))
    parser.add_argument("--tiny", type=Path, help="a trace of `tiny`, beside the shipped ones")
    arguments = parser.parse_args()
    files = [*sorted(TRACES.glob("*.parquet")), *([arguments.tiny] if arguments.tiny else [])]
    rows = []
    for file in files:
        name = "tiny" if file == arguments.tiny else file.stem
        rows += list(rows_of(name, load_trace(str(file))))
    arguments.out.mkdir(parents=True, exist_ok=True)
    text = "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n"
    (arguments.out / "layer_sizes.json").write_text(text)
    (arguments.out / "table.md").write_text(render(rows))


if __name__ == "__main__":
    main()

"""AdapMoE's cache sizes by layer against equal sizes, on held-out text.

Usage: python benchmarks/layer_sizes.py [--tiny TRACE.parquet]. Under a minute on one core. Writes
`layer_sizes.json` and `table.md` of results/layer_sizes. Each trace is cut in two: sizes are
optimised on one half and evaluated on the other, in both directions, and on the half they were
optimised on. Misses are LRU's with a cache per layer, empty at the start of each half.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from grid import RESULTS, arguments, shipped_traces
from pandas import DataFrame

from lm_eval_moecache.profiling.layer_sizes import best_sizes, equal_sizes, miss_curves, miss_rate
from lm_eval_moecache.report.tables.text import padded
from lm_eval_moecache.trace.importers import load_trace
from lm_eval_moecache.trace.trace import Trace

SHARES = (5, 10, 25, 50)
Row = dict[str, Any]


def half_curves(trace: Trace) -> list[Any]:
    """Return each half's misses by layer and size: [layers, experts + 1] each.

    Passes are halved. The prefill of a trace with one request is left out: an event that requests
    nearly every expert carries little information about sizes.
    """
    layers, curves = trace.geometry.num_layers, []
    first = 1 if trace.num_passes > 1 and trace.requests and len(trace.requests) == 1 else 0
    middle = (first + trace.num_passes) // 2
    for start, stop in pairwise((first, middle, trace.num_passes)):
        bounds = trace.key_bounds[start * layers : stop * layers + 1]
        keys = trace.keys[bounds[0] : bounds[-1]]
        curves.append(miss_curves(replace(trace, keys=keys, key_bounds=bounds - bounds[0])))
    return curves


def rows_of(name: str, trace: Trace) -> Iterator[Row]:
    halves = half_curves(trace)
    geometry = trace.geometry
    num_keys = geometry.num_layers * geometry.num_experts
    for share in SHARES:
        slots = num_keys * share // 100
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
                "equal": miss_rate(halves[measured], equal),
                "adapted": miss_rate(halves[measured], sizes),
            }


def render(rows: Sequence[Row]) -> str:
    """One row per trace and capacity: misses of equal sizes, and the change in points."""
    headers = [
        *("Trace", "Capacity", "Equal sizes miss", "Solved and measured on the same half"),
        *("Solved on one half, measured on the other", "Smallest to largest layer"),
    ]
    cells = []
    for (name, share), runs in DataFrame(rows).groupby(["trace", "share"], sort=False):
        points, is_same = 100 * (runs.adapted - runs.equal), runs.solved_on == runs.measured_on
        changes = [
            f"{part.mean():+.2f} ({', '.join(map('{:+.2f}'.format, part))})"
            for part in (points[is_same], points[~is_same])
        ]
        sizes = f"{runs.smallest.min()} to {runs.largest.max()}"
        cells.append([name, f"{share}%", f"{runs.equal.mean():.1%}", *changes, sizes])
    return padded(headers, cells)


def main() -> None:
    options = arguments(__doc__, out=RESULTS / "layer_sizes", tiny=None)
    traces = shipped_traces()
    if options.tiny:
        traces["tiny"] = load_trace(options.tiny)
    rows = [row for name, trace in traces.items() for row in rows_of(name, trace)]
    text = "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n"
    (options.out / "layer_sizes.json").write_text(text)
    (options.out / "table.md").write_text(render(rows))


if __name__ == "__main__":
    main()

"""Every eviction on every shipped trace, on demand, by cycles: results/evictions.

Usage: python benchmarks/evictions.py [--out results/evictions]. About half an hour of one core.
Writes `cells.json.gz`, `table.md` and the plot; cells that are there already are kept.

A capacity of one cycle is what one token needs on its way through the model (layers x top-k). The
gap is between LRU and the bound of `moecache replay --bound`: the fewest misses that any eviction
can have on demand. Microseconds are the CPU time of the whole replay over its requests, the replay
included, of one machine, with the rules that are rankings compiled.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from lm_eval_moecache.algorithms.policy import load_policy
from lm_eval_moecache.algorithms.registry import algorithm_names, find_algorithm
from lm_eval_moecache.engine.bound import fewest_misses
from lm_eval_moecache.engine.replay import replay
from lm_eval_moecache.engine.setting import Setting
from lm_eval_moecache.records.hardware import load_hardware
from lm_eval_moecache.records.sizes import parse_capacity
from lm_eval_moecache.report.mpl_style import look, new_figure, save
from lm_eval_moecache.trace.importers import load_trace
from lm_eval_moecache.trace.trace import Trace

ROOT = Path(__file__).resolve().parents[1]
CYCLES = (0.5, 1, 1.5, 2, 3, 4, 8)
DRAWN = ("lru", "lfu", "arc", "s3_fifo", "w_tinylfu", "lfru_colibri", "hazard")
BOUND = "bound"
Cell = dict[str, Any]


def evictions(trace: Trace) -> list[str]:
    """Return the rules that see what the trace has: no scores without weights."""
    has_weights = trace.columns.weights is not None
    return [
        name
        for name in algorithm_names("eviction")
        if not (rule := find_algorithm("eviction", name)).uses_logits
        and not rule.pairs_with
        and (has_weights or not rule.uses_weights)
    ]


def measure(trace: Trace, eviction: str, experts: int) -> dict[str, float]:
    chosen = {} if eviction == BOUND else {"eviction": eviction}
    setting = Setting(
        policy=load_policy("on_demand", chosen),
        capacity=parse_capacity(str(experts), trace.geometry),
        hardware=load_hardware("a100-5GBps"),
    )
    if eviction == BOUND:
        misses, requests = fewest_misses(trace, setting)
        return {"miss_rate": misses / requests}
    start_s = time.process_time()
    passes = replay(trace, setting).ledger.passes
    spent_s = time.process_time() - start_s
    requests = sum(record.requests for record in passes)
    return {
        "miss_rate": sum(record.misses for record in passes) / requests,
        "us_per_request": round(1e6 * spent_s / requests, 2),
    }


def run(out: Path) -> list[Cell]:
    file = out / "cells.json.gz"
    cells: list[Cell] = json.loads(gzip.decompress(file.read_bytes())) if file.exists() else []
    there = {(c["trace"], c["eviction"], c["cycles"]) for c in cells}
    for path in sorted((ROOT / "traces").glob("*.parquet")):
        trace = load_trace(str(path))
        cycle = trace.geometry.num_layers * trace.geometry.top_k
        every = trace.geometry.num_layers * trace.geometry.num_experts
        for cycles in CYCLES:
            if cycles * cycle > every:
                continue
            for eviction in [BOUND, *evictions(trace)]:
                cell = {"trace": path.stem, "eviction": eviction, "cycles": cycles}
                if tuple(cell.values()) in there:
                    continue
                cells.append(cell | measure(trace, eviction, round(cycles * cycle)))
                print(json.dumps(cells[-1]), flush=True)
        file.write_bytes(gzip.compress(json.dumps(cells).encode(), mtime=0))
    return cells


def closed(cells: list[Cell]) -> dict[str, dict[tuple[str, float], float]]:
    """Return the percent of the gap between LRU and the bound that each rule closes, by cell."""
    at = {(c["eviction"], c["trace"], c["cycles"]): c["miss_rate"] for c in cells}
    found: dict[str, dict[tuple[str, float], float]] = {}
    for (eviction, *place), rate in at.items():
        lru, bound = at[("lru", *place)], at[(BOUND, *place)]
        if eviction != BOUND and lru > bound:
            found.setdefault(eviction, {})[place[0], place[1]] = 100 * (lru - rate) / (lru - bound)
    return found


def table(cells: list[Cell]) -> str:
    """Rules by the median gap closed from two cycles on; below, LRU keeps next to nothing."""
    gaps, rows = closed(cells), []
    traces = sorted({c["trace"] for c in cells})
    for eviction, by_place in gaps.items():
        above = [gap for (_, cycles), gap in by_place.items() if cycles >= 2]
        below = [gap for (_, cycles), gap in by_place.items() if cycles < 2]
        costs = [c["us_per_request"] for c in cells if c["eviction"] == eviction]
        by_trace = [
            " / ".join(f"{by_place[t, n]:.0f}" if (t, n) in by_place else "-" for n in (2, 4))
            for t in traces
        ]
        figures = [statistics.median(above), min(above), statistics.median(below)]
        told = [f"{value:.0f}" for value in figures] + [f"{statistics.median(costs):.1f}"]
        rows.append((-figures[0], eviction, [*told, *by_trace]))
    rows.sort()
    heads = ["median", "worst", "median below 2 cycles", "us a request"]
    heads += [f"{trace}, 2 / 4 cycles" for trace in traces]
    first = _grid(heads, {name: cells for _, name, cells in rows})
    at = {(c["eviction"], c["trace"], c["cycles"]): c["miss_rate"] for c in cells}
    places = sorted({(c["trace"], c["cycles"]) for c in cells})
    rates = {
        name: [f"{100 * at[(name, *p)]:.1f}" if (name, *p) in at else "-" for p in places]
        for name in [BOUND, *[name for _, name, _ in rows]]
    }
    second = _grid([f"{trace} {cycles:g}" for trace, cycles in places], rates)
    return (
        "Percent of the gap between LRU and the bound that a rule closes, from two cycles on:\n\n"
        f"{first}\nMisses in percent of requests, by trace and cycles:\n\n{second}"
    )


def _grid(heads: list[str], rows: dict[str, list[str]]) -> str:
    lines = [["eviction", *heads], ["---", *["--:"] * len(heads)]]
    lines += [[f"`{name}`", *cells] for name, cells in rows.items()]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def draw(cells: list[Cell], file: Path) -> None:
    """One panel a trace: gap closed against capacity, of the rules that readers ask for."""
    gaps, traces = closed(cells), sorted({c["trace"] for c in cells})
    figure, panels = new_figure(1, len(traces))
    for axes, trace in zip(panels, traces, strict=True):
        for index, eviction in enumerate(DRAWN):
            own = {n: gap for (t, n), gap in gaps[eviction].items() if t == trace}
            axes.plot(list(own), list(own.values()), **look(index), label=eviction)
        axes.set(title=trace, xlabel="capacity [token cycles]", ylim=(-60, 100))
        axes.set_xscale("log", base=2)
    panels[0].set_ylabel("gap between LRU and the bound closed [%]")
    panels[0].legend(fontsize="small")
    file.parent.mkdir(parents=True, exist_ok=True)
    save(figure, file)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "evictions")
    out: Path = parser.parse_args().out
    cells = run(out)
    (out / "table.md").write_text(table(cells))
    draw(cells, out / "plots" / "gap.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Replays real routing over evictions, predictors, capacities and links: results/real_routing.

Usage: python benchmarks/real_routing.py [--out results/real_routing]. A few minutes of one core.
Writes `cells.json.gz`, the tables and the plots; cells that are there already are kept.

Capacity is in token cycles (layers x top-k), the link in transfers: an expert takes `ratio` times
as long to move as a layer's decode step takes without waiting. Dense sizes and kernels are those
of the trace's model on the profile `a100-5GBps`; transfers have no latency of their own.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from lm_eval_moecache.algorithms.policy import load_policy
from lm_eval_moecache.engine.regime import regime_of
from lm_eval_moecache.engine.replay import replay
from lm_eval_moecache.engine.setting import Setting
from lm_eval_moecache.records.hardware import Hardware, load_hardware
from lm_eval_moecache.records.sizes import parse_capacity
from lm_eval_moecache.report.metrics import task_metrics
from lm_eval_moecache.trace.future import Future
from lm_eval_moecache.trace.importers import load_trace
from lm_eval_moecache.trace.trace import Trace

TRACES = Path(__file__).resolve().parents[1] / "traces"
EVICTIONS: dict[str, dict[str, Any]] = {
    "lru": {"eviction": "lru"},
    "lfu": {"eviction": "lfu"},
    "fifo": {"eviction": "fifo"},
    "random": {"eviction": "random"},
    "fld": {"eviction": "fld"},
    "fld forward": {"eviction": "fld", "eviction.distance": "forward"},
    "shallow_first": {"eviction": "shallow_first"},
    "frequency_layer": {"eviction": "frequency_layer"},
    "layered_lru": {"eviction": "layered_lru"},
    "lfru": {"eviction": "lfru"},
    "least_stale": {"eviction": "least_stale"},
    "least_stale none": {"eviction": "least_stale", "eviction.protect": "none"},
    "hazard": {"eviction": "hazard"},
    "belady": {"eviction": "belady"},
}
FEW = ("lru", "least_stale", "least_stale none", "hazard")
SHARES = (5, 10, 25, 50)
"""Percent of all experts: where the published figures and the bars of `hazard` are."""
CYCLES = (0.5, 1, 2, 4, 8)
RATIOS = (0.02, 0.2, 1.0, 10.0)


def cells(trace: Trace) -> Iterator[dict[str, Any]]:
    """Yield the grid of one trace."""
    geometry = trace.geometry
    cycle, every = geometry.num_layers * geometry.top_k, geometry.num_layers * geometry.num_experts
    sizes = {f"{c:g} cycles": round(c * cycle) for c in CYCLES if c * cycle <= every}
    sizes |= {f"{share}%": every * share // 100 for share in SHARES}
    for capacity, experts in sizes.items():
        for eviction in EVICTIONS:
            yield {"capacity": capacity, "experts": experts, "eviction": eviction, "ratio": 1.0}
    for eviction in FEW:
        for cycles in (0.5, 2):
            size = {"capacity": f"{cycles:g} cycles", "experts": round(cycles * cycle)}
            # The recall of a gate's top-k is its precision, too.
            for quality in (0.75, 0.85, 0.95):
                told = {"recall": quality, "precision": quality}
                yield {**size, "eviction": eviction, "ratio": 0.02, **told}
        for ratio in RATIOS[1:]:
            told = {"recall": 0.85, "precision": 0.85}
            yield {**size, "eviction": eviction, "ratio": ratio, **told}
        for ratio in RATIOS:
            # Half as many again as top-k: more of what is needed, and more that is not.
            told = {"recall": 0.95, "precision": 0.63}
            yield {**size, "eviction": eviction, "ratio": ratio, **told}


def measure(trace: Trace, future: Future, cell: dict[str, Any]) -> dict[str, Any]:
    geometry, told = trace.geometry, {k: cell[k] for k in ("recall", "precision") if k in cell}
    overrides = {**EVICTIONS[cell["eviction"]], "prefetch": "oracle" if told else "none"}
    overrides |= {f"prefetch.{name}": value for name, value in told.items()}
    # A share is of bytes; a number counts experts as large as the largest layer's.
    text = cell["capacity"] if cell["capacity"].endswith("%") else str(cell["experts"])
    capacity = parse_capacity(text, geometry)
    setting = Setting(
        policy=load_policy("on_demand", overrides),
        capacity=capacity,
        hardware=link_of(trace, cell["ratio"]),
    )
    start_s = time.process_time()
    engine = replay(trace, setting, future=future)
    cpu_s = time.process_time() - start_s
    metrics = task_metrics(engine.ledger.requests, engine.peak_cache_bytes)
    requests = sum(record.requests for record in engine.ledger.passes)
    regime = regime_of(geometry, capacity.total_bytes, setting.hardware)
    figures = ("miss_rate", "decode_miss_rate", "late_rate", "collision_miss_rate", "bytes_moved")
    found = {name: metrics[name] for name in figures}
    return {
        **found,
        "cycles": regime.cycles,
        "layer_s": regime.compute_s + regime.launches_s,
        "prefetch_hit_rate": metrics["prefetch_hits"] / requests,
        # A trace of decoded tokens alone has none.
        "ttft_ms": metrics["ttft_ms"]["mean"] if "ttft_ms" in metrics else None,
        "tpot_ms": metrics["tpot_ms"]["mean"],
        "stall_ms_per_token": metrics["stall_ms_per_token"],
        "us_per_request": round(1e6 * cpu_s / requests, 2),
    }


def link_of(trace: Trace, ratio: float) -> Hardware:
    """Return the machine on which one expert moves in `ratio` layers' time."""
    base = replace(load_hardware("a100-5GBps"), link_latency_s=0.0)
    regime = regime_of(trace.geometry, trace.geometry.total_expert_bytes, base)
    layer_s = regime.compute_s + regime.launches_s
    mean = sum(levels[0] for levels in trace.geometry.expert_bytes) / trace.geometry.num_layers
    return replace(base, link_bytes_per_s=mean / (ratio * layer_s))


def load(file: Path) -> list[dict[str, Any]]:
    return json.loads(gzip.decompress(file.read_bytes())) if file.is_file() else []


def save(file: Path, runs: list[dict[str, Any]]) -> None:
    text = "[\n" + ",\n".join(json.dumps(run, sort_keys=True) for run in runs) + "\n]\n"
    file.write_bytes(gzip.compress(text.encode(), mtime=0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results/real_routing"))
    parser.add_argument("--only-tables", action="store_true", help="from the runs that are there")
    arguments = parser.parse_args()
    file = arguments.out / "cells.json.gz"
    runs = load(file)
    done = {json.dumps(run["cell"], sort_keys=True) for run in runs}
    for path in [] if arguments.only_tables else sorted(TRACES.glob("*.parquet")):
        trace = load_trace(str(path))
        future = Future(trace)
        for cell in cells(trace):
            named = {"trace": path.stem, **cell}
            if json.dumps(named, sort_keys=True) in done:
                continue
            runs.append({"cell": named, **measure(trace, future, cell)})
            if len(runs) % 20 == 0:
                save(file, runs)
                sys.stderr.write(f"{path.stem}: {len(runs)} cells\n")
    save(file, runs)


if __name__ == "__main__":
    main()

"""Times a sweep of 64 virtual-clock runs on tiny, and where its time goes.

    python benchmarks/runs.py [--jobs 2] [--limit 4]

Prints the wall time per run, how often and how long the model was loaded, and the share of the
runs' time spent outside the model: lm-eval's tasks, prompts and scoring, our bookkeeping between
passes, and the writing of records. Hooks inside a pass count as the model's. Shares are of CPU
time, which other jobs on the machine change little.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import as_completed
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from lm_eval_moecache.harness.lm import MoECacheLM
from lm_eval_moecache.sweep.evaluation import quiet
from lm_eval_moecache.sweep.executors import local_pool
from lm_eval_moecache.sweep.identity import Planned
from lm_eval_moecache.sweep.spec import read_sweep
from lm_eval_moecache.sweep.validation import check_cells
from lm_eval_moecache.sweep.worker import run_cell

POLICIES = ["on_demand", "specmd", "mixtral_offloading", "importance_scheduling"]
EVICTIONS = ["lru", "lfu", "fifo", "least_stale"]
CAPACITIES = ["5%", "10%", "25%", "50%"]
NUM_RUNS = 64
# The model's methods that are timed. A load puts up its first cache by itself.
PARTS = {"model": ("_model_call", "_model_generate"), "load": ("__init__",), "cache": ("install",)}


@cache
def stopwatch() -> dict[str, list[float]]:
    """Return this process' seconds by part and call; the first call puts the stopwatch in place."""
    spent: dict[str, list[float]] = {part: [] for part in PARTS}
    for part, names in PARTS.items():
        for name in names:
            _time(name, part, spent)
    return spent


def _time(name: str, part: str, spent: dict[str, list[float]]) -> None:
    """Add the seconds of every call of a method of the model to its part."""
    inner = getattr(MoECacheLM, name)

    def timed(self: Any, *args: Any, **kwargs: Any) -> Any:
        begin = time.process_time()
        try:
            return inner(self, *args, **kwargs)
        finally:
            spent[part].append(time.process_time() - begin)

    setattr(MoECacheLM, name, timed)


def measured(planned: Planned, folder: str) -> dict[str, Any]:
    """Run a cell; return the process, and the run's seconds by part and in all."""
    spent = stopwatch()
    before, begin = {part: len(calls) for part, calls in spent.items()}, time.process_time()
    outcome = run_cell(planned, folder, "benchmark")
    if outcome.error is not None:
        raise RuntimeError(outcome.error)
    calls = {part: spent[part][before[part] :] for part in PARTS}
    return {"process": os.getpid(), "all": time.process_time() - begin, **calls}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--limit", type=int, default=4)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sweep = {
            "tasks": ["tiny_gsm8k", "tiny_mmlu"],
            "limit": options.limit,
            "grid": {"policy": POLICIES, "eviction": EVICTIONS, "capacity": CAPACITIES},
        }
        (folder / "sweep.yaml").write_text(yaml.safe_dump(sweep))
        with quiet():
            planned = check_cells(read_sweep(folder / "sweep.yaml").cells())
        assert len(planned) == NUM_RUNS, len(planned)
        begin = time.perf_counter()
        with local_pool(options.jobs) as pool:
            futures = [pool.submit(measured, each, name) for each in planned]
            found = [future.result() for future in as_completed(futures)]
        wall_s = time.perf_counter() - begin
        report(found, wall_s, options.jobs)


def report(runs: Sequence[Mapping[str, Any]], wall_s: float, jobs: int) -> None:
    count = len(runs)
    whole_s = sum(run["all"] for run in runs)
    parts_s = {part: sum(sum(run[part]) for run in runs) for part in PARTS}
    loads: dict[int, int] = {}
    for run in runs:
        loads[run["process"]] = loads.get(run["process"], 0) + len(run["load"])
    rest_s = whole_s - sum(parts_s.values())
    print(f"runs               {count} in {jobs} processes")
    print(f"wall time          {wall_s:.1f} s, {wall_s / count:.2f} s a run")
    print(f"CPU time           {whole_s / count:.2f} s a run, of these:")
    print(f"  in the model     {parts_s['model'] / whole_s:.1%}")
    print(
        f"  loading it       {parts_s['load'] / whole_s:.1%}; loads by process: {[*loads.values()]}"
    )
    print(f"  a new cache      {parts_s['cache'] / whole_s:.1%}")
    print(f"  everything else  {rest_s / whole_s:.1%}, {rest_s / count:.3f} s a run")


if __name__ == "__main__":
    main()

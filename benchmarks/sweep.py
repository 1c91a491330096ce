"""Times a sweep of 64 virtual-clock runs on tiny, and where its time goes.

    python benchmarks/sweep.py [--jobs 2] [--limit 4]

Prints the wall time per run, how often and how long the model was loaded, and the share of the
runs' time spent outside the model: lm-eval's tasks, prompts and scoring, our bookkeeping between
passes, and the writing of records. Hooks inside a pass count as the model's.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from concurrent.futures import as_completed
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from lm_eval_moecache.lm import MoECacheLM
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


@cache
def model_time() -> list[float]:
    """Return this process' seconds in the model and number of loads.

    The first call puts the stopwatch in place.
    """
    spent = [0.0, 0]
    load = MoECacheLM.__init__

    def counted(self: Any, *args: Any, **kwargs: Any) -> None:
        spent[1] += 1
        load(self, *args, **kwargs)

    MoECacheLM.__init__ = counted  # type: ignore[method-assign]
    for name in ("_model_call", "_model_generate"):
        inner = getattr(MoECacheLM, name)

        def timed(self: Any, *args: Any, _inner: Any = inner, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return _inner(self, *args, **kwargs)
            finally:
                spent[0] += time.perf_counter() - begin

        setattr(MoECacheLM, name, timed)
    return spent


def measured(planned: Planned, folder: str) -> tuple[str, int, float, float, bool]:
    """Run a cell; return its id, the process, its seconds in all and in the model, and whether
    the model was loaded for it.
    """
    spent = model_time()
    (before, loads), begin = spent, time.perf_counter()
    outcome = run_cell(planned, folder, "benchmark")
    if outcome.error is not None:
        raise RuntimeError(outcome.error)
    whole_s, model_s = time.perf_counter() - begin, spent[0] - before
    return outcome.run_id, os.getpid(), whole_s, model_s, spent[1] > loads


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
        report(found, wall_s, folder, options)


def report(
    found: list[tuple[str, int, float, float, bool]], wall_s: float, folder: Path, options: Any
) -> None:
    loads_s, installs_s, loads = 0.0, 0.0, dict[int, int]()
    for run_id, process, _, _, has_loaded in found:
        record = json.loads((folder / "runs" / f"{run_id}.json").read_text())
        seconds = record["environment"]["seconds"]["load"]
        loads[process] = loads.get(process, 0) + has_loaded
        if has_loaded:
            loads_s += seconds
        else:
            installs_s += seconds
    runs_s = sum(seconds for _, _, seconds, _, _ in found)
    model_s = sum(seconds for *_, seconds, _ in found)
    print(f"runs                   {len(found)} in {options.jobs} processes")
    print(f"wall time              {wall_s:.1f} s, {wall_s / len(found):.2f} s a run")
    print(f"in its process         {runs_s / len(found):.2f} s a run, of these:")
    print(f"  in the model         {model_s / runs_s:.1%}")
    print(f"  loading the model    {loads_s / runs_s:.1%}, loads by process: {[*loads.values()]}")
    rest_s = runs_s - model_s - loads_s
    print(
        f"  outside the model    {rest_s / runs_s:.1%}, {1000 * rest_s / len(found):.0f} ms a run"
    )
    num_installs = len(found) - sum(loads.values())
    print(f"    a new cache        {1000 * installs_s / num_installs:.1f} ms a run")


if __name__ == "__main__":
    main()

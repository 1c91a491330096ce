"""Times a grid of 180 cells that runs the model once against running it for every cell.

    python benchmarks/sweep.py [--jobs 1] [--limit 4] [--sample 12] [--kills 0]

4 evictions x 3 prefetchers x 5 capacities x 3 bandwidths on two tasks. A random sample of cells is
also run live: their records have to equal the replayed ones to the byte outside `environment`, and
their mean time, times the cells, is what `--live` takes. With `--kills` the sweep is killed so
many times at random moments before it is allowed to finish. Exit code 1 where a record differs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from lm_eval_moecache.sweep.run import run_sweep
from lm_eval_moecache.sweep.spec import read_sweep

GRID = {
    "eviction": ["lru", "lfu", "fifo", "least_stale"],
    "prefetch": ["none", "next_gate", "score"],
    "capacity": ["5%", "10%", "25%", "50%", "75%"],
    "bandwidth": ["1GB/s", "5GB/s", "25GB/s"],
}
NUM_CELLS = 180


def write(folder: Path, limit: int, **cells: Any) -> Path:
    folder.mkdir()
    sweep = {
        "name": "benchmark",
        "tasks": ["tiny_gsm8k", "tiny_mmlu"],
        "limit": limit,
        "base": {"pretrained": "tiny", "policy": "on_demand", "device": "cpu"},
        **cells,
    }
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump(sweep))
    return path


class Spent(NamedTuple):
    """Seconds by the clock, and of this process and its children (which a busy machine stretches
    less)."""

    clock_s: float
    cpu_s: float

    @classmethod
    def now(cls) -> Spent:
        times = os.times()
        return cls(times.elapsed, sum(times[:4]))


def run(path: Path, live: bool = False) -> Spent:
    before = Spent.now()
    report = run_sweep(read_sweep(path), path.parent, live=live)
    assert not report.failed, report.failed
    after = Spent.now()
    return Spent(after.clock_s - before.clock_s, after.cpu_s - before.cpu_s)


def kill(path: Path, times: int, chance: random.Random) -> int:
    """Start the sweep in a child and kill it, again and again; return how many kills struck."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lm_eval_moecache.sweep.run", "lm_eval_moecache.harness.lm"])
    struck = 0
    for _ in range(times):
        child = context.Process(target=run, args=(path,))
        child.start()
        # From the import over the recording run to the last replays.
        child.join(chance.expovariate(1 / 15))
        struck += child.is_alive()
        child.kill()
        child.join()
    return struck


def records(folder: Path) -> dict[str, dict[str, Any]]:
    found = [json.loads(path.read_text()) for path in sorted((folder / "runs").glob("*.json"))]
    by_hash = {record["configuration_hash"]: record for record in found}
    assert len(by_hash) == len(found), "one configuration was written twice"
    return by_hash


def same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    texts = [json.dumps({**record, "environment": None}) for record in (one, other)]
    return texts[0] == texts[1]


def seconds(found: Sequence[Mapping[str, Any]], kind: str) -> list[float]:
    spent = [record["environment"]["seconds"] for record in found]
    return [each[kind] for each in spent if kind in each]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit", type=int, default=4)
    parser.add_argument("--sample", type=int, default=12)
    parser.add_argument("--kills", type=int, default=0)
    options = parser.parse_args()
    chance = random.Random(0)
    with tempfile.TemporaryDirectory() as name:
        shared = write(Path(name) / "shared", options.limit, grid=GRID, jobs=options.jobs)
        if options.kills:
            print(f"kills               {kill(shared, options.kills, chance)} of {options.kills}")
        sharing = run(shared)
        found = records(shared.parent)
        assert len(found) == NUM_CELLS, len(found)
        chosen = chance.sample(sorted(found), options.sample)
        cells = [found[key]["configuration"]["model_args"] for key in chosen]
        live = write(Path(name) / "live", options.limit, runs=cells, jobs=options.jobs)
        alive = run(live, live=True)
        expected = records(live.parent)
        different = [r["run_id"] for k, r in expected.items() if not same(found[k], r)]
        assert set(expected) == set(chosen), "the sample is not what was asked for"
        report(list(found.values()), list(expected.values()), sharing, alive, options)
        sizes = [path.stat().st_size for path in (shared.parent / "traces").glob("*.parquet")]
        print(f"traces              {len(sizes)}, {sum(sizes) / 1e6:.2f} MB")
        print(f"records that differ {len(different)} of {len(expected)} {different or ''}")
    return 1 if different else 0


def report(
    found: Sequence[Mapping[str, Any]],
    expected: Sequence[Mapping[str, Any]],
    sharing: Spent,
    alive: Spent,
    options: argparse.Namespace,
) -> None:
    runs, replays = seconds(found, "evaluate"), seconds(found, "replay")
    print(f"cells               {len(found)}: {len(runs)} ran the model, {len(replays)} replayed")
    print(f"replay              {sum(replays) / max(len(replays), 1):.3f} s each")
    live = seconds(expected, "evaluate")
    print(f"live run            {sum(live) / len(live):.2f} s each")
    if not options.kills:
        print(f"processes           {options.jobs}; --live is told from {len(expected)} cells")
        for what, shared_s, sample_s in zip(("clock", "CPU"), sharing, alive, strict=True):
            live_s = sample_s / len(expected) * NUM_CELLS
            print(f"{what:19s} {shared_s:.1f} s sharing, {live_s:.1f} s --live")
            print(f"ratio by {what:10s} {live_s / shared_s:.1f}")


if __name__ == "__main__":
    sys.exit(main())

"""A sweep small enough for tests: a random model of a few kilobytes on tiny local tasks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from lm_eval_moecache.cli.main import main
from lm_eval_moecache.report.runs.files import SAMPLES, TABLE, cells, read_tables
from lm_eval_moecache.sweep import worker
from lm_eval_moecache.sweep.files import write_record
from tests.harness import small_tasks

_SPEED = """
group: speedy
task:
  - task: chosen
    class: !function lm_eval_moecache.harness.tasks.SpeedTask
  - task: generated
    class: !function lm_eval_moecache.harness.tasks.SpeedTask
aggregate_metric_list:
  - metric: ttft_ms
  - metric: request_miss_rate
    weight_by_size: false
"""


def write_tasks(folder: Path) -> Path:
    folder.mkdir(parents=True)
    small_tasks(folder, {"speedy": _SPEED})
    return folder


def write_sweep(folder: Path, **fields: Any) -> Path:
    """Write `folder/sweep.yaml` for the small tasks, which are stored next to the folder."""
    tasks = folder.parent / "tasks"
    if not tasks.is_dir():
        write_tasks(tasks)
    folder.mkdir(exist_ok=True)
    sweep = {"tasks": ["chosen"], "include_path": str(tasks), **fields}
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump(sweep, sort_keys=False))
    return path


def records(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the finished runs by configuration hash."""
    runs = [*read_tables(folder), *(record for _, record in cells(folder))]
    by_hash = {record["configuration_hash"]: record for record in runs}
    assert len(by_hash) == len(runs), "one configuration was written twice"
    return by_hash


def loose(folder: Path) -> list[Path]:
    """Make a file of each run again, as a sweep leaves them that is killed; return the files."""
    for record in read_tables(folder):
        write_record(folder, record)
    for name in (TABLE, SAMPLES):
        (folder / name).unlink()
    return sorted((folder / "runs").iterdir())


def figures(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the finished runs without their environment, which may differ in a rerun."""
    return {key: {**record, "environment": None} for key, record in records(folder).items()}


def swept(folder: Path, *options: str, **fields: Any) -> Path:
    """Run a sweep over the toy tasks, and return its YAML file."""
    path = write_sweep(folder, **fields)
    assert main(["sweep", str(path), *options]) == 0
    return path


def both_ways(folder: Path, **fields: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run a sweep with shared runs and live; assert that the records are equal to the byte."""
    shared, live = (
        records(swept(folder / name, *options, name="x", **fields).parent)
        for name, options in (("shared", ()), ("live", ("--live",)))
    )
    assert shared.keys() == live.keys()
    for key, record in live.items():
        texts = [json.dumps({**r, "environment": None}) for r in (shared[key], record)]
        assert texts[0] == texts[1], record["run_id"]
    return shared, live


def made_by(found: dict[str, Any]) -> list[str]:
    return sorted(next(iter(r["environment"]["made_by"])) for r in found.values())


def frail(capacity: str) -> Any:
    """Return an `evaluate` that fails at this capacity."""
    real = worker.evaluate

    def evaluate(cell: Any, lm: Any) -> dict[str, Any]:
        if cell.model_args["capacity"] == capacity:
            raise RuntimeError("the disk is full")
        return real(cell, lm)

    return evaluate

"""A sweep small enough for tests: a random model of a few kilobytes on two tiny local tasks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from lm_eval_moecache.cli.main import main
from lm_eval_moecache.report.runs.files import SAMPLES, TABLE, cells, read_tables
from lm_eval_moecache.sweep import worker
from lm_eval_moecache.sweep.files import write_record

NUM_DOCS = 4
_LOADER = """
import json
from pathlib import Path

from datasets import Dataset


def load(**_):
    lines = Path(__file__).with_name("docs.jsonl").read_text().splitlines()
    return {"test": Dataset.from_list([json.loads(line) for line in lines])}
"""
_HEAD = """
custom_dataset: !function toy_docs.load
test_split: test
doc_to_text: "{{question}}"
"""
_CHOICE = """
task: toy_choice
output_type: multiple_choice
doc_to_target: gold
doc_to_choice: "{{choices}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
_ANSWER = """
task: toy_answer
output_type: generate_until
doc_to_target: "{{choices[0]}}"
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
generation_kwargs: {until: ["@@"], max_gen_toks: 4, do_sample: false}
"""
_SPEED = """
group: toy_speed
task:
  - task: toy_choice
    class: !function lm_eval_moecache.harness.tasks.SpeedTask
  - task: toy_answer
    class: !function lm_eval_moecache.harness.tasks.SpeedTask
aggregate_metric_list:
  - metric: ttft_ms
  - metric: request_miss_rate
    weight_by_size: false
"""


def write_tasks(folder: Path) -> Path:
    folder.mkdir(parents=True)
    docs = [
        {"question": f"{i} and {i} is", "choices": ["one", "two", "ten"], "gold": i % 3}
        for i in range(NUM_DOCS)
    ]
    (folder / "docs.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    (folder / "toy_docs.py").write_text(_LOADER)
    (folder / "toy_choice.yaml").write_text(_CHOICE + _HEAD)
    (folder / "toy_answer.yaml").write_text(_ANSWER + _HEAD)
    (folder / "toy_speed.yaml").write_text(_SPEED)
    return folder


def write_sweep(folder: Path, **fields: Any) -> Path:
    """Write `folder/sweep.yaml` for the toy tasks, which are stored next to the folder."""
    tasks = folder.parent / "tasks"
    if not tasks.is_dir():
        write_tasks(tasks)
    folder.mkdir(exist_ok=True)
    sweep = {"tasks": ["toy_choice"], "include_path": str(tasks), **fields}
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

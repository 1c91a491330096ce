"""Made-up results JSONs, as a sweep writes them: no model, no harness."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

POLICY = {axis: {"name": "x"} for axis in ("routing", "prefetch", "eviction", "miss")}


def record(
    name: str,
    *,
    policy: str = "specmd",
    capacity: str = "25%",
    answers: Sequence[float] = (1, 1, 0, 1),
    tok_per_s: float = 100.0,
    miss_rate: float = 0.25,
    tasks: Sequence[str] = ("quiz",),
    clock: str = "virtual",
    environment: Mapping[str, Any] | None = None,
    totals: Mapping[str, Any] | None = None,
    **others: Any,
) -> dict[str, Any]:
    """Build one record; `answers` are the per-document scores of every task.

    `totals` are further figures of all tasks, `others` further arguments of the model.
    """
    mean = sum(answers) / len(answers)
    spread = math.sqrt(sum((a - mean) ** 2 for a in answers) / (len(answers) - 1))
    figures = {
        "requests": len(answers),
        "ttft_ms": {"mean": 2.0, "p50": 1.5, "p90": 3.0, "p99": 4.0},
        "tok_per_s": tok_per_s,
        "hit_rate": 1 - miss_rate,
        "miss_rate": miss_rate,
        "decode_miss_rate": miss_rate / 2,
        **(totals or {}),
    }
    scores = {
        "acc,none": mean,
        "acc_stderr,none": spread / math.sqrt(len(answers)),
        "ttft_ms,speed": 2.0,
        "alias": "x",
    }
    moecache = {
        "policy": {"name": policy, **POLICY},
        "capacity": capacity,
        "capacity_bytes": int(float(capacity.rstrip("%")) * 1000),
        "hardware": {"name": "a100-5GBps"},
        "clock": clock,
        "totals": figures,
        "tasks": {task: figures for task in tasks},
    }
    return {
        "format": 1,
        "run_id": name,
        "experiment": "made-up",
        "label": None,
        "configuration_hash": name,
        "configuration": {
            "model": "moecache",
            "model_args": {"policy": policy, "capacity": capacity, **others},
            "tasks": list(tasks),
        },
        "results": {task: scores for task in tasks},
        "higher_is_better": {task: {"acc": True} for task in tasks},
        "group_subtasks": {},
        "config": {"moecache": moecache},
        "scores": {
            task: {"acc,none": {str(i): a for i, a in enumerate(answers)}} for task in tasks
        },
        "environment": {"date": "today"} if environment is None else environment,
    }


def write(folder: Path, *records: Mapping[str, Any]) -> Path:
    (folder / "runs").mkdir(parents=True, exist_ok=True)
    for run in records:
        (folder / "runs" / f"{run['run_id']}.json").write_text(json.dumps(run))
    return folder


def leaderboard_of_four(folder: Path, **more: Any) -> Path:
    """Two policies at two capacities; by figures b and d are on the front, by the test d alone."""
    small, large = {"capacity": "5%", **more}, {"capacity": "50%", **more}
    return write(
        folder,
        record("a", policy="on_demand", tok_per_s=80, miss_rate=0.6, **small),
        record("b", policy="on_demand", tok_per_s=120, miss_rate=0.2, **large),
        record("c", tok_per_s=90, miss_rate=0.5, answers=(1, 0, 0, 0), **small),
        record("d", tok_per_s=200, miss_rate=0.1, answers=(1, 0, 0, 1), **large),
    )

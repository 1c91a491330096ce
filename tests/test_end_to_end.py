"""The real `lm_eval` command on a local task and a random checkpoint, in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Checkpoint

REPOSITORY = Path(__file__).resolve().parent.parent
TASK = """
task: three_sums
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 5}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


def command() -> list[str]:
    """`lm_eval run` where the start-up file is installed; else the way that needs none."""
    if importlib.util.find_spec("lm_eval_moecache_startup"):
        return [sys.executable, "-m", "lm_eval", "run"]
    return [sys.executable, "-m", "lm_eval_moecache.cli.main", "eval"]


def write_task(folder: Path) -> None:
    data = folder / "data.jsonl"
    rows = [{"question": f"{i} + {i} = ", "answer": str(2 * i)} for i in range(3)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "three_sums.yaml").write_text(TASK.replace("DATA", str(data)))


@pytest.mark.slow
def test_one_command_gives_accuracy_and_speed(checkpoint: Checkpoint, tmp_path: Path) -> None:
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    write_task(tasks)
    arguments = f"pretrained={checkpoint('olmoe')},policy=specmd,capacity=25%,bandwidth=1GB/s"
    result = subprocess.run(
        [
            *command(),
            *("--model", "moecache", "--model_args", arguments, "--device", "cpu"),
            *("--tasks", "three_sums", "--include_path", str(tasks)),
            *("--output_path", str(tmp_path / "out")),
        ],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_OFFLINE": "1",
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    accuracy = [line for line in result.stdout.split("\n") if "exact_match" in line]
    assert accuracy, result.stdout
    title = "moecache (specmd: standard + score + least_stale + fetch), capacity: 25%"
    assert title in result.stdout
    speed = [line for line in result.stdout.split("\n") if line.startswith("|three_sums|")]
    assert any("|      3|" in line or "|3" in line.replace(" ", "") for line in speed)
    assert "|**all**" in result.stdout
    check_results(next((tmp_path / "out").rglob("results_*.json")))


def check_results(path: Path) -> None:
    results: dict[str, Any] = json.loads(path.read_text())
    assert "exact_match,none" in results["results"]["three_sums"]
    ours = results["config"]["moecache"]
    assert ours["policy"]["name"] == "specmd"
    assert ours["capacity"] == "25%"
    assert ours["hardware"]["link_bytes_per_s"] == 1e9
    assert list(ours["tasks"]) == ["three_sums"]
    task = ours["tasks"]["three_sums"]
    assert task["requests"] == 3
    assert task["ttft_ms"]["mean"] > 0
    assert task["tok_per_s"] > 0
    assert 0 <= task["miss_rate"] <= 1
    assert task == ours["totals"]

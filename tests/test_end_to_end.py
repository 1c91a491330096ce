"""The real `lm_eval` command on the shipped task and a random checkpoint, in its own process."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lm_eval_moecache.records.files import task_configs_dir
from tests.conftest import Checkpoint


def evaluate(
    arguments: str,
    folder: Path,
    *options: str,
    model: str = "moecache",
    launcher: Sequence[str] = (sys.executable,),
    **environment: str,
) -> tuple[str, dict[str, Any]]:
    """Run documents through the command in `folder`; return its stdout and its results JSON."""
    # `lm_eval run` where the start-up file is installed; else our command, which needs none.
    startup_file = importlib.util.find_spec("lm_eval_moecache_startup")
    module = ("lm_eval", "run") if startup_file else ("lm_eval_moecache", "eval")
    command = [*launcher, "-m", *module, "--model", model, "--model_args", arguments]
    command += ["--device", "cpu", "--include_path", str(task_configs_dir()), *options]
    folder.mkdir(exist_ok=True)
    env = {**os.environ, "HF_HOME": str(folder / "home"), **environment}
    process = subprocess.run(
        [*command, "--output_path", "out"], cwd=folder, env=env, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr[-3000:]
    [path] = (folder / "out").rglob("results_*.json")
    return process.stdout, json.loads(path.read_text())


THREE = ("--tasks", "tiny_gsm8k", "--limit", "3")


@pytest.mark.slow
def test_one_command_gives_accuracy_and_speed(checkpoint: Checkpoint, tmp_path: Path) -> None:
    arguments = f"pretrained={checkpoint('olmoe')},policy=specmd,capacity=25%,bandwidth=1GB/s"
    stdout, results = evaluate(arguments, tmp_path, *THREE)
    assert "exact_match" in stdout
    title = "moecache (specmd: standard + score + least_stale + fetch), capacity: 25%"
    assert title in stdout and "|**all**" in stdout
    assert "exact_match,strict-match" in results["results"]["tiny_gsm8k"]
    report = results["config"]["moecache"]
    assert (report["policy"]["name"], report["capacity"]) == ("specmd", "25%")
    assert report["hardware"]["link_bytes_per_s"] == 1e9
    assert list(report["tasks"]) == ["tiny_gsm8k"]
    task = report["tasks"]["tiny_gsm8k"]
    assert task == report["totals"]
    assert task["requests"] == 3
    assert task["ttft_ms"]["mean"] > 0 and task["tok_per_s"] > 0
    assert 0 <= task["miss_rate"] <= 1

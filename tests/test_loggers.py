"""W&B and trackio through lm-eval's own arguments, with the real packages and no network."""

from __future__ import annotations

import importlib.util
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest


def stored_by_wandb(folder: Path) -> bytes:
    [run] = folder.rglob("run-*.wandb")
    return run.read_bytes()


def stored_by_trackio(folder: Path) -> bytes:
    with sqlite3.connect(folder / "kept/x.db") as database:
        return b"".join(row for (row,) in database.execute("select metrics from metrics"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "argument", "stored"),
    [
        ("wandb", "project=x,mode=offline", stored_by_wandb),
        ("trackio", "project=x", stored_by_trackio),
    ],
)
def test_a_run_logs_its_scores_and_its_speed(
    package: str, argument: str, stored: Callable[[Path], bytes], tmp_path: Path
) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}")
    command = [sys.executable, "-m", "lm_eval_moecache", "eval", "--model", "moecache"]
    command += ["--tasks", "tiny_gsm8k", "--limit", "2", f"--{package}_args", argument]
    offline = {
        "WANDB_MODE": "offline",
        "HF_HUB_OFFLINE": "1",
        "TRACKIO_DIR": str(tmp_path / "kept"),
    }
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, **offline}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for figure in (
        b"tiny_gsm8k/exact_match",
        b"tiny_gsm8k/ttft_ms",
        b"tiny_gsm8k/request_hit_rate",
    ):
        assert figure in stored(tmp_path)

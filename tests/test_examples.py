"""What `examples/` offers to copy works when copied."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from lm_eval_moecache.cli.main import main
from lm_eval_moecache.sweep.spec import read_sweep
from lm_eval_moecache.sweep.validation import check_cells
from tests.conftest import Checkpoint
from tests.sweep.toy import write_sweep

ROOT = Path(__file__).resolve().parent.parent
WORKFLOW = yaml.safe_load((ROOT / "examples/github-workflow.yml").read_text())
STEPS: list[dict[str, Any]] = WORKFLOW["jobs"]["compare"]["steps"]


def test_every_cell_of_the_example_sweep_can_start() -> None:
    assert len(check_cells(read_sweep(ROOT / "examples/sweep.yaml").cells())) == 6


def test_the_workflows_actions_are_pinned_by_hash() -> None:
    used = [step["uses"] for step in STEPS if "uses" in step]
    assert used
    assert all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", action) for action in used)


@pytest.mark.slow
def test_the_workflows_commands_pass_on_a_rerun_and_fail_on_a_lost_run(
    tmp_path: Path, checkpoint: Checkpoint
) -> None:
    base = {"pretrained": str(checkpoint("olmoe")), "device": "cpu"}
    grid = {"capacity": ["25%", "50%"]}
    path = write_sweep(tmp_path / "results/baseline", base=base, grid=grid)
    assert main(["sweep", str(path)]) == 0
    summary = tmp_path / "summary.md"
    # `moecache` as pip would have put it there.
    tool = tmp_path / "bin/moecache"
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m lm_eval_moecache.cli.main "$@"\n')
    tool.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tool.parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "GITHUB_STEP_SUMMARY": str(summary),
    }
    again, compare = [step["run"] for step in STEPS if "moecache sweep" in step.get("run", "")] + [
        step["run"] for step in STEPS if "moecache compare" in step.get("run", "")
    ]

    def bash(script: str) -> int:
        command = ["bash", "-e", "-c", script]
        return subprocess.run(command, cwd=tmp_path, env=environment).returncode

    assert bash(again) == 0
    assert bash(compare) == 0
    assert summary.read_text().startswith("### moecache: pass")
    next((tmp_path / "output/new/runs").glob("*.json")).unlink()
    assert bash(compare) == 1
    assert "REGRESSION" in summary.read_text()

"""Two runs in separate processes with different hash seeds report the same to the last byte."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import Checkpoint

REPOSITORY = Path(__file__).resolve().parent.parent

SCRIPT = """
import json, sys
from lm_eval_moecache.harness.arguments import read_config
from lm_eval_moecache.harness.lm import MoECacheLM
from tests.harness import answers
lm = MoECacheLM(pretrained=sys.argv[1], device="cpu", max_length=48, batch_size=2)
for policy in ({"policy": "specmd"}, {"policy": "on_demand", "eviction": "random", "seed": 3}):
    lm.install(read_config({**policy, "capacity": "25%"}))
    print(json.dumps([answers(lm), lm.report()]))
"""


def start(path: Path, hash_seed: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(path)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_reports_do_not_depend_on_the_process_or_its_hash_seed(checkpoint: Checkpoint) -> None:
    path = checkpoint("olmoe")
    processes = [start(path, seed) for seed in ("1", "4242")]
    outputs = []
    for process in processes:
        out, err = process.communicate()
        assert process.returncode == 0, err
        outputs.append([line for line in out.split("\n") if line.startswith("[")])
    first, second = outputs
    assert len(first) == 2
    assert first == second
    for line in first:
        report = json.loads(line)[1]
        assert report["totals"]["evictions"] > 0
        assert report["totals"]["hit_rate"] == pytest.approx(1 - report["totals"]["miss_rate"])

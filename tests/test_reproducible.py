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
    print("\\n" + json.dumps([answers(lm), lm.report()]))
"""


@pytest.mark.slow
def test_reports_do_not_depend_on_the_process_or_its_hash_seed(checkpoint: Checkpoint) -> None:
    command = [sys.executable, "-c", SCRIPT, str(checkpoint("olmoe"))]
    reports = []
    for seed in ("1", "4242"):
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(REPOSITORY)}
        process = subprocess.run(
            command, cwd=REPOSITORY, env=env, stdout=subprocess.PIPE, text=True
        )
        reports.append([line for line in process.stdout.split("\n") if line.startswith("[")])
    assert len(reports[0]) == 2 and reports[0] == reports[1]
    for line in reports[0]:
        totals = json.loads(line)[1]["totals"]
        assert totals["evictions"] > 0
        assert totals["hit_rate"] == pytest.approx(1 - totals["miss_rate"])

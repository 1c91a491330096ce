"""Equality on other machines, as far as this one can stand in: instruction sets, threads.

`python -m tests.model.test_machines` checks it bit for bit in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.model.batches import END, Batch, assert_exact
from tests.models import random_model

ROOT = Path(__file__).resolve().parents[2]
SMALL = Batch([1, 2, 9], [[3, END, 4], [5, 5, 5]])
"""Few rows with much padding, and one that ends."""
LONG = Batch([120], [[8]])
"""Buffers long enough to be divided among threads, and a decode step."""
SETS: dict[str, dict[str, str]] = {
    "own": {},
    "scalar": {"ATEN_CPU_CAPABILITY": "default"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "DNNL_MAX_CPU_ISA": "AVX2"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SETS)
def test_logits_are_identical_with_one_thread_and_two(name: str) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.model.test_machines"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **SETS[name]},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    # torch has read the variables: it runs with the instruction set asked for.
    expected = {"scalar": "DEFAULT", "avx2": "AVX2"}.get(name)
    assert expected in (None, run.stdout.split()[-1])


if __name__ == "__main__":
    for family, overrides in (("gpt_oss", {"intermediate_size": 56}), ("mixtral", {})):
        model = random_model(family, **overrides).to(torch.float32)
        for threads, batch in ((1, SMALL), (1, LONG), (2, LONG)):
            torch.set_num_threads(threads)
            assert_exact(model, batch, "wall", "1experts")
            assert_exact(model, batch, "virtual", "50%")
    print(torch.backends.cpu.get_cpu_capability())

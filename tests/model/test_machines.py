"""Equality on other machines, as far as one can stand in for them: instruction sets, threads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SETS: dict[str, dict[str, str]] = {
    "own": {},
    "scalar": {"ATEN_CPU_CAPABILITY": "default"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "DNNL_MAX_CPU_ISA": "AVX2"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SETS)
def test_logits_are_identical_with_one_thread_and_two(name: str) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.model.exact"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **SETS[name]},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    # The variables were read: what torch runs with is what was asked for.
    expected = {"scalar": "DEFAULT", "avx2": "AVX2"}.get(name)
    assert expected in (None, run.stdout.split()[-1])

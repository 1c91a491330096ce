"""`gpu_check`: it reads and judges the figures of its scripts, and every check runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
import gpu_check  # noqa: E402

SAID = {
    "link": "link as it is: one large copy median 9.0 (lowest 1.0, highest 9.9) GB/s\n"
    "link as it is: share of what there is median 0.912 (lowest 0.5, highest 0.95)\n"
    "link throttled to 1GB/s: share of what there is median 0.401 (lowest 0.4, highest 0.5)\n",
    "vs_hf": "speed of moecache / plain, prefill: median 1.020 (lowest 1.0, highest 1.1)\n"
    "speed of moecache / plain, decode:  median 0.990 (lowest 0.9, highest 1.0)\n",
    "vs_accelerate": "bytes brought near a step: 151.0 MB in whole layers, 22.0 MB by moecache: "
    "6.80 times fewer\nspeed of moecache / accelerate, prefill: median 2.000 (lowest 1, highest 3)"
    "\nspeed of moecache / accelerate, decode: median 3.100 (lowest 1, highest 4)\n",
    "clock": "specmd at 25%: TTFT 1.0 / 1.0 = 1.000 TPOT 1.0 / 2.0 = 0.500\n"
    "specmd at 50%: TTFT 1.0 / 1.0 = 1.010 TPOT 1.0 / 1.0 = 1.000\n",
}


def test_figures_are_read_and_judged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def answer(arguments: list[str], device: str, limit_s: float) -> tuple[int, str]:
        if "pytest" in arguments:
            return 1, "x\n1 failed, 25 passed"
        if "eval" in arguments:
            return 0, ""
        script = Path(arguments[0]).name
        (name,) = (n for n, (file, *_) in gpu_check.CHECKS.items() if file == script)
        return 0, SAID[name]

    monkeypatch.setattr(gpu_check, "_run", answer)
    report = gpu_check.check(
        "cpu", "nano", ["tests", *gpu_check.CHECKS, "runs"], 9.0, quick=False, folder=tmp_path
    )
    table = gpu_check.table(report)
    assert "| tests | failed: exit 1 1 failed, 25 passed | | 0 s |" in table
    assert "| link, share of one large copy | 0.912 | at least 0.9 | met |" in table
    assert "| link at 1GB/s, share of it | 0.401 | at least 0.9 | missed |" in table
    assert "| decode / transformers at 100% | 0.99 | at least 1.15 | missed |" in table
    assert "| decode / accelerate at 25% | 3.1 | at least 3.0 | met |" in table
    assert "| bytes a step, accelerate / ours | 6.8 |  |  |" in table
    # Of several figures all must lie within the bounds.
    assert "| TPOT virtual / wall | 0.5, 1 | 0.85 to 1.15 | missed |" in table
    assert "no figure is a device's" in table
    assert "- link leaves out a link: copies are within host memory" in table
    assert "moecache table" in table


def test_a_script_that_says_nothing_has_failed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu_check, "_run", lambda *_: (0, ""))
    report = gpu_check.check("cpu", "nano", ["vs_hf"], 9.0, quick=True, folder=tmp_path)
    assert not report["checks"]["vs_hf"]["passed"]
    assert "| decode / transformers at 100% | not said |" in gpu_check.table(report)


@pytest.mark.slow
def test_all_of_it_runs_with_the_store_of_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "found"
    command = [sys.executable, str(BENCHMARKS / "gpu_check.py"), "--device", "cpu", "--quick"]
    command += ["--shape", "nano", "--limit_s", "900", "--out", str(out)]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout[-3000:]
    report = json.loads((out / "check.json").read_text())
    assert list(report["checks"]) == ["tests", *gpu_check.CHECKS, "runs"]
    assert all(check["passed"] for check in report["checks"].values())
    listing = subprocess.run(
        [sys.executable, "-m", "lm_eval_moecache", "table", str(out / "runs")],
        capture_output=True,
        text=True,
    )
    assert listing.returncode == 0 and "tiny_gsm8k" in listing.stdout

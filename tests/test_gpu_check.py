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
    "tests": "x\n1 failed, 25 passed\n",
    "equality": "12 passed\n",
    "evaluation": "on_demand, batch 1: documents a second 2.00, hf 2.50, ratio 0.800\n"
    "on_demand, batch 16: documents a second 9.00, hf 10.00, ratio 0.900\n",
    "link": "copies of experts, 1 at once: share of one large copy median 0.7 (lowest 0.1, "
    "highest 1)\n"
    "link as it is: one large copy median 9.0 (lowest 1.0, highest 9.9) GB/s\n"
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


def sampled(command: list[str], answer: str) -> None:
    """Write what `eval --log_samples` would to the command's `--output_path`."""
    folder = Path(command[command.index("--output_path") + 1]) / "tiny"
    folder.mkdir(parents=True)
    lines = [{"doc_id": i, "filter": "f", "resps": [[answer if i else "0"]]} for i in range(4)]
    (folder / "samples_t.jsonl").write_text("\n".join(map(json.dumps, lines)))


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answer each command as its script would."""

    def answer(arguments: list[str], device: str, limit_s: float, said: Path) -> int:
        if "eval" in arguments:
            sampled(arguments, "1" if "clock=virtual" in " ".join(arguments) else "2")
        else:
            said.write_text(SAID[said.stem])
        return int(said.stem == "tests")

    monkeypatch.setattr(gpu_check, "_run", answer)


@pytest.mark.usefixtures("scripted")
def test_figures_are_read_and_judged(tmp_path: Path) -> None:
    report = gpu_check.check("cpu", "nano", [*gpu_check.CHECKS], 8.0, tmp_path)
    table = gpu_check.table(report)
    assert "| tests | failed: exit 1 1 failed, 25 passed | | 0 s |" in table
    assert "| equality | passed 12 passed | | 0 s |" in table
    assert "| documents a second / hf, by batch | 0.8, 0.9 |  |  |" in table
    assert "| 1, 4, 16, 64 experts / one large copy | 0.7 |  |  |" in table
    assert "| link, share of one large copy | 0.912 | at least 0.9 | met |" in table
    assert "| link at 1GB/s, share of it | 0.401 | at least 0.9 | missed |" in table
    assert "| decode / transformers at 100% | 0.99 | at least 1.15 | missed |" in table
    assert "| decode / accelerate at 25% | 3.1 | at least 3.0 | met |" in table
    assert "| bytes a step, accelerate / ours | 6.8 |  |  |" in table
    # Of several figures all must lie within the bounds.
    assert "| TPOT virtual / wall | 0.5, 1 | 0.85 to 1.15 | missed |" in table
    # Of four documents one is answered alike.
    assert "| answers as under the first | 0.25 | 1.0 to 1.0 | missed |" in table
    assert "no figure is a device's" in table
    assert "- link leaves out a link: copies are within host memory" in table


def test_what_is_stopped_keeps_what_it_said_and_the_next_one_runs(tmp_path: Path) -> None:
    """Each check is on disk as soon as it ends: a run that is cut off later has shown it."""
    said = tmp_path / "said.txt"
    words = ["-c", "import time; print('ratio 0.5', flush=True); time.sleep(60)"]
    assert gpu_check._run(words, "cpu", 6.0, said) == 124
    assert said.read_text() == "ratio 0.5\n"


@pytest.mark.slow
def test_all_of_it_runs_with_the_store_of_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "found"
    command = [sys.executable, str(BENCHMARKS / "gpu_check.py"), "--device", "cpu"]
    command += ["--minutes", "60", "--out", str(out)]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout[-3000:]
    report = json.loads((out / "check.json").read_text())
    assert list(report["checks"]) == [*gpu_check.CHECKS]
    assert all(check["passed"] for check in report["checks"].values())
    assert report["checks"]["answers"]["found"]["answers as under the first"] == [1.0]
    listing = subprocess.run(
        [sys.executable, "-m", "lm_eval_moecache", "table", str(out / "runs")],
        capture_output=True,
        text=True,
    )
    assert listing.returncode == 0 and "tiny_gsm8k" in listing.stdout

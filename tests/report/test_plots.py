"""Plots are written for the figures there are, and repeat to the byte."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lm_eval_moecache.cli.main import main
from tests.report.runs import leaderboard_of_four, record, write

NAMES = (
    "accuracy_memory accuracy_miss_rate accuracy_tok_per_s "
    "capacity_accuracy capacity_miss_rate capacity_tok_per_s capacity_ttft_ms"
).split()


def test_every_plot_is_written_twice_the_same(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    folder = leaderboard_of_four(tmp_path / "four")
    for output in ("one", "two"):
        assert main(["plot", str(folder), f"--output={tmp_path / output}"]) == 0
    written = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert written == sorted(f"{name}.{form}" for name in NAMES for form in ("png", "svg"))
    for name in written:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_a_wrong_task_and_a_single_run_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    folder = leaderboard_of_four(tmp_path / "four")
    assert main(["plot", str(folder), "--task=quizz"]) == 2
    assert "Allowed: quiz" in capsys.readouterr().err
    assert main(["plot", str(write(tmp_path / "one", record("a")))]) == 2


def test_without_matplotlib_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["plot", str(leaderboard_of_four(tmp_path))]) == 2
    assert "lm-eval-moecache[plots]" in capsys.readouterr().err

"""The regression gate: what passes, what fails, and what it says."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from lm_eval_moecache.cli.main import main
from lm_eval_moecache.report.judgement import judge_score
from lm_eval_moecache.report.results import Score
from tests.report.runs import record, write

ANSWERS = (1.0,) * 9 + (0.0,)


def gate(tmp_path: Path, new: dict[str, Any], *options: str, **old: Any) -> int:
    write(tmp_path / "old", record("a", **{"answers": ANSWERS, **old}))
    write(tmp_path / "new", record("a", **{"answers": ANSWERS, **new}))
    return main(["compare", str(tmp_path / "old"), str(tmp_path / "new"), *options])


def test_a_rerun_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gate(tmp_path, {}) == 0
    assert capsys.readouterr().out == "pass: 4 figures: 4 same\n"


def test_lower_accuracy_fails_naming_task_and_metric(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gate(tmp_path, {"answers": (1.0,) * 5 + (0.0,) * 5}) == 1
    out = capsys.readouterr().out
    assert "worse    quiz acc,none: 0.9 -> 0.5" in out
    assert "paired samples" in out


def test_one_changed_answer_is_within_the_standard_error(tmp_path: Path) -> None:
    assert gate(tmp_path, {"answers": (1.0,) * 8 + (0.0,) * 2}) == 0


def test_two_lost_answers_fail_unless_more_standard_errors_are_allowed(tmp_path: Path) -> None:
    lower = {"answers": (1.0,) * 7 + (0.0,) * 3}
    assert gate(tmp_path, lower) == 1
    assert gate(tmp_path, lower, "--sigmas=2") == 0


def test_a_higher_miss_rate_fails_exactly_and_passes_by_tolerance(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gate(tmp_path, {"miss_rate": 0.26}) == 1
    assert "worse    quiz miss_rate: 0.25 -> 0.26" in capsys.readouterr().out
    assert gate(tmp_path, {"miss_rate": 0.26}, "--tolerance=0.05") == 0
    assert gate(tmp_path, {"miss_rate": 0.26}, "--tolerance=miss_rate=0.05") == 0
    assert gate(tmp_path, {"miss_rate": 0.26}, "--tolerance=tok_per_s=0.05") == 1
    assert gate(tmp_path, {"miss_rate": 0.24, "tok_per_s": 101}) == 0


def test_the_wall_clock_has_a_tolerance_of_its_own(tmp_path: Path) -> None:
    assert gate(tmp_path, {"clock": "wall", "tok_per_s": 95}, clock="wall") == 0
    assert gate(tmp_path, {"clock": "wall", "tok_per_s": 85}, clock="wall") == 1


def test_a_missing_task_fails_by_name_and_a_new_one_passes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gate(tmp_path, {"tasks": ("quiz",)}, tasks=("quiz", "exam")) == 1
    assert "missing  exam" in capsys.readouterr().out
    assert gate(tmp_path, {"tasks": ("quiz", "exam")}) == 0


def test_a_missing_run_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "old", record("b", capacity="50%"))
    assert gate(tmp_path, {}) == 1
    assert "capacity=50%" in capsys.readouterr().out


def test_unusable_input_exits_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gate(tmp_path, {"capacity": "7%"}) == 2
    assert "no configuration in common" in capsys.readouterr().err
    assert gate(tmp_path, {"capacity": "7%"}, "--ignore=capacity") == 0
    assert gate(tmp_path, {}, "--metrics=mis_rate") == 2
    assert gate(tmp_path, {}, "--tolerance=much") == 2
    write(tmp_path / "new", record("b"))
    assert gate(tmp_path, {}) == 2
    assert "two runs" in capsys.readouterr().err
    assert main(["compare", str(tmp_path / "old"), str(tmp_path / "nothing")]) == 2


def test_machine_readable_and_markdown_forms(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gate(tmp_path, {"miss_rate": 0.5}, "--format=json") == 1
    data = json.loads(capsys.readouterr().out)
    assert data["verdict"] == "regression"
    worse = [row for row in data["rows"] if row["verdict"] == "worse"]
    assert [(row["task"], row["metric"], row["change"]) for row in worse] == [
        ("quiz", "miss_rate", 0.25)
    ]
    assert gate(tmp_path, {"miss_rate": 0.5}, "--format=md") == 1
    out = capsys.readouterr().out
    assert out.startswith("### moecache: REGRESSION: 4 figures: 3 same, 1 worse")
    assert "| **worse** | `moecache,capacity=25%,policy=specmd` | quiz | miss_rate |" in out


def test_perplexity_is_judged_by_its_log_likelihoods() -> None:
    def score(value: float) -> Score:
        return Score(
            metric="word_perplexity",
            filter="none",
            value=value,
            stderr=None,
            higher_is_better=False,
        )

    words = (10.0, 20.0, 30.0)
    old = {str(i): [-2.0 * w, w] for i, w in enumerate(words)}
    # Every document loses the same per word: no doubt about the difference.
    new = {str(i): [-2.1 * w, w] for i, w in enumerate(words)}
    judged = judge_score(score(math.exp(2)), score(math.exp(2.1)), (old, new), 1.0)
    assert judged.verdict == "worse"
    assert judged.allowed == pytest.approx(0, abs=1e-9)
    mixed = {"0": [-19.0, 10.0], "1": [-45.0, 20.0], "2": [-59.0, 30.0]}
    later = math.exp(123 / 60)
    judged = judge_score(score(math.exp(2)), score(later), (old, mixed), 1.0)
    assert judged.verdict == "within"

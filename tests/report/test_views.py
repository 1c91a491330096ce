"""Views relative to a baseline, the best within a budget, figures, boards over folders."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from lm_eval_moecache.cli.main import main
from tests.report.runs import leaderboard_of_four, record, write

Captured = pytest.CaptureFixture[str]


def sweep_file(folder: Path, **fields: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sweep.yaml").write_text(yaml.safe_dump({"tasks": "quiz", **fields}))
    return folder


def test_changes_are_percent_of_the_baseline_at_the_same_place(
    tmp_path: Path, capsys: Captured
) -> None:
    leaderboard_of_four(tmp_path)
    base = {"policy": "on_demand"}
    sweep_file(
        tmp_path,
        views=[
            {"title": "A", "rows": "capacity", "columns": "policy", "values": "tok_per_s",
             "relative_to": base},
            {"title": "B", "rows": ["capacity", "policy"], "values": ["miss_rate"],
             "relative_to": base, "sort": ["capacity", "policy"]},
        ],
    )  # fmt: skip
    assert main(["table", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    # 90 of 80 and 200 of 120 tokens per second; the baseline has no change of its own.
    assert "| 5% | 80.0 | 90.0 | 12.5 |\n| 50% | 120.0 | 200.0 | 66.7 |" in out
    assert "tok/s change % at specmd" in out
    assert "tok/s change % at on_demand" not in out
    assert "| 5% | specmd | 0.5000 | -16.7 |" in out
    assert "| 5% | on_demand | 0.6000 |  |" in out


def test_a_baseline_that_is_no_row_or_column_is_refused(tmp_path: Path, capsys: Captured) -> None:
    leaderboard_of_four(tmp_path)
    view = {"rows": "capacity", "values": ["miss_rate"], "relative_to": {"policy": "specmd"}}
    sweep_file(tmp_path, views=[view])
    assert main(["table", str(tmp_path)]) == 2
    assert "views: relative_to='policy'" in capsys.readouterr().err


def pickable(folder: Path, loss: float, **rule: object) -> Path:
    """At each capacity a baseline of accuracy 1 and two others with fewer misses at a price."""
    answers = {"on_demand": (1,) * 10, "b": (1,) * 9 + (0,), "c": (1,) * 6 + (0,) * 4}
    misses = {"on_demand": 0.5, "b": 0.3, "c": 0.1}
    for capacity in ("5%", "50%"):
        for name in answers:
            if (capacity, name) == ("50%", "b"):
                continue
            each = record(
                f"{name}{capacity}", policy=name, capacity=capacity, answers=answers[name],
                miss_rate=misses[name],
            )  # fmt: skip
            write(folder, each)
    whole = {"best": "miss_rate", "score": "quiz", "loss": loss}
    whole |= {"relative_to": {"policy": "on_demand"}, **rule}
    view = {"title": "P", "rows": "capacity", "values": ["policy", "miss_rate"], "pick": whole}
    return sweep_file(folder, views=[{**view, "sort": ["capacity"]}])


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (0.0, "| 5% | on_demand | 0.5000 |\n| 50% | on_demand | 0.5000 |"),
        (0.1, "| 5% | b | **0.3000** |\n| 50% | on_demand | 0.5000 |"),
        (0.4, "| 5% | c | 0.1000 |\n| 50% | c | 0.1000 |"),
    ],
)
def test_the_pick_has_the_fewest_misses_within_the_loss(
    tmp_path: Path, loss: float, expected: str, capsys: Captured
) -> None:
    assert main(["table", str(pickable(tmp_path, loss))]) == 0
    assert expected in capsys.readouterr().out.partition("## P")[2]


FIGURE = {
    "name": "mine",
    "group": "policy",
    "line": True,
    "panels": [{"x": "capacity", "y": "miss_rate"}, {"x": "tok_per_s", "y": "quiz"}],
}


def test_the_figures_of_a_sweep_file_are_drawn_and_repeat_to_the_byte(tmp_path: Path) -> None:
    folder = sweep_file(leaderboard_of_four(tmp_path / "four"), figures=[FIGURE])
    for output in ("one", "two"):
        assert main(["plot", str(folder), f"--output={tmp_path / output}"]) == 0
    assert sorted(p.name for p in (tmp_path / "one").iterdir()) == ["mine.png", "mine.svg"]
    for name in ("mine.png", "mine.svg"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    text = (tmp_path / "one/mine.svg").read_text()
    assert "on_demand" in text
    assert "(less is better)" in text


@pytest.mark.parametrize(
    ("command", "wrong", "message"),
    [
        ("table", {"best": "mis_rate"}, "Did you mean 'miss_rate'"),
        ("table", {"score": "quizz"}, "no score of 'quizz'"),
        ("table", {"los": 0.1}, "Did you mean 'loss'"),
        ("plot", {"panels": [{"x": "capacity", "y": "mis_rate"}]}, "Did you mean 'miss_rate'"),
        ("plot", {"where": {"policy": "nobody"}}, "no run has where"),
    ],
)
def test_a_wrong_pick_or_figure_is_named(
    tmp_path: Path, command: str, wrong: dict[str, object], message: str, capsys: Captured
) -> None:
    if command == "table":
        folder = pickable(tmp_path, 0.1, **wrong)
    else:
        folder = sweep_file(leaderboard_of_four(tmp_path), figures=[{**FIGURE, **wrong}])
    assert main([command, str(folder)]) == 2
    assert message in capsys.readouterr().err


def test_each_writes_every_sweeps_table_and_the_leaderboard_over_them(
    tmp_path: Path, capsys: Captured
) -> None:
    sweep_file(leaderboard_of_four(tmp_path / "one"), title="One")
    write(sweep_file(tmp_path / "deep/two"), record("z", capacity="9%", tasks=("quiz", "exam")))
    sweep_file(tmp_path / "unfinished")
    board = {"title": "All", "where": {"tasks": "quiz"}, "columns": ["policy", "capacity", "quiz"]}
    (tmp_path / "table.yaml").write_text(yaml.safe_dump(board))
    assert main(["table", str(tmp_path), "--each", "--write"]) == 0
    written = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("table.md"))
    assert written == ["deep/two/table.md", "one/table.md", "table.md"]
    top = (tmp_path / "table.md").read_text()
    assert top.startswith("## All\n\n| Policy | Capacity | quiz acc |")
    assert "9%" not in top
    assert (tmp_path / "one/table.md").read_text().startswith("## One")
    capsys.readouterr()
    assert main(["table", str(tmp_path), "--each"]) == 2
    (tmp_path / "table.yaml").write_text("{colums: [policy]}")
    assert main(["table", str(tmp_path)]) == 2
    assert "Did you mean 'columns'" in capsys.readouterr().err

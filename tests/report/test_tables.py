"""Leaderboards and views: what they show, mark and sort, and that they repeat themselves."""

from __future__ import annotations

import csv
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from lm_eval_moecache.cli.main import main
from lm_eval_moecache.report.results import load_runs
from tests.report.runs import leaderboard_of_four, record, write

Captured = pytest.CaptureFixture[str]
MARKDOWN = """\
| Policy | Capacity | quiz acc | TTFT ms | tok/s | Hit | Miss | Pareto |
| --- | --- | --: | --: | --: | --: | --: | :-: |
| on_demand | 50% | 0.750 ±0.250 | 2.000 | 120.0 | 0.8000 | 0.2000 |  |
| on_demand | 5% | 0.750 ±0.250 | 2.000 | 80.0 | 0.4000 | 0.6000 |  |
| specmd | 50% | 0.500 ±0.289 | 2.000 | **200.0** | **0.9000** | **0.1000** | * |
| specmd | 5% | 0.250 ±0.250 | 2.000 | 90.0 | 0.5000 | 0.5000 |  |

Bold: significantly best of its column, by a test over the documents (p ≤ 0.05); `*`: not \
dominated by any other row in accuracy and tok/s, by that test; ±: standard error.
"""


def table(folder: Path, *options: str) -> int:
    return main(["table", str(folder), *options])


def test_the_leaderboard_marks_the_best_and_the_front(tmp_path: Path, capsys: Captured) -> None:
    assert table(leaderboard_of_four(tmp_path)) == 0
    assert capsys.readouterr().out == MARKDOWN


def test_rows_that_a_board_keeps_apart_are_not_ranked_together(
    tmp_path: Path, capsys: Captured
) -> None:
    folder = leaderboard_of_four(tmp_path)
    shown = "columns: [capacity, policy, tok_per_s, pareto]\nsort: [capacity, tok_per_s]\n"
    marked = {}
    for by in ("", "by: [capacity]\n"):
        (folder / "table.yaml").write_text(shown + by)
        assert table(folder) == 0
        text = capsys.readouterr().out
        marked[by] = [line for line in text.splitlines() if "**" in line]
        assert ("rows of different capacity are not compared" in text) is bool(by)
    assert len(marked[""]) == 1 and "200.0" in marked[""][0]
    both = [line.split("|")[1].strip() for line in marked["by: [capacity]\n"]]
    assert both == ["5%", "50%"]
    assert all(line.endswith("| * |") for line in marked["by: [capacity]\n"])


def test_the_same_runs_give_the_same_bytes_wherever_they_lie(tmp_path: Path) -> None:
    first = leaderboard_of_four(tmp_path / "first")
    (first / "sweep.yaml").write_text("name: made-up\ntasks: quiz\n")
    second = tmp_path / "elsewhere" / "second"
    shutil.copytree(first, second)
    for path in sorted((second / "runs").iterdir(), reverse=True):
        # Another order on the disk, another date: neither is part of a table.
        data = json.loads(path.read_text())
        path.unlink()
        path.write_text(
            json.dumps({**data, "environment": {"date": "today", "seconds": 9}}, indent=3)
        )
    for folder in (first, second):
        assert table(folder, "--write") == 0
    for form in ("md", "csv", "html", "json"):
        name = f"table.{form}"
        assert (first / name).read_bytes() == (second / name).read_bytes()
        assert str(tmp_path) not in (first / name).read_text()
    before = (first / "table.json").read_bytes()
    assert table(first, "--write", "--format=json") == 0, "a written table is no run"
    assert (first / "table.json").read_bytes() == before


def test_columns_and_order_can_be_chosen(tmp_path: Path, capsys: Captured) -> None:
    folder = leaderboard_of_four(tmp_path)
    columns = "policy,capacity,quiz:acc,decode_miss_rate,ttft_ms.p99,tok_per_s@quiz"
    assert table(folder, "--format=csv", f"--columns={columns}", "--sort=capacity,tok_per_s") == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [(r["capacity"], r["tok_per_s@quiz"]) for r in rows] == [
        ("5%", "90"),
        ("5%", "80"),
        ("50%", "200"),
        ("50%", "120"),
    ]
    assert rows[0]["ttft_ms.p99"] == "4.0"
    assert rows[0]["quiz:acc_stderr"] == "0.25"
    assert table(folder, "--format=csv", "--columns=tok_per_s", "--sort=tok_per_s:asc") == 0
    assert capsys.readouterr().out.split() == ["tok_per_s", "80", "90", "120", "200"]


def test_a_folder_without_runs_is_an_error(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "other.json").write_text("[]")
    assert table(tmp_path) == 2
    assert "no results" in capsys.readouterr().err
    assert table(tmp_path / "nowhere") == 2


def test_what_varies_becomes_a_column_and_the_mean_of_tasks_is_shown(
    tmp_path: Path, capsys: Captured
) -> None:
    write(
        tmp_path,
        record("a", tasks=("quiz", "exam"), bandwidth="5GB/s"),
        record("b", tasks=("quiz", "exam"), bandwidth="9GB/s"),
    )
    assert table(tmp_path) == 0
    head = capsys.readouterr().out.splitlines()[0]
    assert "| Bandwidth | Accuracy | quiz acc | exam acc |" in head


def test_a_pivot_view_puts_one_setting_across(tmp_path: Path, capsys: Captured) -> None:
    leaderboard_of_four(tmp_path)
    (tmp_path / "sweep.yaml").write_text(
        "title: All\ntasks: quiz\nviews:\n"
        "- {title: Speed, rows: policy, columns: capacity, values: tok_per_s}\n"
        "- {title: Small, where: {capacity: 5%}, rows: policy, values: [miss_rate]}\n"
    )
    assert table(tmp_path) == 0
    out = capsys.readouterr().out
    assert "## Speed: tok/s\n\n| Policy | capacity 5% | capacity 50% |" in out
    assert "| on_demand | 80.0 | 120.0 |\n| specmd | 90.0 | 200.0 |" in out
    assert "## Small\n\n| Policy | Miss |" in out
    (tmp_path / "sweep.yaml").write_text(
        "tasks: quiz\nviews: [{title: Thin, rows: miss, columns: capacity, values: tok_per_s}]\n"
    )
    assert table(tmp_path) == 2
    assert "several runs at" in capsys.readouterr().err


def test_results_of_lm_eval_itself_can_be_read(tmp_path: Path) -> None:
    data = record("x")
    for key in ("configuration", "scores", "run_id", "experiment", "label"):
        del data[key]
    data["config"] |= {"model": "moecache", "model_args": "policy=specmd,capacity=5%", "limit": 4}
    (tmp_path / "results_2026.json").write_text(json.dumps(data))
    [run] = load_runs(tmp_path)
    assert run.model_args == {"policy": "specmd", "capacity": "5%"}
    assert run.options == {"limit": 4}
    assert [s.key for s in run.scores("quiz")] == ["acc,none"]


def test_a_group_with_a_score_stands_for_its_tasks(tmp_path: Path) -> None:
    data = record("x", tasks=("all", "part_a", "part_b"))
    data["group_subtasks"] = {"all": ["part_a", "part_b"]}
    write(tmp_path, data)
    [run] = load_runs(tmp_path)
    assert (run.scored, run.tasks) == (["all"], ["part_a", "part_b"])
    del data["results"]["all"]
    data["results"] = {"all": {"alias": "all"}, **data["results"]}
    write(tmp_path, data)
    [run] = load_runs(tmp_path)
    assert run.scored == ["part_a", "part_b"]


def many(name: str, right: int, tok_per_s: float, **more: Any) -> dict[str, Any]:
    """Build a run of 40 documents of which the first are right."""
    answers = [1.0] * right + [0.0] * (40 - right)
    return record(name, policy=name, answers=answers, tok_per_s=tok_per_s, **more)


def marked(folder: Path, capsys: Captured, *options: str) -> dict[str, list[str]]:
    assert table(folder, "--columns=policy,accuracy,tok_per_s,pareto", *options) == 0
    rows = [
        line.removeprefix("| ").removesuffix(" |").split(" | ")
        for line in capsys.readouterr().out.splitlines()[2:]
    ]
    return {row[0]: [cell.strip() for cell in row[1:]] for row in rows if len(row) > 2}


def test_marks_follow_the_test_and_not_the_digit(tmp_path: Path, capsys: Captured) -> None:
    """Three documents of 40 (p 0.125) make neither the best accuracy nor a place on the front."""
    runs = [many("a", 26, 60), many("pre_gated", 29, 50), many("broken", 8, 300)]
    found = marked(write(tmp_path, *runs), capsys)
    assert found["pre_gated"][0].startswith("**0.725") and found["a"][0].startswith("**0.650")
    assert found["broken"][0].startswith("0.200")
    assert {name: row[2] for name, row in found.items()} == {
        "a": "*",
        "pre_gated": "",
        "broken": "*",
    }
    # A third between the two, told from neither: then nothing is best.
    write(tmp_path, many("between", 26, 10), many("near", 25, 20), many("low", 22, 30))
    assert not any(row[0].startswith("**") for row in marked(tmp_path, capsys).values())


def test_runs_of_different_identity_are_told_apart_and_not_ranked(
    tmp_path: Path, capsys: Captured
) -> None:
    one, four = many("specmd", 26, 1007), many("specmd", 26, 2914)
    four |= {"run_id": "four"}
    # As `lm_eval run --batch_size 4` has it: not among the model's arguments.
    one["config"]["batch_size"], four["config"]["batch_size"] = 1, 4
    assert table(write(tmp_path, one, four)) == 0
    out = capsys.readouterr().out
    assert "| Policy | Capacity | Batch size |" in out
    assert "**2914.0**" not in out and "| * |" not in out
    assert "rows of different batch_size are not compared" in out
    assert table(tmp_path, "--columns=batch_size,tok_per_s", "--format=csv") == 0
    assert capsys.readouterr().out.split()[0] == "batch_size,tok_per_s"


def test_parameters_of_algorithms_can_stand_in_one_column(tmp_path: Path, capsys: Captured) -> None:
    others = {"miss": "drop", "miss.h": 1, "eviction.order": "fifo", "bandwidth": "5GB/s"}
    write(tmp_path, record("a", **others), record("b"))
    assert main(["table", str(tmp_path), "--columns=policy,parameters", "--sort=parameters"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2:4] == ["| specmd | miss.h=1, eviction.order=fifo |", "| specmd |  |"]


@pytest.mark.parametrize("name", ["=1+1", "+1", "-cmd", "@SUM(A1)", "\t=1"])
def test_no_csv_cell_is_a_formula(tmp_path: Path, capsys: Captured, name: str) -> None:
    folder = write(tmp_path, record("a", policy=name), record("b", miss_rate=-0.25))
    assert table(folder, "--format=csv", "--columns=policy,miss_rate") == 0
    rows = list(csv.reader(io.StringIO(capsys.readouterr().out)))
    assert [f"'{name}", "0.25"] in rows
    assert ["specmd", "-0.25"] in rows, "a number is none"


def test_markdown_cells_stay_cells(tmp_path: Path, capsys: Captured) -> None:
    folder = write(tmp_path, record("a", policy="a|b\nc<script>\\"), record("b"))
    assert table(folder, "--columns=policy,miss_rate", "--title=<img src=x>[a](javascript:b)") == 0
    lines = capsys.readouterr().out.splitlines()
    assert r"| a\|b c&lt;script>\\ | 0.2500 |" in lines
    assert lines[0] == r"## &lt;img src=x>\[a](javascript:b)"
    assert all(line.count(" | ") == 1 for line in lines if line.startswith("| "))


def test_percentiles_and_standard_errors_of_speed(tmp_path: Path, capsys: Captured) -> None:
    made = record("a")
    figures = made["config"]["moecache"]["totals"]
    figures["ttft_ms"] = {**figures["ttft_ms"], "stderr": 0.125}
    figures["miss_rate_stderr"] = 0.0125
    folder = write(tmp_path, made)
    assert table(folder, "--columns=ttft_ms,ttft_ms.*,miss_rate") == 0
    out = capsys.readouterr().out
    assert "| TTFT ms | TTFT ms mean | TTFT ms p50 | TTFT ms p90 | TTFT ms p99 | Miss |" in out
    row = "| 2.000 ±0.125 | 2.000 ±0.125 | 1.500 | 3.000 | 4.000 | 0.2500 ±0.0125 |"
    assert row in out


# --- views relative to a baseline, the best within a budget, figures, boards over folders ---


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

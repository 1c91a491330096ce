"""Leaderboards and views: what they show, mark and sort, reproducibly."""

from __future__ import annotations

import csv
import functools
import io
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from lm_eval_moecache.cli.main import main
from lm_eval_moecache.report.runs.files import load_runs
from lm_eval_moecache.report.statistics import (
    documents_needed,
    other_documents_interval,
)
from lm_eval_moecache.report.tables.leaderboard import leaderboard
from lm_eval_moecache.report.tables.lost import lost_points
from tests.conftest import Moecache
from tests.report.runs import leaderboard_of_four, record, write

MARKDOWN = """\
| Policy | Capacity | quiz acc | tok/s | TTFT ms | Miss | Pareto |
| --- | --- | --: | --: | --: | --: | :-: |
| on_demand | 50% | 0.750 ±0.250 | 120.0 | 2.000 | 0.2000 |  |
| on_demand | 5% | 0.750 ±0.250 | 80.0 | 2.000 | 0.6000 |  |
| specmd | 50% | 0.500 ±0.289 | 200.0 | 2.000 | 0.1000 | * |
| specmd | 5% | 0.250 ±0.250 | 90.0 | 2.000 | 0.5000 |  |

`*`: Pareto front: each row at least as fast scores over 1 point lower, by a test over the \
documents (p ≤ 0.05). A lossless row is on it unless a row at least as fast scores no lower and is \
either lossless or shown to be less than 1 point worse. ±: standard error.
"""


Table = Callable[..., str]


@pytest.fixture
def table(moecache: Moecache) -> Table:
    return functools.partial(moecache, "table")


def sweep_file(folder: Path, **fields: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sweep.yaml").write_text(yaml.safe_dump({"tasks": "quiz", **fields}))
    return folder


def test_the_leaderboard_marks_the_best_and_the_front(tmp_path: Path, table: Table) -> None:
    assert table(leaderboard_of_four(tmp_path)) == MARKDOWN


def test_rows_that_a_board_keeps_apart_are_not_ranked_together(
    tmp_path: Path, table: Table
) -> None:
    folder = leaderboard_of_four(tmp_path, totals={"tok_per_s_stderr": 0.5})
    board = "columns: [capacity, policy, tok_per_s, pareto]\nsort: [capacity, tok_per_s]\n"
    marked = []
    for by in ("", "by: [capacity]\n"):
        (folder / "table.yaml").write_text(board + by)
        text = table(folder)
        marked.append([line for line in text.splitlines() if "**" in line])
        assert ("Rows of different capacity are not compared" in text) is bool(by)
    assert len(marked[0]) == 1 and "200.0" in marked[0][0]
    assert [line.split("|")[1].strip() for line in marked[1]] == ["5%", "50%"]
    assert all(line.endswith("| * |") for line in marked[1])


def test_bounds_stand_last_and_neither_win_a_column_nor_the_front(
    tmp_path: Path, table: Table
) -> None:
    folder = leaderboard_of_four(tmp_path)
    bound = record("e", policy="on_demand + eviction=belady", tok_per_s=500, miss_rate=0.01)
    bound["config"]["moecache"]["policy"]["eviction"] = {"name": "belady"}
    write(folder, bound)
    *rows, blank, legend = table(folder).splitlines()[:9]
    assert rows[-1].startswith("| on_demand + eviction=belady |") and not blank
    assert "**" not in rows[-1] and rows[-1].endswith("|  |")
    assert [row for row in rows if " 200.0 " in row and row.endswith("| * |")]
    assert "know the future are listed last, without a rank" in legend
    assert "know the future" not in table(leaderboard_of_four(tmp_path / "without"))


def test_a_board_makes_one_row_of_what_differs_in_the_name_alone(
    tmp_path: Path, table: Table
) -> None:
    pair = [record(name, policy=name) for name in ("one", "other")]
    # Another parameter, without a column: two configurations, of which no figure tells.
    pair[1]["config"]["moecache"]["policy"]["miss"] = {"name": "x", "h": 1}
    folder = write(tmp_path, *pair, record("third", policy="third", capacity="5%", tok_per_s=50.0))
    assert len([line for line in table(folder).splitlines() if line.startswith("| o")]) == 2
    (folder / "table.yaml").write_text("distinct: true\n")
    lines = table(folder).splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:4]] == ["one, other", "third"]


def test_the_same_runs_give_the_same_bytes_wherever_they_lie(tmp_path: Path, table: Table) -> None:
    first = sweep_file(leaderboard_of_four(tmp_path / "first"), name="made-up")
    second = tmp_path / "elsewhere" / "second"
    shutil.copytree(first, second)
    for path in sorted((second / "runs").iterdir(), reverse=True):
        # A table depends neither on the order on disk nor on the date.
        data = json.loads(path.read_text()) | {"environment": {"date": "today", "seconds": 9}}
        path.unlink()
        path.write_text(json.dumps(data, indent=3))
    for folder in (first, second):
        table(folder, "--write")
    for name in ("table.md", "table.csv", "table.html", "table.json"):
        assert (first / name).read_bytes() == (second / name).read_bytes()
        assert str(tmp_path) not in (first / name).read_text()
    before = (first / "table.json").read_bytes()
    table(first, "--write", "--format=json")
    assert (first / "table.json").read_bytes() == before, "a written table is no run"


def test_columns_and_order_can_be_chosen(tmp_path: Path, table: Table) -> None:
    folder = leaderboard_of_four(tmp_path)
    columns = "policy,capacity,quiz:acc,decode_miss_rate,ttft_ms.p99,tok_per_s@quiz"
    text = table(folder, "--format=csv", f"--columns={columns}", "--sort=capacity,tok_per_s")
    rows = list(csv.DictReader(io.StringIO(text)))
    speeds = [(r["capacity"], r["tok_per_s@quiz"]) for r in rows]
    assert speeds == [("5%", "90"), ("5%", "80"), ("50%", "200"), ("50%", "120")]
    assert (rows[0]["ttft_ms.p99"], rows[0]["quiz:acc_stderr"]) == ("4.0", "0.25")
    text = table(folder, "--format=csv", "--columns=tok_per_s", "--sort=tok_per_s:asc")
    assert text.split() == ["tok_per_s", "80", "90", "120", "200"]


def test_a_column_that_no_run_has_a_figure_for_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = leaderboard_of_four(tmp_path)
    assert main(["table", str(folder), "--columns=policy,draft_acceptance,tok_per_s"]) == 0
    assert "no run here has draft_acceptance: its column is empty" in capsys.readouterr().err


def of_versions(*torch: str) -> list[dict[str, Any]]:
    return [record(v, environment={"versions": {"torch": v, "other": "5"}}) for v in torch]


def two(**figures: Any) -> list[dict[str, Any]]:
    """Two runs that differ in their miss rate, which `figures` are of."""
    return [record(n, policy=n, miss_rate=m, totals=figures) for n, m in (("a", 0.1), ("b", 0.2))]


PLAIN = record("plain")
TIMES = {"mean": 2.0, "p50": 1.5, "p90": 3.0, "p99": 4.0, "stderr": 0.125}
OTHERS = {"miss": "drop", "miss.h": 1, "eviction.order": "fifo", "bandwidth": "5GB/s"}
RATES = "--columns=policy,decode_miss_rate,ttft_ms.p99,miss_rate"
RATE = ("--columns=policy,miss_rate",)
CSV = ("--format=csv", *RATE)


@pytest.mark.parametrize(
    ("runs", "options", "shown", "absent"),
    [
        # What varies is a column, and the mean of several tasks.
        (
            [record(b, tasks=("quiz", "exam"), bandwidth=f"{b}GB/s") for b in "59"],
            *((), "| Bandwidth | Accuracy | quiz acc | exam acc |", ""),
        ),
        (
            [record("a", **OTHERS), PLAIN],
            ("--columns=policy,parameters", "--sort=parameters"),
            *("| specmd | miss.h=1, eviction.order=fifo |\n| specmd |  |\n", ""),
        ),
        # Tables of one rule with another parameter were alike.
        ([record(c, capacity=c, **OTHERS) for c in ("5%", "9%")], (), "In all rows miss.h=1", ""),
        (
            [record("a", totals={"ttft_ms": TIMES, "miss_rate_stderr": 0.0125})],
            ("--columns=ttft_ms,ttft_ms.*,miss_rate",),
            "| TTFT ms | TTFT ms mean | TTFT ms p50 | TTFT ms p90 | TTFT ms p99 | Miss |\n"
            "| --: | --: | --: | --: | --: | --: |\n"
            "| 2.000 ±0.125 | 2.000 ±0.125 | 1.500 | 3.000 | 4.000 | 0.2500 ±0.0125 |",
            "",
        ),
        # What no test was made of is never bold.
        (two(), (RATES,), "| a | 0.0500 | 4.000 | 0.1000 |", "**"),
        (
            two(miss_rate_stderr=0.01),
            *((RATES,), "| a | 0.0500 | 4.000 | **0.1000 ±0.0100** |", ""),
        ),
        (two(routing_fidelity=1.0), (), "| Policy |", "Fidelity"),
        ([PLAIN, *two(routing_fidelity=0.75)], (), "| Fidelity |", "Low precision"),
        ([PLAIN, *two(low_precision_share=0.5)], (), "| Low precision |", "Fidelity"),
        (of_versions("2.12", "2.13"), (), "several versions of torch: rows may differ", "other"),
        (of_versions("2.13", "2.13"), (), "| Policy |", "versions"),
        # No cell is a formula, but a number may be negative; and none ends itself.
        *(
            ([record("a", policy=name)], CSV, f"\n'{name},0.25\n", "")
            for name in ("=1+1", "+1", "-cmd", "@SUM(A1)", "\t=1")
        ),
        ([record("a", miss_rate=-0.25)], CSV, "\nspecmd,-0.25\n", ""),
        (
            [record("a", policy="a|b\nc<script>\\")],
            *(RATE, "\n| a\\|b c&lt;script>\\\\ | 0.2500 |\n", "<script"),
        ),
        (
            *([PLAIN], (*RATE, "--title=<img src=x>[a](javascript:b)")),
            *("## &lt;img src=x>\\[a](javascript:b)\n", "<img"),
        ),
    ],
)
def test_a_table_of_these_runs_shows(
    tmp_path: Path, table: Table, runs: Any, options: Any, shown: str, absent: str
) -> None:
    text = table(write(tmp_path, *runs), *options)
    assert shown in text and not (absent and absent in text)


def test_a_pivot_view_puts_one_setting_across(tmp_path: Path, table: Table) -> None:
    leaderboard_of_four(tmp_path)
    across = {"title": "Speed", "rows": "policy", "columns": "capacity", "values": "tok_per_s"}
    small = {"title": "Small", "where": {"capacity": "5%"}, "rows": "policy"}
    sweep_file(tmp_path, title="All", views=[across, {**small, "values": ["miss_rate"]}])
    out = table(tmp_path)
    assert "## Speed: tok/s\n\n| Policy | capacity 5% | capacity 50% |" in out
    assert "| on_demand | 80.0 | 120.0 |\n| specmd | 90.0 | 200.0 |" in out
    assert "## Small\n\n| Policy | Miss |" in out
    sweep_file(tmp_path, views=[{**across, "rows": "miss"}])
    assert "several runs at" in table(tmp_path, code=2)


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
    """Build a run of 40 documents, the first `right` of them answered correctly."""
    answers = [1.0] * right + [0.0] * (40 - right)
    return record(name, policy=name, answers=answers, tok_per_s=tok_per_s, **more)


def test_marks_follow_the_test_and_not_the_digit(tmp_path: Path, table: Table) -> None:
    """Three documents of 40 (p 0.125) earn neither the best accuracy nor a place on the front."""

    def marked() -> dict[str, list[str]]:
        lines = table(tmp_path, "--columns=policy,accuracy,tok_per_s,pareto").splitlines()[2:]
        rows = [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in lines]
        return {row[0]: [cell.strip() for cell in row[1:]] for row in rows if len(row) > 2}

    write(tmp_path, many("a", 26, 60), many("pre_gated", 29, 50), many("broken", 8, 300))
    cells = marked()
    # Nor are 26 of 40 shown not worse than 29: 0.650 is no best accuracy.
    assert cells["pre_gated"][0].startswith("0.725") and cells["a"][0].startswith("0.650")
    assert [cells[name][2] for name in ("a", "pre_gated", "broken")] == ["*", "", "*"]
    # A third between two, distinguishable from neither: then none is best.
    write(tmp_path, many("between", 26, 10), many("near", 25, 20), many("low", 22, 30))
    assert not any(row[0].startswith("**") for row in marked().values())


def stars(folder: Path, *runs: dict[str, Any]) -> set[str]:
    """The names of the rows with a star."""
    runs_of = load_runs(write(folder, *runs))
    board = leaderboard(runs_of, columns=["policy", "accuracy", "tok_per_s", "pareto"])
    return set(board.cells.policy[board.cells.pareto == "*"])


def lossy(name: str, answers: Sequence[float], speed: float, fidelity: float) -> dict[str, Any]:
    totals = {"routing_fidelity": fidelity}
    return record(name, policy=name, answers=answers, tok_per_s=speed, totals=totals)


def test_a_lossless_row_keeps_its_star_against_a_lossy_one_on_few_documents(
    tmp_path: Path,
) -> None:
    """14 and 13 of 20: no test tells a loss, which is no sign that there is none."""
    exact, fast = [1.0] * 14 + [0.0] * 6, [1.0] * 13 + [0.0] * 7
    runs = [lossy("exact", exact, 50, 1.0), lossy("slow", exact, 40, 1.0)]
    runs += [lossy("fast", fast, 90, 0.74), lossy("broken", [1.0, *[0.0] * 19], 80, 0.3)]
    assert stars(tmp_path / "few", *runs) == {"exact", "fast"}
    # As accurate as observed: 20 documents do not show it, 2000 do.
    runs[2] = lossy("fast", exact, 90, 0.74)
    assert stars(tmp_path / "equal", *runs) == {"exact", "fast"}
    many_documents = [lossy("exact", exact * 100, 50, 1.0), lossy("fast", exact * 100, 90, 0.74)]
    assert stars(tmp_path / "many", *many_documents) == {"fast"}


def test_a_score_is_best_where_it_is_shown_not_worse(tmp_path: Path, table: Table) -> None:
    right = [1.0] * 14 + [0.0] * 6
    for times, bold in ((4, 0), (100, 2)):
        rows = {"a": right * times, "b": right * times, "c": [0.0] * 20 * times}
        rows["b"][0] = 0.0
        runs = [record(name, policy=name, answers=answers) for name, answers in rows.items()]
        text = table(write(tmp_path / str(times), *runs), "--columns=policy,accuracy")
        assert text.count(" **0.") == bold
        assert ("less than 1 point worse" in text) == bool(bold)


ROW = st.tuples(
    st.lists(st.sampled_from((0.0, 1.0)), min_size=4, max_size=4),
    st.sampled_from((50.0, 60.0, 70.0)),
    st.sampled_from((0.5, 1.0)),
)


@given(st.lists(ROW, min_size=2, max_size=4), st.sampled_from((2, 5, 40)))
@settings(max_examples=60)
def test_fewer_documents_never_earn_a_star(rows: list[Any], times: int) -> None:
    """The same shares of answers on more documents: a lossy row has the star there, too.

    A lossless row loses its star only to what more documents show, and never to a row that is less
    accurate as observed.
    """
    few, more = (
        [lossy(str(i), a * n, speed, f) for i, (a, speed, f) in enumerate(rows)] for n in (1, times)
    )
    with TemporaryDirectory() as folder:
        starred, starred_by_more = (
            stars(Path(folder) / n, *runs) for n, runs in (("a", few), ("b", more))
        )
    exact = {str(i) for i, row in enumerate(rows) if row[2] == 1}
    assert starred - starred_by_more <= exact
    for i, (answers, speed, fidelity) in enumerate(rows):
        if fidelity == 1 and not any(
            sum(a) >= sum(answers) and s >= speed and (sum(a), s) != (sum(answers), speed)
            for a, s, _ in rows
        ):
            assert str(i) in starred & starred_by_more


def test_documents_of_one_batch_are_one_sample_of_the_test(tmp_path: Path, table: Table) -> None:
    """Eight documents, each a tenth faster: p 1/256 if each was alone, 1/4 in two batches."""
    for name, batches in (("alone", None), ("batches", 2), ("many", 8)):
        runs = [record(policy, policy=policy) for policy in ("base", "new")]
        for run, factor in zip(runs, (1.0, 0.9), strict=True):
            speed = {"ttft_ms,speed": {str(d): factor * (2 + d) for d in range(8)}}
            if batches is not None:
                speed["batch,speed"] = {str(d): d * batches // 8 for d in range(8)}
            run["scores"]["quiz"] |= speed
            run["results"]["quiz"]["ttft_ms,speed"] = factor * 5.5
            run["config"]["moecache"]["totals"]["ttft_ms"] = {"mean": factor * 5.5}
        out = table(write(tmp_path / name, *runs), "--columns=policy,ttft_ms")
        assert ("| new | **4.950** |" in out) == (batches != 2), out


def test_runs_of_different_identity_are_told_apart_and_not_ranked(
    tmp_path: Path, table: Table
) -> None:
    batch_of_1, batch_of_4 = many("specmd", 26, 1007), many("specmd", 26, 2914)
    batch_of_4 |= {"run_id": "four"}
    # Runs made before `streams` have it as the batch size, which lm-eval may have been given.
    batch_of_1["config"]["batch_size"], batch_of_4["config"]["batch_size"] = 1, 4
    out = table(write(tmp_path, batch_of_1, batch_of_4))
    assert "| Policy | Capacity | Streams |" in out
    assert "**2914.0**" not in out and "| * |" not in out
    assert "Rows of different streams are not compared" in out
    out = table(tmp_path, "--columns=streams,tok_per_s", "--format=csv")
    assert out.split()[0] == "streams,tok_per_s"


@pytest.mark.parametrize("text", [False, True])
def test_parameters_in_a_mapping_have_the_columns_of_dotted_keys(
    tmp_path: Path, table: Table, text: bool
) -> None:
    named, own, lambdas = {"name": "cache_prior"}, {"class_path": "fading.Fading"}, (0.1, 0.9)
    forms: dict[str, list[dict[str, Any]]] = {
        "dotted": [{"routing": "cache_prior", "routing.lambda": x} for x in lambdas],
        "mapping": [{"routing": {**named, "lambda": x}} for x in lambdas],
        "both": [{"routing": {**named, "lambda": 7}, "routing.lambda": x} for x in lambdas],
        "class": [{"routing": {**own, "init_args": {"lambda": x}}} for x in lambdas],
        "policy": [{"policy": {"routing": {**named, "lambda": x}}} for x in lambdas],
    }
    tables = set()
    for form, arguments_of in forms.items():
        runs = [record(str(i), policy="p") for i in range(2)]
        for run, arguments in zip(runs, arguments_of, strict=True):
            run["configuration"]["model_args"] |= arguments
        tables.add(table(write(tmp_path / form, *runs), *(["--format=csv"] if text else [])))
        columns = table(tmp_path / form, "--columns=parameters,routing.lambda").splitlines()
        assert "| routing.lambda=0.9 | 0.9 |" in columns
    (shown,) = tables
    assert "routing.lambda" in shown and "0.1" in shown


# --- views relative to a baseline, the best within a budget, figures, boards over folders ---


def test_changes_are_percent_of_the_baseline_at_the_same_place(
    tmp_path: Path, table: Table
) -> None:
    leaderboard_of_four(tmp_path)
    relative = {"relative_to": {"policy": "on_demand"}}
    keys = ["capacity", "policy"]
    across = {"title": "A", "rows": "capacity", "columns": "policy", "values": "tok_per_s"}
    flat = {"title": "B", "rows": keys, "values": ["miss_rate"], "sort": keys}
    sweep_file(tmp_path, views=[across | relative, flat | relative])
    out = table(tmp_path)
    # 90 against 80 and 200 against 120 tokens/s; the baseline itself has no change.
    assert "| 5% | 80.0 | 90.0 | 12.5 |\n| 50% | 120.0 | 200.0 | 66.7 |" in out
    assert "tok/s change % at specmd" in out
    assert "tok/s change % at on_demand" not in out
    assert "| 5% | specmd | 0.5000 | -16.7 |" in out
    assert "| 5% | on_demand | 0.6000 |  |" in out
    # A baseline must be a row or a column.
    sweep_file(tmp_path, views=[{"rows": "capacity", "values": ["miss_rate"], **relative}])
    assert "views: relative_to='policy'" in table(tmp_path, code=2)


def test_no_change_is_told_against_a_baseline_of_another_identity(
    tmp_path: Path, table: Table
) -> None:
    """A batch of eight is no policy that makes a run nine times as fast."""
    for name, batch_size, speed in (("base", 1, 100.0), ("same", 1, 150.0), ("other", 8, 900.0)):
        figures = {"tok_per_s": speed, "batch_size": batch_size}
        write(tmp_path, {**record(name, **figures), "label": name})
    view = {"title": "V", "rows": ["run"], "values": ["tok_per_s"], "sort": ["run"]}
    told = []
    for relative in ({"run": "base"}, {"run": "base", "streams": 1}):
        rows = ["run", *(key for key in relative if key != "run")]
        sweep_file(tmp_path, views=[{**view, "rows": rows, "relative_to": relative}])
        told.append(table(tmp_path).partition("## V")[2])
    assert "| same | 150.0 | 50.0 |" in told[0] and "| other | 900.0 |  |" in told[0]
    # Where the view names the difference, it is what the change is of.
    assert "| other | 8 | 900.0 | 800.0 |" in told[1]


def test_a_figure_of_what_no_run_has_is_refused(tmp_path: Path, moecache: Moecache) -> None:
    panels = [{"x": "capacity", "y": "miss_rate"}]
    figure = {"name": "mine", "panels": panels, "where": {"policy": "nobody"}}
    folder = sweep_file(leaderboard_of_four(tmp_path / "figure"), figures=[figure])
    assert "no run has where" in moecache("plot", folder, code=2)


def test_each_writes_every_sweeps_table_and_the_leaderboard_over_them(
    tmp_path: Path, table: Table
) -> None:
    sweep_file(leaderboard_of_four(tmp_path / "one"), title="One")
    write(sweep_file(tmp_path / "deep/two"), record("z", capacity="9%", tasks=("quiz", "exam")))
    sweep_file(tmp_path / "unfinished")
    board = {"title": "All", "where": {"tasks": "quiz"}, "columns": ["policy", "capacity", "quiz"]}
    (tmp_path / "table.yaml").write_text(yaml.safe_dump(board))
    table(tmp_path, "--each", "--write")
    written = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("table.md"))
    assert written == ["deep/two/table.md", "one/table.md", "table.md"]
    top = (tmp_path / "table.md").read_text()
    assert top.startswith("## All\n\n| Policy | Capacity | quiz acc |") and "9%" not in top
    assert (tmp_path / "one/table.md").read_text().startswith("## One")
    table(tmp_path, "--each", code=2)
    (tmp_path / "table.yaml").write_text("{colums: [policy]}")
    assert "Did you mean 'columns'" in table(tmp_path, code=2)


def test_a_lossy_run_says_what_it_loses_and_what_a_thousand_documents_would(
    tmp_path: Path, moecache: Moecache
) -> None:
    right = [1] * 30 + [0] * 10
    wrong = [0] * 6 + [1] * 24 + [1, 1] + [0] * 8
    exact = record("exact", answers=right, totals={"routing_fidelity": 1})
    lossy = record("lossy", policy="cut", answers=wrong, totals={"routing_fidelity": 0.5})
    write(tmp_path, exact, lossy)
    found = lost_points(load_runs(tmp_path))
    assert found is not None
    (figures,) = found.cells.to_dict("records")
    assert (figures["documents"], figures["won"], figures["lost"]) == (40, 2, 6)
    assert figures["points_lost"] == pytest.approx(10)
    low, high = other_documents_interval(2, 6, 40, 1000)
    assert (figures["low"], figures["high"]) == pytest.approx((-100 * high, -100 * low))
    assert figures["documents_for_1"] == documents_needed(0.01, 0.2)
    assert figures["documents_for_3"] == documents_needed(0.03, 0.2)
    text = moecache("table", tmp_path)
    assert "## Points lost against the lossless run" in text
    assert [view["title"] for view in moecache.json("table", tmp_path)["views"]] == [found.title]
    # What is written to a folder is the leaderboard alone.
    moecache("table", tmp_path, "--write")
    assert "Points lost" not in (tmp_path / "table.md").read_text()


def test_runs_without_a_lossless_partner_lose_nothing_known(tmp_path: Path) -> None:
    write(tmp_path, record("lossy", totals={"routing_fidelity": 0.5}))
    assert lost_points(load_runs(tmp_path)) is None
    write(tmp_path, record("exact", totals={"routing_fidelity": 1}, pretrained="other"))
    assert lost_points(load_runs(tmp_path)) is None

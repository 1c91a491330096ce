"""Sweeps of a tiny random model and over traces: records, resumption, refusals and reports."""

from __future__ import annotations

import json
import multiprocessing
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from lm_eval_moecache.cli.main import main
from lm_eval_moecache.harness.arguments import read_config
from lm_eval_moecache.records.files import traces_dir
from lm_eval_moecache.report.runs.files import load_runs
from lm_eval_moecache.sweep import worker
from lm_eval_moecache.sweep.files import LOCK, only_sweep
from lm_eval_moecache.sweep.replay_grid import run_cells
from lm_eval_moecache.sweep.run import run_sweep
from lm_eval_moecache.sweep.spec import read_sweep
from tests.conftest import Moecache
from tests.sweep.toy import figures, frail, made_by, records, swept, write_sweep

GRID = {"policy": ["specmd", "on_demand"], "capacity": ["25%", "50%"]}


def run(path: Path, *options: str) -> int:
    return main(["sweep", str(path), *options])


def written(path: Path) -> dict[Path, int]:
    """Return the modification time of each run that is not in the tables yet."""
    return {p: p.stat().st_mtime_ns for p in (path.parent / "runs").glob("*.json")}


def test_a_sweep_writes_every_cell_and_a_second_one_runs_none(
    tmp_path: Path, base: dict[str, Any], moecache: Moecache
) -> None:
    path = write_sweep(tmp_path / "one", base=base, grid=GRID)
    report = moecache.json("sweep", path)
    assert (len(report["done"]), report["skipped"], report["failed"]) == (4, [], [])
    runs = records(path.parent)
    assert {r["run_id"] for r in runs.values()} == set(report["done"])
    for record in runs.values():
        report, scores = record["config"]["moecache"], record["scores"]["chosen"]
        assert report["tasks"]["chosen"]["requests"] == 8
        assert set(scores["acc,none"]) == {"0", "1", "2", "3"}
        moved = 2 * sum(scores["request_bytes_moved,speed"].values())
        assert moved == pytest.approx(report["totals"]["bytes_moved"], rel=1e-5)
        environment_fields = {"date", "seconds", "machine", "versions", "revision", "made_by"}
        assert environment_fields == set(record["environment"])
        assert "samples" not in record
    names = ["runs.parquet", "samples.parquet", "sweep.yaml", "traces"]
    assert sorted(p.name for p in path.parent.iterdir()) == names
    before = (path.parent / names[0]).stat().st_mtime_ns
    rerun = moecache.json("sweep", path)
    assert (len(rerun["skipped"]), rerun["done"]) == (4, [])
    assert (path.parent / names[0]).stat().st_mtime_ns == before


def test_every_cell_is_checked_before_the_first_run(
    tmp_path: Path, base: dict[str, Any], moecache: Moecache
) -> None:
    grid = {"policy": ["specmd", "specmdd"], "capacity": ["25%", "99/layer"]}
    path = write_sweep(tmp_path / "bad", base=base, grid=grid)
    message = moecache("sweep", path, code=2)
    for words in ("3 of 4 runs cannot start", "Did you mean 'specmd'", "99/layer"):
        assert words in message
    assert not (path.parent / "runs").exists()


@pytest.mark.parametrize("live", [False, True])
def test_a_failed_run_is_reported_and_retried_and_fails_its_replays(
    tmp_path: Path,
    base: dict[str, Any],
    live: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write_sweep(tmp_path / "frail", base=base, grid={"capacity": ["25%", "50%", "75%"]})
    monkeypatch.setattr(worker, "evaluate", frail("25%"))
    # Live, the other cells run independently; else they are replayed from the first.
    options = ["--live"] if live else []
    assert run(path, *options) == 1
    printed = capsys.readouterr().out
    assert "the disk is full" in printed
    assert ("the same command tries another one" in printed) is not live
    assert len(records(path.parent)) == (2 if live else 0)
    [trace] = (path.parent / "failed").glob("*.txt")
    assert "RuntimeError" in trace.read_text()
    if live:
        monkeypatch.undo()
    # Where cells share a run, the second attempt runs another cell, which does not fail.
    assert run(path, *options) == 0
    origins = ["run"] * 3 if live else ["replay_of", "replay_of", "run"]
    assert made_by(records(path.parent)) == origins
    assert not (path.parent / "failed").exists()
    assert not list((path.parent / "traces").glob(".*"))


def test_equal_cells_run_once_and_a_new_label_is_written_into_the_finished_run(
    tmp_path: Path, base: dict[str, Any], moecache: Moecache
) -> None:
    runs = [{"capacity": "25%"}, {"capacity": "25%", "policy": "specmd"}]
    path = write_sweep(tmp_path / "twice", base=base, runs=runs)
    assert "1 cells equal another" in moecache("sweep", path)
    write_sweep(tmp_path / "twice", base=base, runs=[{"capacity": "25%", "label": "mine"}])
    moecache("sweep", path)
    [record] = records(path.parent).values()
    assert record["label"] == "mine"


def test_a_second_sweep_in_the_same_folder_is_refused(
    tmp_path: Path, base: dict[str, Any], moecache: Moecache
) -> None:
    path = write_sweep(tmp_path / "busy", base=base)
    with only_sweep(path.parent):
        assert (path.parent / LOCK).is_file()
        assert "another sweep is at work" in moecache("sweep", path, code=2)
    assert not (path.parent / LOCK).exists()


def _sweep_in_child(path: Path) -> None:
    # Live, as replays end before a kill could hit them.
    run_sweep(read_sweep(path), path.parent, live=True)


@pytest.mark.slow
def test_a_sweep_killed_at_random_moments_completes_without_duplicates(
    tmp_path: Path, base: dict[str, Any]
) -> None:
    capacities = ["15%", "20%", "25%", "30%", "40%", "50%", "60%", "75%"]
    # Three times as many runs as kills, so that every kill finds runs left.
    grid = {"capacity": capacities, "policy": ["on_demand", "specmd", "fate", "pruning"]}
    path = write_sweep(tmp_path / "killed", base=base, grid=grid, limit=1)
    # The server imports lm-eval and torch once, so that the killed sweeps start at once.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lm_eval_moecache.sweep.run", "lm_eval_moecache.harness.lm"])
    chance = random.Random(0)
    counts, num_killed = [], 0
    for _ in range(10):
        child = context.Process(target=_sweep_in_child, args=(path,))
        child.start()
        # Kill between the start and a few runs later, whatever the speed of the machine.
        deadline = time.monotonic() + 60
        target = len(written(path)) + chance.choice((0, 1, 1))
        while time.monotonic() < deadline and child.is_alive() and len(written(path)) < target:
            time.sleep(0.002)
        time.sleep(chance.uniform(0, 0.1))
        child.kill()
        child.join()
        num_killed += child.exitcode == -signal.SIGKILL
        counts.append(len(records(path.parent)))
    # If most sweeps ended before their kill, this would test nothing.
    assert num_killed >= 8
    assert counts == sorted(counts)
    before = {p.stem: p.read_text() for p in written(path)}
    last = run_sweep(read_sweep(path), path.parent, live=True)
    assert len(records(path.parent)) == 32
    assert len(last["done"]) == 32 - counts[-1]
    after = {record["run_id"]: record for record in records(path.parent).values()}
    assert all(after[run_id] == json.loads(text) for run_id, text in before.items())
    assert not (path.parent / "runs").exists()
    calm = swept(tmp_path / "undisturbed", base=base, grid=grid, limit=1, name="killed")
    assert figures(path.parent) == figures(calm.parent)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("executor", "options"),
    [
        ("local", {}),
        ("submitit", {"cluster": "local", "timeout_min": 5}),
        ("ray", {"num_cpus": 1}),
    ],
)
def test_other_executors_give_the_same_figures(
    tmp_path: Path, base: dict[str, Any], executor: str, options: dict[str, Any]
) -> None:
    grid = {"capacity": ["25%", "50%"], "miss": ["fetch", "drop"]}
    fields = {"base": base, "grid": grid, "name": "x"}
    execution = {"executor": executor, "executor_options": options, "jobs": 2}
    far = swept(tmp_path / "far", **fields, **execution)
    near = swept(tmp_path / "near", **fields)
    assert figures(far.parent) == figures(near.parent)


TRACE = Path(__file__).parents[2] / "traces" / "olmoe-1b-7b.parquet"


def write_over_traces(folder: Path, **fields: Any) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "sweep.yaml"
    defaults = {"traces": [str(TRACE)], "base": {"policy": "on_demand", "capacity": "25%"}}
    path.write_text(yaml.safe_dump({**defaults, **fields}))
    return path


def test_cells_are_the_replays_of_moecache_replay(tmp_path: Path, moecache: Moecache) -> None:
    path = write_over_traces(
        tmp_path / "x", grid={"eviction": ["lru", "belady"]}, bounds=["oracle"]
    )
    report = run_sweep(read_sweep(path), path.parent)
    assert (len(report["done"]), report["by_model"], report["failed"]) == (3, 0, [])
    rows = moecache.json("replay", TRACE, "--eviction", "lru,belady")["runs"]
    replayed = {row["eviction"]: row["metrics"] for row in rows}
    runs = load_runs(path.parent)
    assert {run.label for run in runs} == {None, "knows the future: oracle"}
    for run in runs:
        if run.label is None:
            assert run.moecache["totals"] == replayed[run.moecache["policy"]["eviction"]["name"]]
    rerun = run_sweep(read_sweep(path), path.parent)
    assert (len(rerun["done"]), len(rerun["skipped"])) == (0, 3)
    assert "belady" in moecache("table", path.parent)


def test_another_content_of_a_trace_is_another_run_that_replaces_the_one_before(
    tmp_path: Path,
) -> None:
    copy = tmp_path / "copy.parquet"
    shutil.copy(TRACE, copy)
    path = write_over_traces(tmp_path / "x", traces=[str(tmp_path / "*.parquet")])
    assert len(run_sweep(read_sweep(path), path.parent)["done"]) == 1
    [before] = load_runs(path.parent)
    shutil.copy(TRACE.with_name("qwen3-30b-a3b.parquet"), copy)
    assert len(run_sweep(read_sweep(path), path.parent)["done"]) == 1
    # One setting has one row: the former trace's figures are not listed next to the new ones.
    [after] = load_runs(path.parent)
    assert after.moecache["totals"] != before.moecache["totals"]


def test_replays_that_differ_in_a_seed_are_not_taken_for_each_other() -> None:
    given = {"policy": "on_demand", "eviction": "random", "capacity": "25%"}
    configs = [read_config({**given, "seed": seed}, replayed=True) for seed in (0, 1)]
    rows = run_cells(str(traces_dir() / "olmoe-1b-7b.parquet"), configs, bound=False)
    assert rows[0].metrics["miss_rate"] != rows[1].metrics["miss_rate"]

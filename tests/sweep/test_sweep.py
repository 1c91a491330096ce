"""Sweeps of a real, very small model: what they write, resume, refuse and report."""

from __future__ import annotations

import json
import multiprocessing
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lm_eval_moecache.cli.main import main
from lm_eval_moecache.sweep import worker
from lm_eval_moecache.sweep.files import LOCK, only_sweep
from lm_eval_moecache.sweep.run import run_sweep
from lm_eval_moecache.sweep.spec import read_sweep
from tests.sweep.toy import figures, records, write_sweep

GRID = {"policy": ["specmd", "on_demand"], "capacity": ["25%", "50%"]}


def run(path: Path, *options: str) -> int:
    return main(["sweep", str(path), *options])


def test_a_sweep_writes_every_cell_and_a_second_one_runs_none(
    tmp_path: Path, base: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_sweep(tmp_path / "one", base=base, grid=GRID)
    assert run(path, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (len(report["done"]), report["skipped"], report["failed"]) == (4, [], [])
    found = records(path.parent)
    assert {r["run_id"] for r in found.values()} == set(report["done"])
    for record in found.values():
        assert record["config"]["moecache"]["tasks"]["toy_choice"]["requests"] == 12
        assert set(record["scores"]["toy_choice"]["acc,none"]) == {"0", "1", "2", "3"}
        moved = record["scores"]["toy_choice"]["request_bytes_moved,speed"]
        total = record["config"]["moecache"]["totals"]["bytes_moved"]
        assert 3 * sum(moved.values()) == pytest.approx(total, rel=1e-5)
        told = {"date", "seconds", "machine", "versions", "revision", "made_by"}
        assert told == set(record["environment"])
        assert "samples" not in record
    before = {p: p.stat().st_mtime_ns for p in (path.parent / "runs").glob("*.json")}
    assert run(path, "--json") == 0
    again = json.loads(capsys.readouterr().out)
    assert (len(again["skipped"]), again["done"]) == (4, [])
    assert before == {p: p.stat().st_mtime_ns for p in (path.parent / "runs").glob("*.json")}


def test_sharing_the_model_changes_no_figure_and_a_rerun_repeats_them(
    tmp_path: Path, base: dict[str, Any]
) -> None:
    cells = [{"policy": "specmd", "capacity": "25%"}, {"policy": "on_demand", "capacity": "50%"}]
    together = write_sweep(tmp_path / "together", base=base, runs=cells, name="x")
    assert run(together) == 0
    assert worker._holder().lm is not None
    alone = write_sweep(tmp_path / "alone", base=base, runs=cells[1:], name="x")
    worker._holder.cache_clear()
    assert run(alone) == 0
    expected = figures(together.parent)
    for key, record in figures(alone.parent).items():
        assert json.dumps(record) == json.dumps(expected[key])


@pytest.mark.slow
def test_every_cell_is_checked_before_the_first_run(
    tmp_path: Path, base: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    grid = {"policy": ["specmd", "specmdd"], "capacity": ["25%"]}
    path = write_sweep(tmp_path / "bad", base=base, grid=grid)
    assert run(path) == 2
    said = capsys.readouterr().err
    assert "1 of 2 runs cannot start" in said
    assert "Did you mean 'specmd'" in said
    assert not (path.parent / "runs").exists()
    assert run(write_sweep(tmp_path / "bad", base=base, tasks="toy_choise")) == 2
    assert "Did you mean 'toy_choice'" in capsys.readouterr().err
    assert run(write_sweep(tmp_path / "bad", base=base, grid={"capacity": ["99/layer"]})) == 2
    assert "99/layer" in capsys.readouterr().err


def test_a_failed_run_is_reported_with_exit_code_1_and_retried(
    tmp_path: Path,
    base: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write_sweep(tmp_path / "frail", base=base, grid={"capacity": ["25%", "50%"]})
    real = worker.evaluate

    def frail(cell: Any, lm: Any) -> dict[str, Any]:
        if cell.model_args["capacity"] == "50%":
            raise RuntimeError("the disk is full")
        return real(cell, lm)

    monkeypatch.setattr(worker, "evaluate", frail)
    # Live: the second cell would be replayed from the first, and not fail.
    assert run(path, "--live") == 1
    assert "the disk is full" in capsys.readouterr().out
    assert len(records(path.parent)) == 1
    [trace] = (path.parent / "failed").glob("*.txt")
    assert "RuntimeError" in trace.read_text()
    monkeypatch.setattr(worker, "evaluate", real)
    assert run(path, "--live") == 0
    assert len(records(path.parent)) == 2
    assert not (path.parent / "failed").exists()


def test_equal_cells_run_once_and_a_new_label_is_written_into_the_finished_run(
    tmp_path: Path, base: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [{"capacity": "25%"}, {"capacity": "25%", "policy": "specmd"}]
    path = write_sweep(tmp_path / "twice", base=base, runs=runs)
    assert run(path) == 0
    assert "1 cells equal another" in capsys.readouterr().out
    write_sweep(tmp_path / "twice", base=base, runs=[{"capacity": "25%", "label": "mine"}])
    assert run(path) == 0
    [record] = records(path.parent).values()
    assert record["label"] == "mine"


def test_a_second_sweep_in_the_same_folder_is_refused(
    tmp_path: Path, base: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_sweep(tmp_path / "busy", base=base)
    with only_sweep(path.parent):
        assert (path.parent / LOCK).is_file()
        assert run(path) == 2
    assert "another sweep is at work" in capsys.readouterr().err
    assert not (path.parent / LOCK).exists()


def _sweep_in_child(path: Path) -> None:
    # Replays are over before a kill could strike.
    run_sweep(read_sweep(path), path.parent, live=True)


@pytest.mark.slow
def test_a_sweep_killed_at_random_moments_completes_without_duplicates(
    tmp_path: Path, base: dict[str, Any]
) -> None:
    capacities = ["15%", "25%", "40%", "50%", "75%"]
    # Twice as many runs as there are kills, so that there is something left to kill.
    grid = {"capacity": capacities, "policy": ["on_demand", "specmd", "fate", "pruning"]}
    path = write_sweep(tmp_path / "killed", base=base, grid=grid, limit=1)
    # The server imports lm-eval and torch once; the sweeps that are killed start in no time.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lm_eval_moecache.sweep.run", "lm_eval_moecache.harness.lm"])
    chance = random.Random(0)
    counts, num_killed = [], 0
    for _ in range(10):
        child = context.Process(target=_sweep_in_child, args=(path,))
        child.start()
        # From anywhere in the start to some runs later, whatever the speed of the machine.
        deadline = time.monotonic() + 60
        target = len(list((path.parent / "runs").glob("*.json"))) + chance.choice((0, 1, 1))
        while time.monotonic() < deadline and child.is_alive():
            if len(list((path.parent / "runs").glob("*.json"))) >= target:
                break
            time.sleep(0.002)
        time.sleep(chance.uniform(0, 0.2))
        child.kill()
        child.join()
        num_killed += child.exitcode == -signal.SIGKILL
        counts.append(len(records(path.parent)))
    # Were most of them over before the kill, this would test nothing.
    assert num_killed >= 8
    assert counts == sorted(counts)
    before = {p: p.stat().st_mtime_ns for p in (path.parent / "runs").glob("*.json")}
    last = run_sweep(read_sweep(path), path.parent, live=True)
    assert len(records(path.parent)) == 20
    assert len(last.done) == 20 - counts[-1]
    assert all(p.stat().st_mtime_ns == at for p, at in before.items())
    assert not list((path.parent / "runs").glob(".*.part"))
    calm = write_sweep(tmp_path / "undisturbed", base=base, grid=grid, limit=1, name="killed")
    assert run(calm) == 0
    assert figures(path.parent) == figures(calm.parent)


@pytest.mark.slow
def test_processes_share_the_work_and_die_with_a_killed_sweep(
    tmp_path: Path, base: dict[str, Any]
) -> None:
    path = write_sweep(tmp_path / "parallel", base=base, grid=GRID, name="x")
    command = [sys.executable, "-m", "lm_eval_moecache.cli.main", "sweep", str(path), "--jobs=2"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and not list((path.parent / "runs").glob("*.json")):
            time.sleep(0.05)
        process.kill()
    time.sleep(1)
    # A worker that had survived would hold nothing back: it would go on writing.
    count = len(records(path.parent))
    time.sleep(2)
    assert len(records(path.parent)) == count
    assert subprocess.run(command, stdout=subprocess.DEVNULL).returncode == 0
    alone = write_sweep(tmp_path / "alone", base=base, grid=GRID, name="x")
    assert run(alone) == 0
    assert figures(path.parent) == figures(alone.parent)


@pytest.mark.parametrize("extra", ["ray", "submitit"])
def test_a_missing_extra_is_named(
    tmp_path: Path,
    base: dict[str, Any],
    extra: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, extra, None)
    path = write_sweep(tmp_path / "extra", base=base)
    assert run(path, f"--executor={extra}") == 2
    assert f"lm-eval-moecache[{extra}]" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("executor", "options"),
    [("submitit", {"cluster": "local", "timeout_min": 5}), ("ray", {"num_cpus": 1})],
)
def test_other_executors_give_the_same_figures(
    tmp_path: Path, base: dict[str, Any], executor: str, options: dict[str, Any]
) -> None:
    given = {"base": base, "grid": {"capacity": ["25%", "50%"]}, "name": "x"}
    how = {"executor": executor, "executor_options": options}
    far = write_sweep(tmp_path / "far", **given, **how)
    assert run(far) == 0
    near = write_sweep(tmp_path / "near", **given)
    assert run(near) == 0
    assert figures(far.parent) == figures(near.parent)


def test_a_dry_run_reads_runs_that_are_packed(tmp_path: Path, capsys: Any) -> None:
    """Nothing is unpacked for it: an estimate writes nothing."""
    baseline = Path(__file__).parents[2] / "results" / "baseline"
    for name in ("sweep.yaml", "runs.jsonl.gz"):
        shutil.copy(baseline / name, tmp_path)
    assert main(["sweep", str(tmp_path / "sweep.yaml"), "--dry-run", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["runs"]) == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs.jsonl.gz", "sweep.yaml"]

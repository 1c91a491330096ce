"""A sweep over traces in place of a model: what it gives, and what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from lm_eval_moecache.cli.main import main
from lm_eval_moecache.report.results import load_runs
from lm_eval_moecache.sweep.run import run_sweep
from lm_eval_moecache.sweep.spec import read_sweep

TRACE = Path(__file__).parents[2] / "traces" / "olmoe-1b-7b.parquet"


def write(folder: Path, **fields: Any) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "sweep.yaml"
    given = {"traces": [str(TRACE)], "base": {"policy": "on_demand", "capacity": "25%"}}
    path.write_text(yaml.safe_dump({**given, **fields}))
    return path


def test_cells_are_the_replays_of_moecache_replay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "x", grid={"eviction": ["lru", "belady"]}, bounds=["oracle"])
    report = run_sweep(read_sweep(path), path.parent)
    assert (len(report.done), report.by_model, report.failed) == (3, 0, ())
    capsys.readouterr()
    said = ["replay", str(TRACE), "--eviction", "lru,belady", "--json"]
    assert main(said) == 0
    replayed = {
        row["eviction"]: row["metrics"] for row in json.loads(capsys.readouterr().out)["runs"]
    }
    by_label = {run.label: run for run in load_runs(path.parent)}
    assert set(by_label) == {None, "knows the future: oracle"}
    for run in load_runs(path.parent):
        if run.label is None:
            name = run.moecache["policy"]["eviction"]["name"]
            # Through JSON, as the records were.
            assert run.moecache["totals"] == json.loads(json.dumps(replayed[name]))
    again = run_sweep(read_sweep(path), path.parent)
    assert (len(again.done), len(again.skipped)) == (0, 3)
    assert main(["table", str(path.parent)]) == 0
    assert "belady" in capsys.readouterr().out


@pytest.mark.slow
def test_processes_write_what_one_does(tmp_path: Path) -> None:
    found = []
    for jobs in (1, 2):
        grid = {"eviction": ["lru", "belady", "arc"], "capacity": ["10%", "8/layer"]}
        path = write(tmp_path / str(jobs), name="same", grid=grid, jobs=jobs)
        assert len(run_sweep(read_sweep(path), path.parent).done) == 6
        runs = load_runs(path.parent)
        found.append({run.run_id: (run.moecache, run.model_args, run.label) for run in runs})
    assert found[0] == found[1]


def test_another_content_of_a_trace_is_another_configuration(tmp_path: Path) -> None:
    copy = tmp_path / "copy.parquet"
    shutil.copy(TRACE, copy)
    path = write(tmp_path / "x", traces=[str(tmp_path / "*.parquet")])
    assert len(run_sweep(read_sweep(path), path.parent).done) == 1
    shutil.copy(TRACE.with_name("qwen3-30b-a3b.parquet"), copy)
    assert len(run_sweep(read_sweep(path), path.parent).done) == 1


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"traces": ["no/such.parquet"]}, "no/such.parquet': there is no such file"),
        ({"base": {"eviction": "lruu"}}, "lruu"),
        ({"base": {"expert_bytes": "1MiB"}}, "says itself how large experts are"),
    ],
    ids=str,
)
def test_what_has_no_meaning_is_refused_before_the_first_replay(
    tmp_path: Path, fields: dict[str, Any], said: str
) -> None:
    path = write(tmp_path / "x", **fields)
    with pytest.raises(ValueError, match=said):
        run_sweep(read_sweep(path), path.parent)
    assert not (path.parent / "runs").exists()

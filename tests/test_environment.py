"""Commands on a machine in trouble: Ctrl-C, a full disk, a read-only folder."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from lm_eval.tasks import TaskManager

from lm_eval_moecache import __main__, api
from lm_eval_moecache.cli import main as module
from lm_eval_moecache.records.artifact import write_artifact
from lm_eval_moecache.records.files import write_whole
from lm_eval_moecache.report.runs.files import RUNS, write_tables
from lm_eval_moecache.sweep import files, worker
from lm_eval_moecache.sweep.files import only_sweep, write_record
from moecache_lab.analyze import ANALYSES
from tests.conftest import Moecache
from tests.engine import traces
from tests.records.test_artifact import make
from tests.report.runs import leaderboard_of_four, record
from tests.soak.corpus import section

ROOT = Path(__file__).resolve().parent.parent
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def mounted(folder: Path, options: str) -> bool:
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        return False


@pytest.fixture(params=["full", "read-only"])
def bad_folder(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A real file system, full or read-only, that holds results."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if not mounted(folder, "size=1m"):
        pytest.skip("file systems cannot be mounted here")
    try:
        leaderboard_of_four(folder)
        traces.record(folder)
        (folder / "sweep.yaml").write_text("tasks: tiny_arc\nlimit: 1\nbase: {seed: 1}\n")
        (folder / "traces").mkdir()
        path = traces.record(folder / "traces")
        (folder / "traces" / "sweep.yaml").write_text(f"traces: {path}\ngrid: {{capacity: 50%}}\n")
        write_tables(folder / "packed", [record("packed")])
        if request.param == "full":
            with pytest.raises(OSError, match="No space"), (folder / "filler").open("wb") as file:
                while True:
                    file.write(b"x" * 4096)
                    file.flush()
        else:
            remount = ["mount", "-o", "remount,ro", str(folder)]
            assert subprocess.run(remount, capture_output=True).returncode == 0
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], capture_output=True)


PLACES = {
    "routed": Path(__file__).parent / "trace" / "formats" / "route_trace.csv",
    "speeds": ROOT / "results/runtimes/rows.csv",
}
COMMANDS = [line for line in section("# Where {folder} is full") if line]
READERS = {"choose", "compare", "completion", "plan", "policies", "validate"}
"""Commands that write nothing."""


def test_every_command_that_writes_is_tried_on_a_folder_that_cannot_be_written() -> None:
    words = [command.split() for command in COMMANDS]
    tried = {command for command, *_ in words}
    missing = set(api.command_names()) - tried - READERS
    assert not missing, f"{missing}: add to COMMANDS, or where nothing is written to READERS"
    assert tried | READERS == set(api.command_names())
    assert not tried & READERS
    actions = [name.split() for name in api.command_places() if " " in name]
    profiled = {what for command, what in actions if command == "profile"}
    for command, kinds in (("profile", profiled), ("analyze", ANALYSES)):
        assert {what for name, what, *_ in words if name == command} == set(kinds)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_folder_that_cannot_be_written_is_told_in_one_line_and_left_as_it_was(
    bad_folder: Path,
    command: str,
    monkeypatch: pytest.MonkeyPatch,
    moecache: Moecache,
) -> None:
    """The error comes before any model runs, or this test would take hours."""
    init = TaskManager.__init__
    # Indexing lm-eval's own 10,000 tasks takes seconds.
    monkeypatch.setattr(TaskManager, "__init__", partialmethod(init, include_defaults=False))
    files_before = {p: p.read_bytes() for p in bad_folder.rglob("*") if p.is_file()}
    stderr = moecache(*command.format(folder=bad_folder, **PLACES).split(), code=2)
    [line] = stderr.strip().splitlines()[-1:]
    assert str(bad_folder) in line
    assert re.search("No space left|has 0 bytes free|Read-only file system", line)
    assert {p: p.read_bytes() for p in bad_folder.rglob("*") if p.is_file()} == files_before


def test_an_interrupt_is_exit_130_and_a_line_on_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, moecache: Moecache
) -> None:
    monkeypatch.setattr(module, "_run", Mock(side_effect=KeyboardInterrupt))
    for name in api.command_names():
        [line] = moecache(name, code=130).splitlines()
        assert line.startswith(f"moecache {name}: interrupted. ")
    assert "the same command runs the others" in moecache("sweep", code=130)


def test_an_interrupt_while_python_imports_is_told_as_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def find_spec(name: str, *_: object) -> None:
        if name == module.__name__:
            raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, module.__name__)
    monkeypatch.setattr(sys, "meta_path", [SimpleNamespace(find_spec=find_spec), *sys.meta_path])
    assert __main__.main() == 130
    assert capsys.readouterr().err == "moecache: interrupted. Nothing was begun.\n"


def test_a_reader_that_has_enough_ends_a_command_without_a_word() -> None:
    """As in `moecache policies | head -1`."""
    for command in (["policies", "--json"], ["--help"]):
        read, write = os.pipe()
        os.close(read)
        words = [sys.executable, "-m", "lm_eval_moecache", *command]
        process = subprocess.run(words, stdout=write, stderr=subprocess.PIPE, cwd=ROOT)
        os.close(write)
        assert (process.returncode, process.stderr) == (141, b"")


@pytest.mark.parametrize(
    "write",
    [write_whole, lambda path, text: write_artifact(path, make(model=text))],
    ids=["text", "artifact"],
)
def test_a_write_that_fails_leaves_the_old_file_and_names_it(
    write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "front.json"
    write(path, "old")
    before = path.read_bytes()
    monkeypatch.setattr(os, "fsync", Mock(side_effect=FULL))
    with pytest.raises(OSError, match="No space left") as caught:
        write(path, "new")
    assert caught.value.filename == str(path)
    assert [p.name for p in tmp_path.iterdir()] == ["front.json"]
    assert path.read_bytes() == before


def test_a_run_whose_result_cannot_be_written_is_an_outcome_and_not_the_end_of_the_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "runs/x.json")

    monkeypatch.setattr(worker, "_model_of", lambda planned: None)
    monkeypatch.setattr(worker, "evaluate", lambda cell, lm: {})
    monkeypatch.setattr(worker, "head", lambda planned, experiment: {"run_id": "x"})
    monkeypatch.setattr(files, "write_whole", full)
    cell = SimpleNamespace(model="moecache")
    planned: Any = SimpleNamespace(cell=cell, run_id="x", shared=None, replayed=False)
    outcome = worker.run_cell(planned, str(tmp_path), "e")
    message = "its result cannot be written: runs/x.json: No space left on device"
    assert outcome.run_id == "x" and message in str(outcome.error)


def test_what_dead_runs_have_left_half_written_is_removed_before_and_after(tmp_path: Path) -> None:
    (tmp_path / RUNS).mkdir()
    old_part = tmp_path / RUNS / ".x.json.123.part"
    old_part.write_text("{")
    with only_sweep(tmp_path):
        assert not old_part.exists()
        new_part = tmp_path / RUNS / ".y.json.124.part"
        new_part.write_text("{")
    assert not new_part.exists()


def test_no_number_of_ours_is_nan_in_json(tmp_path: Path) -> None:
    run = record("a", tok_per_s=float("nan"), miss_rate=float("inf"))
    text = write_record(tmp_path, run).read_text()
    assert "NaN" not in text and "Infinity" not in text


@pytest.mark.parametrize(
    ("extra", "command"),
    [
        ("matplotlib", "plot {0}"),
        ("optuna", "tune --out={0}/new --tasks=tiny_gsm8k"),
        ("ray", "sweep {0}/sweep.yaml --executor=ray"),
        ("submitit", "sweep {0}/sweep.yaml --executor=submitit"),
    ],
)
def test_a_missing_extra_is_named_with_the_line_that_installs_it(
    extra: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moecache: Moecache
) -> None:
    monkeypatch.setitem(sys.modules, extra, None)
    (leaderboard_of_four(tmp_path) / "sweep.yaml").write_text("tasks: tiny_arc\nlimit: 1\n")
    assert f"pip install {extra}" in moecache(*command.format(tmp_path).split(), code=2)

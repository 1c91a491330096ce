"""Runs in two tables: records come back equal, and what is damaged names itself."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from lm_eval_moecache import load_runs as load_frames
from lm_eval_moecache.report.runs.files import (
    SAMPLES,
    TABLE,
    cells,
    fold,
    load_runs,
    read_tables,
    write_tables,
)
from lm_eval_moecache.sweep.files import finished, only_sweep
from tests.conftest import Moecache
from tests.report.runs import leaderboard_of_four, record, write

TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
DOCUMENTS = st.dictionaries(st.text(), NUMBERS, min_size=1) | st.dictionaries(
    st.text(), st.lists(NUMBERS, min_size=2, max_size=2), min_size=1
)
SCORES = st.dictionaries(st.text(), st.dictionaries(st.text(), DOCUMENTS, min_size=1))


@settings(max_examples=30)
@given(
    st.dictionaries(
        st.text(min_size=1),
        st.tuples(st.dictionaries(st.text(), TREES), SCORES),
        min_size=1,
        max_size=3,
    )
)
def test_any_record_comes_back_equal(records: dict[str, tuple[dict[str, object], Any]]) -> None:
    runs = [
        {**tree, "run_id": name, "scores": scores}
        for name, (tree, scores) in sorted(records.items())
    ]
    with tempfile.TemporaryDirectory() as folder:
        write_tables(Path(folder), runs)
        assert read_tables(Path(folder)) == runs


def test_tables_and_comparisons_are_the_same_from_both_forms(
    tmp_path: Path, moecache: Moecache
) -> None:
    loose, folded = (leaderboard_of_four(tmp_path / name) for name in ("loose", "folded"))
    fold(folded)
    assert sorted(p.name for p in folded.iterdir()) == [TABLE, SAMPLES]
    assert moecache("table", loose) == moecache("table", folded)
    for place in (folded, folded / TABLE):
        moecache("compare", loose, place, "--same_machine=yes")


def test_the_same_runs_give_the_same_bytes_and_the_same_frames(tmp_path: Path) -> None:
    records = [record("a"), record("b")]
    first, second = write(tmp_path / "1", *records), write(tmp_path / "2", *records[::-1])
    loose = load_frames(first)
    fold(first), fold(second)
    for name in (TABLE, SAMPLES):
        assert (first / name).read_bytes() == (second / name).read_bytes()
    for before, after in zip(loose, load_frames(first), strict=True):
        assert before.equals(after)
    runs, samples = loose
    shown = ["tasks", "policy", "capacity", "accuracy", "right_per_hour", "e2el_ms", "tok_per_s"]
    assert list(runs.columns[:7]) == shown and list(runs.run_id) == ["a", "b"]
    assert samples.groupby("run_id").value.mean().to_dict() == {"a": 0.75, "b": 0.75}
    stored = parquet.read_table(first / TABLE).drop(["record"]).to_pandas()
    assert list(stored.columns) == list(runs.columns)


def test_right_answers_an_hour_are_of_the_time_of_an_answer(tmp_path: Path) -> None:
    times = {"e2el_ms": {"mean": 1500.0}}
    write(
        tmp_path, record("a", totals=times), record("b"), record("c", totals=times, answers=(0, 0))
    )
    runs, _ = load_frames(tmp_path)
    assert runs.right_per_hour.fillna(-1).tolist() == [0.75 * 3600 / 1.5, -1, 0.0]


def test_a_sweep_goes_on_in_tables_and_newer_runs_replace_theirs(tmp_path: Path) -> None:
    folder = leaderboard_of_four(tmp_path)
    before = {run.run_id for run in load_runs(folder)}
    fold(folder)
    assert set(finished(folder)) == before
    with only_sweep(folder) as without:
        write(folder, record("a", tok_per_s=1.0), record("e"))
        speeds = {r.run_id: r.moecache["totals"]["tok_per_s"] for r in load_runs(folder)}
        assert speeds["a"] == 1.0 and speeds["d"] == 200 and set(finished(folder)) == {*speeds}
        without.add("b")
    assert not (folder / "runs").exists()
    assert {run.run_id for run in load_runs(folder)} == {*before, "e"} - {"b"}


def test_a_kill_while_tables_are_written_loses_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval_moecache.report.runs import files as runs_files

    folder, real = leaderboard_of_four(tmp_path), runs_files.write_whole
    fold(folder)
    write(folder, record("e"), record("a", tok_per_s=1.0))
    expected = [run.moecache for run in load_runs(folder)]
    for name in (SAMPLES, TABLE):

        def killed(path: Path, data: bytes, name: str = name) -> None:
            if path.name == name:
                raise KeyboardInterrupt
            real(path, data)

        monkeypatch.setattr(runs_files, "write_whole", killed)
        with pytest.raises(KeyboardInterrupt):
            fold(folder)
        assert [run.moecache for run in load_runs(folder)] == expected
    monkeypatch.undo()
    fold(folder)
    assert [run.moecache for run in load_runs(folder)] == expected and not [*cells(folder)]


def damaged(change: Callable[[pa.Table], pa.Table], name: str = TABLE) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        parquet.write_table(change(parquet.read_table(folder / name)), folder / name)

    return damage


def _cut(folder: Path) -> None:
    data = (folder / TABLE).read_bytes()
    (folder / TABLE).write_bytes(data[: len(data) // 2])


def _second(text: str) -> Callable[[pa.Table], pa.Table]:
    def change(table: pa.Table) -> pa.Table:
        records = [*table["record"].to_pylist()]
        records[1] = records[1].replace(*text.split(" -> "))
        return table.set_column(table.column_names.index("record"), "record", pa.array(records))

    return change


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_cut, "runs.parquet' is not readable: "),
        (damaged(lambda table: table.drop(["record"])), "lacks the column 'record'"),
        (damaged(lambda table: table.drop(["value"]), SAMPLES), "samples.*lacks the column 'value"),
        (lambda folder: (folder / SAMPLES).unlink(), "samples.parquet': there is no such file"),
        (damaged(_second('{"format -> x"format')), "runs.parquet': row 2 is not readable JSON"),
        (damaged(_second('"run_id":"b" -> "run_id":"c"')), "row 2 is not the run that its run_id"),
        (damaged(_second('"clock":"virtual" -> "clock":"sundial"')), "2: config.moecache.clock"),
    ],
)  # fmt: skip
def test_what_is_damaged_names_itself(
    tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    folder = write(tmp_path, record("a"), record("b"))
    fold(folder)
    damage(folder)
    with pytest.raises(ValueError, match=message):
        load_runs(folder / TABLE)


@pytest.mark.parametrize("run_id", ["../../away", "/away", "a\\b", "a\0b"])
def test_what_somebody_else_made_writes_nowhere_else(tmp_path: Path, run_id: str) -> None:
    with pytest.raises(ValueError, match="run_id="):
        write_tables(tmp_path, [{**record("x"), "run_id": run_id}])
    assert not [*tmp_path.iterdir()]


def test_a_table_of_more_than_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval_moecache.report.runs import files as runs_files

    folder = write(tmp_path, record("a"))
    fold(folder)
    monkeypatch.setattr(runs_files, "MOST_JSON_BYTES", 99)
    with pytest.raises(ValueError, match="more than the 99"):
        load_runs(folder / TABLE)

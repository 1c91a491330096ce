"""Runs in one packed file: records and bytes are preserved, and every command reads both forms."""

from __future__ import annotations

import gzip
import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm_eval_moecache.records import files
from lm_eval_moecache.report.runs.files import (
    PACKED,
    load_runs,
    pack,
    read_packed,
    unpack,
    write_packed,
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


@settings(max_examples=30)
@given(
    st.dictionaries(st.text(min_size=1), st.dictionaries(st.text(), TREES), min_size=1, max_size=3)
)
def test_any_record_comes_back_equal(records: dict[str, dict[str, object]]) -> None:
    runs = [{**tree, "run_id": name} for name, tree in sorted(records.items())]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / PACKED
        write_packed(path, runs)
        assert read_packed(path) == runs


def test_tables_and_comparisons_are_the_same_from_both_forms(
    tmp_path: Path, moecache: Moecache
) -> None:
    loose, packed = (leaderboard_of_four(tmp_path / name) for name in ("loose", "packed"))
    assert "4 runs" in moecache("pack", packed)
    assert sorted(p.name for p in packed.iterdir()) == [PACKED]
    assert moecache("table", loose) == moecache("table", packed)
    for place in (packed, packed / PACKED):
        moecache("compare", loose, place, "--same_machine=yes")


def test_the_same_runs_give_the_same_bytes_and_pandas_reads_them(tmp_path: Path) -> None:
    records = [record("a"), record("b")]
    first, second = write(tmp_path / "1", *records), write(tmp_path / "2", *records[::-1])
    pack(first), pack(second)
    assert (first / PACKED).read_bytes() == (second / PACKED).read_bytes()
    pandas = pytest.importorskip("pandas")
    assert list(pandas.read_json(first / PACKED, lines=True)["run_id"]) == ["a", "b"]


def test_a_sweep_goes_on_in_a_packed_folder(tmp_path: Path) -> None:
    folder = leaderboard_of_four(tmp_path)
    before = {run.run_id for run in load_runs(folder)}
    pack(folder)
    assert set(finished(folder)) == before
    with only_sweep(folder):
        assert {record["run_id"] for record in finished(folder).values()} == before
        assert not (folder / PACKED).exists()
    # A run made again replaces the packed one.
    pack(folder)
    write(folder, record("a", tok_per_s=1.0), record("e"))
    assert pack(folder) == 5
    speeds = {r.run_id: r.moecache["totals"]["tok_per_s"] for r in load_runs(folder)}
    assert speeds["a"] == 1.0 and speeds["d"] == 200
    assert unpack(folder) == 5
    assert len(list((folder / "runs").glob("*.json"))) == 5


def test_what_is_broken_is_named_and_nothing_is_lost(tmp_path: Path, moecache: Moecache) -> None:
    folder = write(tmp_path, record("a"), record("b"))
    (folder / "runs" / "c.json").write_text("{")
    assert "c.json" in moecache("pack", folder, code=2)
    assert len(list((folder / "runs").glob("*.json"))) == 3
    (folder / "runs" / "c.json").unlink()
    pack(folder)
    data = (folder / PACKED).read_bytes()
    no_run = gzip.compress(json.dumps({"x": 1}).encode())
    for broken, message in (
        (data[: len(data) // 2], "is not readable: "),
        (no_run, "line 1 is not a run"),
    ):
        (folder / PACKED).write_bytes(broken)
        with pytest.raises(ValueError, match=message):
            load_runs(folder / PACKED)
    moecache("pack", tmp_path / "runs", code=2)


@pytest.mark.parametrize("fault", ["two of one id", "a broken file", "a folder", "another run"])
def test_unpacking_never_loses_a_run(tmp_path: Path, fault: str, moecache: Moecache) -> None:
    place, is_twice = tmp_path / "runs" / "a.json", fault == "two of one id"
    write_packed(tmp_path / PACKED, [record("a"), record("b"), *[record("a")] * is_twice])
    if fault == "a folder":
        place.mkdir(parents=True)
    elif not is_twice:
        write(tmp_path, record("a"))
        place.write_text("{" if fault == "a broken file" else json.dumps(record("z")))

    def files() -> dict[Path, object]:
        return {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}

    for options in (["--undo"], []) if is_twice else (["--undo"],):
        if not options:
            write(tmp_path, record("c"))
        before = files()
        message = moecache("pack", tmp_path, *options, code=2)
        assert "a.json" in message or "'a'" in message
        assert before.items() <= files().items()


@pytest.mark.parametrize("run_id", ["../../away", "/away", "a\\b", "a\0b"])
def test_what_somebody_else_packed_writes_nowhere_else(
    tmp_path: Path, run_id: str, moecache: Moecache
) -> None:
    folder = tmp_path / "a" / "b"
    write_packed(folder / PACKED, [record("fine"), {**record("x"), "run_id": run_id}])
    before = sorted(tmp_path.rglob("*"))
    message = moecache("pack", folder, "--undo", code=2)
    assert f"run_id={run_id!r} is not a name of a file" in message
    assert sorted(tmp_path.rglob("*")) == before


def test_what_unpacks_to_more_than_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / PACKED
    path.write_bytes(gzip.compress(b" " * 5000))
    monkeypatch.setattr(files, "MOST_JSON_BYTES", 4999)
    with pytest.raises(ValueError, match=f"{PACKED}' holds more than the 4999 bytes"):
        read_packed(path)

"""`moecache validate --counts`: runtimes' own lines, as they print them, against a replay."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from lm_eval_moecache.records.files import traces_dir
from moecache_plan.counts import FORMS, Counts, read_counts, replayed
from tests.conftest import Moecache
from tests.engine import traces

QWEN = traces_dir() / "qwen3-30b-a3b.parquet"
COUNTS = Path(__file__).parent / "counts"
"""What each runtime prints, by its name."""
IMP, STREAMLX, COLIBRI, BIG = (
    (COUNTS / f"{name}.log").read_text() for name in ("imp", "streamlx", "colibri", "BigMoeOnEdge")
)
WRITERS: dict[str, dict[str, Any]] = {
    # 3 lookups an expert: gate, up and down are keys of their own.
    "imp": {"hits": 37142, "misses": 8192, "hit_rate": 0.81930, "slots_per_layer": 32},
    # Two windows of as many lookups: the mean of their rates. The oracle of the last.
    "FreeToken": {"steps": 128, "hit_rate": 0.85, "oracle_hit_rate": 0.711},
    "streamlx": {"hits": 300, "misses": 100, "hit_rate": 0.75, "bytes_moved": 1000},
    "llama.cpp": {"hits": 1000, "misses": 300, "hit_rate": 1 / 1.3, "bytes_moved": 9000},
    "colibri": {"hits": 1234, "misses": 1760, "slots_per_layer": 16},
    "BigMoeOnEdge": {"hit_rate": 0.0789, "steps": 3, "bytes_moved": 2020286464},
}


@pytest.fixture(params=WRITERS)
def written(request: pytest.FixtureRequest) -> tuple[str, Path]:
    return request.param, COUNTS / f"{request.param}.log"


def test_every_writers_own_lines_are_read(written: tuple[str, Path]) -> None:
    writer, path = written
    assert set(WRITERS) == {*FORMS, "BigMoeOnEdge"}
    counts = read_counts(str(path))
    assert counts.writer == writer
    for name, value in WRITERS[writer].items():
        assert getattr(counts, name) == pytest.approx(value, rel=1e-4), name


def test_what_they_count_is_listed_with_the_same_of_a_replay(
    written: tuple[str, Path], moecache: Moecache
) -> None:
    writer, path = written
    result = moecache.json("validate", QWEN, "--counts", path, "--capacity", "32/layer")
    assert result["writer"] == writer and result["own_trace"]
    assert result["counted"].keys() == result["replayed"].keys()
    difference = result["replayed"]["hit_rate"] - result["counted"]["hit_rate"]
    assert result["hit_rate_difference"] == pytest.approx(difference)
    replay = moecache.json("replay", QWEN, "--capacity", "32/layer", "--bound", "false")
    metrics = replay["runs"][0]["metrics"]
    key = "decode_hit_rate" if result["passes"] == "decode" else "hit_rate"
    assert result["replayed"]["hit_rate"] == pytest.approx(metrics[key])
    if writer == "BigMoeOnEdge":
        text = " ".join(moecache("validate", QWEN, "--counts", path, "--capacity", "25%").split())
        assert "of 3 decode steps and the trace of 128: they are not of one run" in text
    if writer == "FreeToken":
        # At all slots every use is covered.
        everything = moecache.json("validate", QWEN, "--counts", path, "--capacity", "128/layer")
        assert everything["replayed"]["oracle_hit_rate"] == pytest.approx(1)
        assert 0.3 < result["replayed"]["oracle_hit_rate"] < 1


def test_a_log_that_is_a_replays_own_is_met_to_the_last_lookup(
    tmp_path: Path, moecache: Moecache
) -> None:
    """The capacity comes from imp's log: 96 slots of matrices are 32 experts."""
    first = tmp_path / "first.log"
    first.write_text(IMP)
    ours = moecache.json("validate", QWEN, "--counts", first)["replayed"]
    hits, misses = 3 * ours["hits"], 3 * ours["misses"]
    log = re.sub(r"\d+ hits, \d+ misses", f"{hits} hits, {misses} misses", IMP)
    first.write_text(log)
    result = moecache.json("validate", QWEN, "--counts", first)
    assert result["counted"] == ours and result["hit_rate_difference"] == 0
    assert result["capacity"] == "32/layer"
    text = moecache("validate", QWEN, "--counts", first)
    assert "+0.0 points of hit rate" in text and all(len(line) <= 80 for line in text.splitlines())


def test_without_a_trace_the_nearest_routing_has_as_many_cycles(
    tmp_path: Path, moecache: Moecache
) -> None:
    path = tmp_path / "imp.log"
    path.write_text(IMP)
    result = moecache.json("validate", "--counts", path, "--model", "Qwen3-30B-A3B")
    # 32 experts at top-8 are 4 tokens' choices; the shipped trace has top-6.
    assert (result["trace"], result["capacity"]) == (QWEN.name, "24/layer")
    assert not result["own_trace"]
    text = moecache("validate", "--counts", path, "--model", "Qwen3-30B-A3B")
    assert "only rates compare" in " ".join(text.split())


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        ("hello\n", [QWEN], "no counts that are known.*imp, FreeToken"),
        (COLIBRI, [], "the routing is missing"),
        (COLIBRI, [QWEN, "--model", "OLMoE-1B-7B"], "the routing is given twice"),
        (STREAMLX, [QWEN], "capacity is missing, and streamlx's counts do not state it"),
        (IMP, [QWEN, "--speeds", "rows.csv"], "cannot be combined with --speeds"),
        (IMP, [QWEN, "measured.csv"], "measured='measured.csv' cannot be combined with --counts"),
        ("Expert LRU cache stats: 0 hits, 0 misses", [QWEN], "imp counted no lookup"),
        (BIG.replace("7.89", "-1.00"), [QWEN], "had no cache"),
        (BIG.replace("7.89", "x"), [QWEN], "must be numbers"),
    ],
)
def test_what_does_not_fit_is_refused(
    text: str, options: list[Any], said: str, tmp_path: Path, moecache: Moecache
) -> None:
    path = tmp_path / "counts.log"
    path.write_text(text)
    error = moecache("validate", *options, "--counts", path, code=2)
    assert re.search(said, " ".join(error.split())), error


def test_windows_weigh_by_their_lookups_and_not_by_their_number(tmp_path: Path) -> None:
    """64 steps of 6 experts at 20% misses and 16 of 12 at 10%: 96 of 576 lookups."""
    line = "MoE cache ({} decode steps): miss_rate={}, active/layer={}, missing/layer=1\n"
    path = tmp_path / "counts.log"
    path.write_text(line.format(64, 0.2, 6) + line.format(16, 0.1, 12))
    assert read_counts(str(path)).hit_rate == pytest.approx(1 - 96 / 576)


@pytest.mark.parametrize(("phase", "hits", "misses"), [("decode", 1, 2), ("all", 2, 3)])
def test_a_replay_counts_the_passes_that_the_runtime_counts(
    phase: str, hits: int, misses: int
) -> None:
    """One slot; a prompt needs expert 3 twice, and decoding needs 0, 0 and 1."""
    phases = ["prefill"] * 2 + ["decode"] * 3
    trace = traces.decode_trace([[[3]], [[3]], [[0]], [[0]], [[1]]], 4, phases)
    counts = Counts(writer="x", phase=phase, hit_rate=0.5)
    found = replayed(trace, traces.setting_for(trace, "1experts"), counts)
    assert (found["hits"], found["misses"], found["steps"]) == (hits, misses, 3)
    assert found["bytes_moved"] == misses
    # The most used expert of the decode steps, whatever the prompt needs.
    assert found["oracle_hit_rate"] == pytest.approx(2 / 3)

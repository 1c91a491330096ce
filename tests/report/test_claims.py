"""What a claims file can ask of runs that cannot answer it is said, with the claim and the part."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from lm_eval_moecache.cli.main import main
from tests.report.runs import leaderboard_of_four

Captured = pytest.CaptureFixture[str]
ROWS: list[dict[str, Any]] = [{"layer": n, "a": 1.0 + n, "b": 2.0 + n, "none": 0} for n in range(8)]
CELLS = [
    {"cell": {"trace": trace, "eviction": name}, "miss_rate": rate, "zero": 0.0, "open_loop": False}
    for trace in ("a", "b", "c")
    for name, rate in (("lru", 0.4), ("lfu", 0.5))
]
RUN = {"runs": ".", "where": {"capacity": "5%", "policy": "on_demand"}, "form": "value"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    leaderboard_of_four(tmp_path)
    (tmp_path / "rows.json").write_text(json.dumps({"rows": ROWS}))
    (tmp_path / "cells.json.gz").write_bytes(gzip.compress(json.dumps(CELLS).encode()))
    (tmp_path / "broken.json.gz").write_bytes(b"\x1f\x8b\x08 not")
    (tmp_path / "other.json.gz").write_bytes(gzip.compress(b'[{"cell": 7}]'))
    (tmp_path / "rows.txt").write_text("{}")
    return tmp_path


def claims(folder: Path, **part: Any) -> Path:
    text = dict.fromkeys(("claim", "where", "regime", "why"), "x")
    whole = {"what": "told", "expect": {"below": 1}, **part}
    path = folder / "claims.yaml"
    one = {"id": "A1", **text, "parts": [whole]}
    path.write_text(yaml.safe_dump({"title": "x", "about": "x", "claims": [one]}))
    return path


def of_rows(**given: Any) -> dict[str, Any]:
    return {"rows": {"file": "rows.json", "new": "a", "old": "b", "unit": "layers", **given}}


def of_cells(**given: Any) -> dict[str, Any]:
    sides = {"where": {"eviction": "lru"}, "versus": {"eviction": "lfu"}}
    return {"cells": "cells.json.gz", **sides, **given}


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (of_rows(file="gone.json"), "gone.json: there is no such file"),
        (of_rows(file="rows.txt"), "rows.txt lacks 'rows'"),
        (of_rows(new="aa"), "rows.json: the column='aa' is not known. Did you mean 'a'?"),
        (of_rows(old="none"), "is 0, to which there is no ratio"),
        (of_rows(old=None), "there is no other side to compare with"),
        (of_cells(cells="gone.json.gz"), "gone.json.gz: there is no such file"),
        (of_cells(cells="broken.json.gz"), "broken.json.gz is not readable: "),
        (of_cells(cells="other.json.gz"), "0.cell=7 must be a mapping"),
        (of_cells(metric="mis_rate"), "metric='mis_rate' is not known. Did you mean 'miss_rate'?"),
        (of_cells(metric="open_loop"), "metric='open_loop' is not known"),
        (of_cells(metric="zero"), "is 0, to which there is no ratio"),
        (of_cells(where={"eviction": "fifo"}, versus={}), "0 traces have the figure"),
        ({**RUN, "runs": "gone"}, "gone': there is no such file or folder"),
        ({**RUN, "where": {"policy": "nobody"}}, "picks 0 runs: none"),
        ({**RUN, "where": {}}, "picks 4 runs"),
        ({**RUN, "whole": True, "aside": True, "metric": "hit_rat"}, "metric='hit_rat' is not"),
        ({**RUN, "metric": "quizz"}, "metric='quizz' is not known. Did you mean 'quiz'?"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_answered_is_refused(
    folder: Path, part: dict[str, Any], said: str, capsys: Captured
) -> None:
    assert main(["claims", str(claims(folder, **part))]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("moecache claims: claim A1, 'told': ")
    assert said in line


def test_whole_runs_are_told_and_never_tested(folder: Path, capsys: Captured) -> None:
    part = {**RUN, "whole": True, "aside": True, "metric": "hit_rate", "expect": {"above": 0}}
    assert main(["claims", str(claims(folder, **part)), "--json"]) == 0
    [told] = json.loads(capsys.readouterr().out)["claims"][0]["parts"]
    assert told["low"] == told["figure"] == told["high"] and told["p"] is told["least_p"] is None
    assert main(["claims", str(claims(folder, **{**part, "aside": False}))]) == 2
    assert "of `whole` runs must have `runs` and be `aside`" in capsys.readouterr().err


@pytest.mark.parametrize("part", [of_rows(), of_cells()], ids=["rows", "cells"])
def test_what_can_be_answered_is(folder: Path, part: dict[str, Any], capsys: Captured) -> None:
    assert main(["claims", str(claims(folder, **part)), "--json"]) == 0
    [found] = json.loads(capsys.readouterr().out)["claims"]
    assert found["verdict"] == "holds" or part.get("cells")
    assert 0.7 < found["parts"][0]["figure"] < 0.95


def test_json_of_a_figure_without_end_is_json(folder: Path, capsys: Captured) -> None:
    """A bootstrap may draw only zeros to compare with: an interval without end is none in JSON."""
    rows = [{**row, "b": float(row["layer"] == 0)} for row in ROWS]
    (folder / "rows.json").write_text(json.dumps({"rows": rows}))
    assert main(["claims", str(claims(folder, **of_rows())), "--json"]) == 0
    text = capsys.readouterr().out
    assert "Infinity" not in text and "NaN" not in text

"""What the scripts of benchmarks/ have written into results/ stands in their cells."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from statistics import mean

import pytest

from lm_eval_moecache.algorithms.policy import policy_names

ROOT = Path(__file__).resolve().parents[1]
SIZES = runpy.run_path(str(ROOT / "benchmarks" / "layer_sizes.py"))
FOLDER = ROOT / "results" / "layer_sizes"
ROWS = json.loads((FOLDER / "layer_sizes.json").read_text())


def test_the_table_of_layer_sizes_comes_from_its_rows_to_the_byte() -> None:
    assert (FOLDER / "table.md").read_text() == SIZES["render"](ROWS)


def test_the_rows_of_a_real_trace_are_what_the_script_finds() -> None:
    trace = SIZES["load_trace"](str(ROOT / "traces" / "olmoe-1b-7b.parquet"))
    own = [row for row in ROWS if row["trace"] == "olmoe-1b-7b"]
    assert list(SIZES["rows_of"]("olmoe-1b-7b", trace)) == own


@pytest.mark.parametrize("share", [5, 10, 25, 50])
def test_sizes_win_on_their_own_half_and_on_the_other_only_where_little_fits(share: int) -> None:
    rows = [row for row in ROWS if row["share"] == share]
    for row in rows:
        if row["solved_on"] == row["measured_on"]:
            assert row["adapted"] <= row["equal"]
    others = [r["adapted"] - r["equal"] for r in rows if r["solved_on"] != r["measured_on"]]
    assert (mean(others) < -0.005) == (share <= 10)


REPORT = runpy.run_path(str(ROOT / "benchmarks" / "policy_space_report.py"))
SPACE = REPORT["load"](ROOT / "results" / "policy_space" / "cells.json.gz")
ANSWERS = REPORT["load"](ROOT / "results" / "miss_answers" / "cells.json.gz")


def test_the_tables_of_replayed_policies_come_from_their_cells_to_the_byte() -> None:
    space, answers = (
        ROOT / "results" / name / "table.md" for name in ("policy_space", "miss_answers")
    )
    assert space.read_text() == REPORT["render_space"](SPACE)
    assert answers.read_text() == REPORT["render_answers"](ANSWERS)


def test_every_shipped_composition_has_its_cells_on_every_device() -> None:
    found = {tuple(run["cell"][key] for key in ("policy", "hardware", "capacity")) for run in SPACE}
    assert len(found) == len(SPACE) == len(policy_names()) * 3 * 4


def test_the_best_answer_is_never_behind_fetching() -> None:
    for suffix in ("", REPORT["PLACED"]):
        best = REPORT["winners"](ANSWERS, suffix)
        assert len(best) == 42 and all(gain >= 1 for _, gain in best.values())

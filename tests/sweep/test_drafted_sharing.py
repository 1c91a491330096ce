"""Sweeps of drafted runs share one run of the model and of the draft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lm_eval_moecache.cli.main import main
from tests.sweep.toy import both_ways, made_by, records, write_sweep

DRAFTED: dict[str, Any] = {"model": "moecache-spec", "tasks": ["toy_answer"], "limit": 2}


@pytest.fixture
def base(base: dict[str, Any]) -> dict[str, Any]:
    return {**base, "capacity": "40%", "draft": "self:int8"}


@pytest.mark.slow
def test_drafted_cells_are_replayed_to_the_byte(tmp_path: Path, base: dict[str, Any]) -> None:
    grid = [
        {"policy": ["sp_moe"], "prefetch.cutoff": [0, 2, "auto"], "bandwidth": ["1GB/s", "9MB/s"]},
        {"policy": ["sp_moe"], "prefetch.critical": [1, 5], "link": ["priority", "fifo"]},
        {"policy": ["sp_moe_vanilla", "mixtral_offloading", "moe_infinity", "on_demand"]},
        {"policy": ["sp_moe"], "capacity": ["4/layer"], "cache_reset": ["request"], "seed": [2]},
        {"policy": ["on_demand"], "eviction": ["score", "random"], "hardware": ["h200"]},
    ]
    given = {**DRAFTED, "tasks": ["toy_answer", "toy_choice"]}
    found, _ = both_ways(tmp_path, base={**base, "draft_tokens": 2}, grid=grid, **given)
    assert made_by(found) == ["replay_of"] * (len(found) - 1) + ["run"]
    drafted = [r["config"]["moecache"]["draft"] for r in found.values()]
    assert len({str(d) for d in drafted}) > 1, "the solver's answer is a cell's own"


def test_another_draft_or_length_is_another_run(tmp_path: Path, base: dict[str, Any]) -> None:
    grid: dict[str, Any] = {"draft": ["self:int8", "self:int4", "prompt_lookup"]}
    grid |= {"draft_tokens": [1, 2], "eviction": ["lru", "lfu"]}
    plain = {**base, "policy": "on_demand"}
    found, _ = both_ways(tmp_path, base=plain, grid=grid, **{**DRAFTED, "limit": 1})
    assert made_by(found) == ["replay_of"] * 6 + ["run"] * 6


def test_bounds_of_drafted_cells_are_replayed(tmp_path: Path, base: dict[str, Any]) -> None:
    plain, grid = {**base, "policy": "on_demand"}, {"eviction": ["lru", "lfu"]}
    bounds = ["belady", "oracle"]
    path = write_sweep(tmp_path / "x", base=plain, grid=grid, bounds=bounds, **DRAFTED)
    assert main(["sweep", str(path)]) == 0
    found = records(path.parent)
    totals = {r["label"] or r["run_id"]: r["config"]["moecache"]["totals"] for r in found.values()}
    fewest = totals.pop("knows the future: belady")["miss_rate"]
    assert len(totals) == 3 and all(each["draft_acceptance"] > 0 for each in totals.values())
    plain = [each for name, each in totals.items() if not name.startswith("knows the future")]
    assert all(fewest <= each["miss_rate"] for each in plain)

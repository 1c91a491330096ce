"""A sweep with both models."""

from __future__ import annotations

from pathlib import Path

import pytest

from lm_eval_moecache.sweep import worker
from lm_eval_moecache.sweep.run import run_sweep
from lm_eval_moecache.sweep.spec import read_sweep
from tests.conftest import Checkpoint
from tests.sweep.toy import records, write_sweep


def test_a_sweep_runs_both_models_and_names_drafts_that_do_not_fit(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    base = {"pretrained": str(checkpoint("olmoe")), "device": "cpu", "policy": "on_demand"}
    drafted = {"model": "moecache-spec", "draft": "self:int8"}
    settings = {"base": base, "tasks": ["tiny_gsm8k"], "limit": 1}
    runs = [{}, {**drafted, "draft_tokens": 1}, {**drafted, "draft_tokens": 4}]
    path = write_sweep(tmp_path / "sweep", **settings, grid={}, runs=runs)
    report = run_sweep(read_sweep(path), path.parent)
    worker._loaded.clear()
    assert (len(report["done"]), report["failed"]) == (3, [])
    reports = [record["config"]["moecache"] for record in records(path.parent).values()]
    drafts = sorted(r["draft"]["tokens"] for r in reports if "draft" in r)
    assert drafts == [1, 4]
    for record in records(path.parent).values():
        (score,) = record["scores"].values()
        assert set(score["exact_match,strict-match"].values()) == {0.0}
    bad = write_sweep(tmp_path / "bad", **settings, grid={}, runs=[{**drafted, "draft_tokens": 0}])
    with pytest.raises(
        ValueError, match=r"1 of 1 runs cannot start.\n  model_args: draft_tokens=0"
    ):
        run_sweep(read_sweep(bad), bad.parent)

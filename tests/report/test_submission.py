"""A leaderboard shows each setting once, and what is handed in keeps to its protocol."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from lm_eval_moecache.cli.table import collect
from lm_eval_moecache.report.columns import selected
from lm_eval_moecache.report.results import Run, load_runs
from lm_eval_moecache.report.tables import distinct

RESULTS = Path(__file__).resolve().parents[2] / "results"
BOARD: dict[str, Any] = yaml.safe_load((RESULTS / "table.yaml").read_text())
SUBMITTED = sorted((RESULTS / "submissions").glob("*.json"))


def check_submission(run: Run, protocol: Mapping[str, Any]) -> None:
    """Check that a run may stand on a leaderboard whose `where` is `protocol`.

    It has these settings, and each task has the scores of its documents, to which its own add up.
    """
    for key, wanted in protocol.items():
        assert selected(run, {key: wanted}), f"the protocol has {key}={wanted!r}"
    for task in run.moecache["tasks"]:
        assert task in run.samples, f"task {task} lacks its documents' scores"
        for score in run.scores(task):
            documents = run.samples[task].get(score.key, {}).values()
            # A perplexity is no mean over documents.
            if documents and not any(isinstance(value, list) for value in documents):
                mean = math.fsum(documents) / len(documents)
                assert math.isclose(mean, score.value, abs_tol=1e-9), f"{task} {score.key}: {mean}"


@pytest.fixture(scope="module")
def runs() -> list[Run]:
    return load_runs(RESULTS / "demo")


@pytest.mark.parametrize("path", SUBMITTED, ids=lambda path: path.name)
def test_what_was_handed_in_keeps_to_the_protocol(path: Path) -> None:
    [run] = load_runs(path)
    check_submission(run, BOARD["where"])


def test_a_record_of_a_sweep_may_be_handed_in(runs: list[Run]) -> None:
    for run in runs:
        check_submission(run, {"pretrained": "tiny", "emulate": "OLMoE-1B-7B", "limit": 80})


def test_each_setting_stands_once(runs: list[Run]) -> None:
    again = [dataclasses.replace(run, run_id=f"{run.run_id}-again", label="x") for run in runs]
    assert distinct([*runs, *again]) == runs
    placed = dict(runs[0].moecache) | {"policy": runs[0].moecache["policy"] | {"placement": "use"}}
    other = dataclasses.replace(runs[0], moecache=placed)
    assert distinct([*runs, other]) == [*runs, other], "where it starts is part of a policy"


def test_the_boards_in_results_hold_each_setting_once() -> None:
    [board, *_] = collect(RESULTS)
    assert BOARD["distinct"] is True
    runs = load_runs(RESULTS)
    assert 0 < len(board.rows) <= len(distinct(runs))

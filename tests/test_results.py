"""The pages of `results/` follow from its JSONs, and its index lists every folder."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from lm_eval.utils import make_table

from lm_eval_moecache.cli.table import board_folders, collect, other_tables
from lm_eval_moecache.harness.run_report import speed_table
from lm_eval_moecache.report.runs.files import TABLE, load_runs
from lm_eval_moecache.report.runs.run import Run
from lm_eval_moecache.report.tables import FORMS
from lm_eval_moecache.report.tables.leaderboard import distinct
from lm_eval_moecache.sweep.files import finished
from lm_eval_moecache.sweep.run import check_cells
from lm_eval_moecache.sweep.spec import read_sweep
from moecache_lab.claims.page import page
from moecache_lab.claims.verdicts import VERDICTS, answer, read_claims
from moecache_lab.recipes import fitted
from moecache_lab.reproduce import paper_page

RESULTS = Path(__file__).resolve().parent.parent / "results"
INDEX = (RESULTS / "README.md").read_text()
# A folder with a recipe alone has no results yet.
FOUND = [path for pattern in ("*/*.json", f"*/{TABLE}") for path in RESULTS.rglob(pattern)]
FOLDERS = sorted({RESULTS / path.relative_to(RESULTS).parts[0] for path in FOUND})
BOARDS = board_folders(RESULTS)
SCRIPTED = (
    *("real_routing", "layer_sizes", "policy_space", "miss_answers", "evictions", "sensitivity"),
    *("lossy_answers/accuracy", "lost_points", "published_losses"),
)
PAPERS = sorted(RESULTS.rglob("paper.md"))
WRITTEN_BY_HAND = ("README.md", "theirs.md")


@pytest.mark.parametrize("folder", BOARDS, ids=lambda p: str(p.relative_to(RESULTS)))
def test_every_committed_table_comes_from_its_jsons_to_the_byte(folder: Path) -> None:
    tables = collect(folder)
    for name in FORMS:
        committed = folder / f"table.{name}"
        assert committed.is_file(), "run: moecache table results --each --write"
        assert committed.read_text() == FORMS[name](tables), committed


def test_a_committed_sweep_finds_its_runs_again() -> None:
    """A setting, or a key of what is hashed, that changes its name makes every run anew."""
    folder = RESULTS / "demo"
    planned = check_cells(read_sweep(folder / "sweep.yaml").cells())
    assert {cell.configuration_hash for cell in planned} == finished(folder).keys()


def test_analyses_and_searches_are_told_as_their_jsons_say() -> None:
    tables = other_tables(RESULTS)
    assert tables
    for path, text in tables.items():
        assert path.read_text() == text, path
    boards = {folder / "table.md" for folder in BOARDS}
    # Each of these has a script and a test of its own.
    scripted = {RESULTS / name / "table.md" for name in SCRIPTED}
    scripted |= {RESULTS / "CLAIMS.md", RESULTS / "runtimes/table.md"}
    # The times of gpu_check are one machine's, and a search writes its front once.
    scripted |= {RESULTS / "first_run/table.md", RESULTS / "wall_clock/gpu_check_cpu.md"}
    scripted.add(RESULTS / "tune/front.md")
    generated = {*tables, *boards, *PAPERS, *scripted}
    # Nothing would check a table that nothing regenerates.
    others = {p for p in RESULTS.rglob("*.md") if p.name not in WRITTEN_BY_HAND} - generated
    assert others == set()


def test_the_first_runs_table_is_that_of_its_results() -> None:
    path = RESULTS / "first_run/results.json"
    [run] = load_runs(path)
    committed = (path.parent / "table.md").read_text()
    _, _, speed = speed_table(dict(run.moecache)).partition("\n")
    assert speed.strip() in committed
    assert make_table(json.loads(path.read_text())).strip() in committed


@pytest.mark.slow
def test_the_claims_page_is_what_the_command_writes() -> None:
    claims = read_claims(RESULTS / "claims.yaml")
    verdicts = answer(claims, RESULTS)
    written = (RESULTS / "CLAIMS.md").read_text()
    assert page(claims, verdicts) == written, (
        "run: python -m moecache_lab.claims results/claims.yaml --write"
    )
    for verdict in verdicts:
        assert verdict.verdict in VERDICTS and verdict.claim.why.strip(), verdict.claim.id
        for part in verdict.answers:
            assert part.estimate.low <= part.estimate.figure <= part.estimate.high


@pytest.mark.parametrize("path", PAPERS, ids=lambda p: str(p.parent.relative_to(RESULTS)))
def test_the_papers_numbers_are_listed_with_those_of_the_runs(path: Path) -> None:
    name = str(path.parent.relative_to(RESULTS))
    recipe = fitted(name, "tiny", None)
    runs = load_runs(path.parent) if recipe.sweep else []
    assert path.read_text() == paper_page(name, recipe, runs), f"run: moecache reproduce {name}"
    if recipe.sweep:
        assert yaml.safe_load((path.parent / "sweep.yaml").read_text()) == recipe.sweep


# --- the leaderboard: each setting once, and submissions keep to its protocol ---

BOARD: dict[str, Any] = yaml.safe_load((RESULTS / "table.yaml").read_text())
SUBMITTED = sorted((RESULTS / "submissions").glob("*/runs.parquet"))


def check_submission(run: Run, protocol: Mapping[str, Any]) -> None:
    """Check that a run may stand on a leaderboard whose `where` is `protocol`.

    It has the protocol's settings, and each task's scores are the means of its documents' scores.
    """
    for key, wanted in protocol.items():
        assert run.matches({key: wanted}), f"the protocol has {key}={wanted!r}"
    for task in run.moecache["tasks"]:
        assert task in run.samples, f"task {task} lacks its documents' scores"
        for score in run.scores(task):
            documents = run.samples[task].get(score.key, {}).values()
            # A perplexity is no mean over documents.
            if documents and not any(isinstance(value, list) for value in documents):
                mean = math.fsum(documents) / len(documents)
                assert math.isclose(mean, score.value, abs_tol=1e-9), f"{task} {score.key}: {mean}"


@pytest.fixture(scope="module")
def demo() -> list[Run]:
    return load_runs(RESULTS / "demo")


@pytest.mark.parametrize("path", SUBMITTED, ids=lambda path: path.parent.name)
def test_what_was_handed_in_keeps_to_the_protocol(path: Path) -> None:
    [run] = load_runs(path)
    check_submission(run, BOARD["where"])


def test_a_record_of_a_sweep_may_be_handed_in(demo: list[Run]) -> None:
    for run in demo:
        check_submission(run, {"pretrained": "tiny", "emulate": "OLMoE-1B-7B", "limit": 200})


def test_each_setting_stands_once(demo: list[Run]) -> None:
    repeats = [dataclasses.replace(run, run_id=f"{run.run_id}-again", label="x") for run in demo]
    assert distinct([*demo, *repeats]) == demo
    placed = dict(demo[0].moecache) | {"policy": demo[0].moecache["policy"] | {"placement": "use"}}
    other = dataclasses.replace(demo[0], moecache=placed)
    assert distinct([*demo, other]) == [*demo, other], "where it starts is part of a policy"
    [board, *_] = collect(RESULTS)
    assert BOARD["distinct"] is True
    assert 0 < len(board.cells) <= len(distinct(load_runs(RESULTS)))

"""What `results/` shows is what its JSONs hold, and its index lists what is there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from lm_eval.utils import make_table

from lm_eval_moecache.cli.table import _FORMATS, board_folders, collect, other_tables
from lm_eval_moecache.report.results import load_runs
from lm_eval_moecache.report.runs_file import PACKED
from lm_eval_moecache.report.speed_table import speed_table

RESULTS = Path(__file__).resolve().parent.parent / "results"
INDEX = (RESULTS / "README.md").read_text()
# A recipe alone has no results to tell of yet.
FOLDERS = sorted(
    {
        RESULTS / path.relative_to(RESULTS).parts[0]
        for pattern in ("*/*.json", f"*/{PACKED}")
        for path in RESULTS.rglob(pattern)
    }
)
BOARDS = board_folders(RESULTS)
VERDICTS = ("holds", "holds in part", "does not hold", "not testable")
SCRIPTED = ("real_routing", "layer_sizes", "policy_space", "miss_answers")
WRITTEN_BY_HAND = ("README.md", "CLAIMS.md", "theirs.md")


@pytest.mark.parametrize("folder", BOARDS, ids=lambda p: str(p.relative_to(RESULTS)))
def test_every_committed_table_comes_from_its_jsons_to_the_byte(folder: Path) -> None:
    tables = collect(folder)
    for name, render in _FORMATS.items():
        committed = folder / f"table.{name}"
        assert committed.is_file(), "run: moecache table results --each --write"
        assert committed.read_text() == render(tables), committed


def test_runs_lie_packed_and_no_search_is_kept() -> None:
    loose = [*RESULTS.rglob("runs/*.json"), *RESULTS.rglob("*.journal")]
    assert loose == [], "run: moecache pack results"
    assert len(list(RESULTS.rglob(PACKED))) > 20


def test_analyses_and_searches_are_told_as_their_jsons_say() -> None:
    found = other_tables(RESULTS)
    assert found
    for path, text in found.items():
        assert path.read_text() == text, path
    boards = {folder / "table.md" for folder in BOARDS}
    # Each of these has a script and a test of its own.
    scripted = {RESULTS / name / "table.md" for name in SCRIPTED}
    # The second is times of one machine.
    scripted |= {RESULTS / "real_routing" / name for name in ("claims.md", "cost.md")}
    generated = {*found, *boards, RESULTS / "first_run/table.md", *scripted}
    # A table that nothing regenerates could say anything.
    others = {p for p in RESULTS.rglob("*.md") if p.name not in WRITTEN_BY_HAND} - generated
    assert others == set()


def test_the_first_runs_table_is_that_of_its_results() -> None:
    path = RESULTS / "first_run/results.json"
    [run] = load_runs(path)
    committed = (path.parent / "table.md").read_text()
    _, _, speed = speed_table(dict(run.moecache)).partition("\n")
    assert speed.strip() in committed
    assert make_table(json.loads(path.read_text())).strip() in committed


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda p: p.name)
def test_every_folder_is_in_the_index_and_says_what_it_holds(folder: Path) -> None:
    assert f"]({folder.name}/README.md)" in INDEX
    assert (folder / "README.md").is_file()


def test_links_of_the_readmes_lead_somewhere() -> None:
    for path in RESULTS.rglob("*.md"):
        for link in re.findall(r"\]\(([^)#:]+)\)", path.read_text()):
            assert (path.parent / link).exists(), f"{path}: {link}"


def test_every_claim_of_the_papers_is_answered_with_figures_and_a_folder() -> None:
    rows = re.findall(r"^\| (\w\d) \| (.*) \|$", (RESULTS / "CLAIMS.md").read_text(), re.MULTILINE)
    counts = {"S": 8, "P": 5, "B": 3, "C": 4, "M": 7}
    assert [name for name, _ in rows] == [
        f"{k}{i + 1}" for k, n in counts.items() for i in range(n)
    ]
    for name, row in rows:
        claim, verdict, figures, folder, why = row.split(" | ")
        assert claim and why, name
        assert verdict.strip("*") in VERDICTS, name
        assert re.search(r"\d", figures), name
        # That the links lead somewhere is tested above.
        assert re.search(r"\]\([\w/.]+\)", folder), name


@pytest.mark.parametrize(
    ("figure", "column", "kept", "expected"),
    [
        ("figure_5", "token_miss_rate", 1, 0.073),
        ("figure_6", "decode_token_miss_rate", 2, 0.176),
    ],
)
def test_pruning_is_told_by_the_papers_denominator(
    figure: str, column: str, kept: int, expected: float
) -> None:
    """The cache-conditional paper divides misses by k, of however few experts are executed."""
    [table] = collect(RESULTS / "cache_conditional" / figure)[1:]
    names = [each.name for each in table.columns]
    [row] = [r for r in table.rows if r[1].raw == f"routing.h={kept}"]
    assert row[names.index(column)].raw == pytest.approx(expected, abs=5e-4)

"""`moecache profile runtimes`: constants are found again, and ranges hold what they say."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from lm_eval_moecache.records.runtimes import MECHANISMS_FILE
from moecache_lab.fit_runtimes import START, Off, fit, spreads_of
from moecache_plan.mechanisms import NEW_CARD, Mechanisms, mechanisms
from tests.conftest import Moecache
from tests.plan.test_published import ROWS, shipped


def cells(path: Path) -> list[tuple[str, float]]:
    """Return a table's words and numbers, with 0 as the number of a word."""
    words = re.split(r"[\s|]+", path.read_text())
    is_number = re.compile(r"\d+(\.\d+)?%?").fullmatch
    return [("", float(w.strip("%"))) if is_number(w) else (w, 0.0) for w in words]


@pytest.mark.slow
def test_the_shipped_constants_and_table_are_what_the_command_writes(
    tmp_path: Path, moecache: Moecache
) -> None:
    out = tmp_path / "mechanisms.yaml"
    words = ("profile", "runtimes", "--from", ROWS, "--out", out, "--report", tmp_path)
    result = moecache.json(*words)
    new, old = (cells(folder / "table.md") for folder in (tmp_path, ROWS.parent))
    assert [name for name, _ in new] == [name for name, _ in old]
    assert [n for _, n in new] == pytest.approx([n for _, n in old], rel=0.02, abs=0.02)
    made, shipped = (yaml.safe_load(path.read_text()) for path in (out, MECHANISMS_FILE))
    assert made["constants"] == pytest.approx(shipped["constants"], rel=0.01)
    assert made["hits"] == shipped["hits"]
    assert made["spreads"].keys() == shipped["spreads"].keys()
    assert result["median_factor"] < result["rule_of_thumb"]["median_factor"]


def test_constants_that_made_the_speeds_are_found_again() -> None:
    """Rows of the shipped file, their speeds replaced by those of other constants."""
    rows, _ = shipped()
    begin = Mechanisms(constants=START, curve=mechanisms().curve, routings=mechanisms().routings)
    truth = {**START, "card_share": 0.6, "host_share": 0.35}
    made = []
    for index, row in enumerate(rows):
        # Every other program is twice as fast as its mechanism.
        runtime = replace(row.runtime, factor=1.0 + index % 2)
        seconds = sum(row.work(row.placed(begin)).seconds(truth).values())
        made.append(replace(row, runtime=runtime, decode=runtime.factor / seconds))
    found = fit([row for row in made if row.placed(begin).hit is None], begin).constants
    for name in ("card_share", "host_share"):
        assert found[name] == pytest.approx(truth[name], rel=0.1), name


@given(st.lists(st.floats(1, 10), min_size=10, max_size=60))
def test_the_reach_of_a_group_covers_four_fifths_of_it(factors: list[float]) -> None:
    """Of n sources the one at rank (n + 1) x 0.8; each row's source is its own here."""
    groups = {"host": [Off("m", str(index), factor) for index, factor in enumerate(factors)]}
    spread = spreads_of(groups)["host"]
    assert sum(factor <= spread.reach + 1e-3 for factor in factors) >= 0.8 * len(factors)
    assert spread.sources == len(factors) and spread.machines == 1
    # Those of one source say nothing of the source's own range.
    alone = {"host": [Off("m", "a", 9.0)] * 5 + [Off("m", str(n), 2.0) for n in range(20)]}
    assert spreads_of(alone)["host"].coverage == pytest.approx(20 / 25)


def test_a_source_counts_once_and_few_make_a_wider_range() -> None:
    """Fifty rows of one page are one voice; of three sources the furthest row is the range."""
    many = [Off("m", "page", 1.1)] * 50
    others = [Off("m", str(n), 1.5 + 0.1 * n) for n in range(9)]
    assert spreads_of({"host": many + others})["host"].reach == pytest.approx(2.2)
    assert spreads_of({"host": many + others[:2]})["host"].reach == pytest.approx(1.6)


def test_a_card_without_rows_has_no_narrower_range_than_such_cards_had() -> None:
    known = mechanisms()
    usual, new = known.spread("host", True, "rtx-3090"), known.spread("host", True, "gtx-1050-ti")
    assert new.reach == max(usual.reach, known.spreads[NEW_CARD].reach) > usual.reach
    assert known.spread("resident", True, "m4-max-36gb") == known.spread("resident", True)

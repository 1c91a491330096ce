"""The table of what runs on the wall clock: whole, true, and the one in docs/."""

from __future__ import annotations

from pathlib import Path

import pytest

from lm_eval_moecache.algorithms.policy import policy_names
from lm_eval_moecache.algorithms.registry import AXES, algorithm_names
from lm_eval_moecache.harness.arguments import CHOICES, KEYS
from lm_eval_moecache.harness.wall_table import Cell, page, wall_table
from lm_eval_moecache.model.precision.registry import codec_names

DOCS = Path(__file__).resolve().parent.parent / "docs"


@pytest.fixture(scope="module")
def cells() -> list[Cell]:
    return wall_table()


def test_every_key_and_every_value_has_a_cell(cells: list[Cell]) -> None:
    found = {(cell.key, cell.value) for cell in cells}
    # `capacity` is in every cell; `clock` is what the table is about.
    assert {key for key, _ in found} == set(KEYS) - {"capacity", "clock"}
    expected = {(axis, name) for axis in AXES for name in algorithm_names(axis)}
    expected |= {("policy", name) for name in policy_names()}
    expected |= {("precision", name) for name in codec_names()}
    expected |= {(k, v) for k, values in CHOICES.items() for v in values if k != "clock"}
    assert expected <= found
    assert len(found) == len(cells)


def test_an_empty_cell_has_a_reason_that_says_what_is_allowed(cells: list[Cell]) -> None:
    refused = [cell for cell in cells if cell.reason]
    for cell in refused:
        assert cell.key in cell.reason or "clock='wall'" in cell.reason, cell
        assert "llowed" in cell.reason or "moecache replay" in cell.reason, cell


def test_the_table_in_the_docs_is_todays(cells: list[Cell]) -> None:
    """Made anew by `python -m lm_eval_moecache.harness.wall_table > docs/wall_clock.md`."""
    assert (DOCS / "wall_clock.md").read_text() == page(cells)

"""The table of what runs on the wall clock: whole, and with a reason where something does not."""

from __future__ import annotations

import pytest

from docs.wall_table import Cell, wall_table
from lm_eval_moecache.algorithms.policy import policy_names
from lm_eval_moecache.algorithms.registry import AXES, algorithm_names
from lm_eval_moecache.harness.arguments import CHOICES, KEYS
from lm_eval_moecache.model.precision.ladder import codec_names


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

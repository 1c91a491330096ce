"""A sample of the model families, and the committed table of them: it has every type."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers

from tests.families.__main__ import DOCS
from tests.families.check import (
    AS_HF,
    EQUAL,
    FAILED,
    ON_DEMAND,
    REFUSED,
    RUNS,
    Checked,
    Row,
    check,
)
from tests.families.configs import causal_types, other_types

# A bias from the block, or from a part of the router; probabilities and scales; a class for
# skipping; experts by token id.
SAMPLE = {
    "ernie4_5_moe": (EQUAL, RUNS),
    "minimax_m2": (EQUAL, RUNS),
    "gemma4_text": (EQUAL, RUNS),
    "zaya": (EQUAL, REFUSED),
    "deepseek_v4": (EQUAL, RUNS),
}


@pytest.mark.parametrize("model_type", SAMPLE)
def test_a_family_runs_or_is_refused_before_loading(model_type: str) -> None:
    row = check(model_type)
    assert row.verdict == RUNS, row.reasons
    assert (row.virtual, row.lossy) == SAMPLE[model_type], row.reasons
    assert row.trace == row.wall_ram == row.wall_disk == EQUAL


def running_types() -> list[str]:
    rows = json.loads((DOCS / "families.json").read_text())
    return [row["model_type"] for row in rows if row["verdict"] == RUNS]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", running_types())
def test_every_family_answers_in_a_batch_as_hf_does(model_type: str, tmp_path: Path) -> None:
    checked = Checked(Row(model_type), tmp_path)
    checked.ask_plain()
    assert checked.in_batches(checked.load(ON_DEMAND)) in (EQUAL, AS_HF), checked.row.reasons


def test_the_table_has_every_type_of_this_transformers() -> None:
    rows = json.loads((DOCS / "families.json").read_text())
    assert len(rows) >= 55
    assert [row for row in rows if row["verdict"] == FAILED] == []
    page = (DOCS / "families.md").read_text()
    assert all(f"| `{row['model_type']}` |" in page for row in rows)
    if f"transformers {transformers.__version__} " in page:
        assert [row["model_type"] for row in rows] == [*causal_types(), *other_types()]

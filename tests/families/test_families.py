"""A sample of the model families, and the committed table of them: it has every type."""

from __future__ import annotations

import json

import pytest
import transformers

from tests.families.__main__ import DOCS, table
from tests.families.check import EQUAL, FAILED, REFUSED, RUNS, Row, check
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


def test_the_table_has_every_type_of_this_transformers() -> None:
    rows = json.loads((DOCS / "families.json").read_text())
    assert len(rows) >= 55
    assert [row for row in rows if row["verdict"] == FAILED] == []
    page = (DOCS / "families.md").read_text()
    assert all(f"| `{row['model_type']}` |" in page for row in rows)
    if f"transformers {transformers.__version__} " in page:
        assert [row["model_type"] for row in rows] == [*causal_types(), *other_types()]


def test_a_refusal_stands_in_the_table_with_its_reason() -> None:
    page = table([Row("odd", virtual=REFUSED, reasons=["pretrained: no."])])
    assert "| `odd` | refused |" in page and "- `odd`: pretrained: no." in page
    assert "1 refused" in page

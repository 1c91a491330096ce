"""How far off forecasts of published losses are: by hand, and as the shipped files say."""

from __future__ import annotations

import math

import published_losses
import pytest

from moecache_lab.published_losses import judge, losses_text
from moecache_plan.losses import judged, shipped
from tests.plan.test_losses import FOLDER, loss


def test_the_range_holds_eight_rows_in_ten_of_models_left_out() -> None:
    found = judge(shipped())
    form = found["forms"]["rule, kind of task, amount"]
    for of in ("covered", "covered_cells"):
        assert 0.74 <= form[of] <= 0.86, (of, form[of])
    assert form["covered_models"] > 0.7
    assert form["median_error"] < found["forms"]["no loss"]["median_error"]
    assert {row["rule"] for row in found["no_forecast"]} == {"buddy", "lossless", "random"}
    told = {(row["rule"], row["kind"]) for row in found["rules"]}
    assert not told & {(row["rule"], row["kind"]) for row in found["no_forecast"]}
    # The files that the script writes.
    assert (FOLDER / "table.md").read_text() == (
        f"# Forecasts of published losses\n\n{losses_text(found)}"
    )
    written = published_losses.as_csv(found["rules"], published_losses.JUDGED)
    assert (FOLDER / "judged.csv").read_text() == written and told == judged().keys()


def test_a_model_is_forecast_without_its_own_rows() -> None:
    rows = [loss(name, kept) for name, kept in zip("ABC", (0.9, 0.9, 0.9), strict=True)]
    found = judge([*rows, loss("D", 0.1)])
    # A, B and C see D's ruin among three; D sees three that kept 0.9 of 0.8: 64 points off.
    assert found["forecast"] == 4
    assert found["forms"]["rule, kind of task, amount"]["rms_error"] == pytest.approx(
        math.sqrt((3 * 0 + 64**2) / 4)
    )

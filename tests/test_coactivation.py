"""`moecache analyze coactivation`: its figures against slow ones, its pictures, its refusals."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from lm_eval_moecache.analysis.coactivation import analyze
from lm_eval_moecache.cli.main import main
from lm_eval_moecache.records.coactivation import Coactivation
from lm_eval_moecache.testing.streams import make_geometry


def test_the_rows_say_how_uneven_pairs_are_and_whether_buddies_do_the_same() -> None:
    counts = Coactivation(make_geometry(num_layers=1, num_experts=3, top_k=2))
    counts.activations[0] = [6, 3, 1]
    counts.pairs[0] = [[0, 3, 1], [3, 0, 0], [1, 0, 0]]
    cosines = np.array([[[1, 0.5, 0.2], [0.5, 1, 0.1], [0.2, 0.1, 1]]], dtype=np.float32)
    (row,) = analyze(counts, cosines, alpha=0.75, k_max=2)
    # The lists are 0: 1; 1: 0; 2: 0, as 3/4 of expert 0's mass is on expert 1.
    assert row["most_active_share"] == pytest.approx(0.6)
    assert row["least_active_share"] == pytest.approx(0.1)
    assert row["mean_list_size"] == 1.0
    assert row["similarity_of_pairs"] == pytest.approx((0.5 + 0.2 + 0.1) / 3)
    assert row["similarity_of_buddies"] == pytest.approx((0.5 + 0.5 + 0.2) / 3)
    q, theirs = [0.75, 0.25, 1, 0, 1, 0], [0.5, 0.2, 0.5, 0.1, 0.2, 0.1]
    assert row["correlation"] == pytest.approx(np.corrcoef(q, theirs)[0, 1], rel=1e-5)


def test_it_writes_a_table_and_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "found"
    options = ["--max_tokens", "300", "--sample_tokens", "20", "--layer", "2"]
    assert main(["analyze", "coactivation", *options, "--json", "--out", str(out)]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["layer"] for row in rows] == list(range(8))
    assert all(0 < row["mass_of_4_best_peers"] <= 1 for row in rows)
    assert {path.name for path in out.iterdir()} == {
        f"coactivation.{suffix}" for suffix in ("json", "md", "png", "svg")
    }

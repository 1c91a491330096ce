"""`moecache analyze predictability` on the shipped model and its predictor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lm_eval_moecache.analysis import predictability
from lm_eval_moecache.cli.main import main


def test_it_gives_figure_2_and_table_1_of_what_tasks_generate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["analyze", "predictability", "--tasks", "tiny_bbh", "--limit", "4", "--json"]
    assert main([*words, "--out", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["right"] for row in found["certainty"]] == list(range(9))
    tokens = sum(row["tokens"] for row in found["certainty"])
    assert tokens == sum(row["tokens"] for row in found["layers"]) > 0
    assert sum(row["share"] for row in found["certainty"]) == pytest.approx(1.0)
    for row in found["layers"]:
        assert 0.6 < row["predictor"] <= 1.0
    for row in found["correlations"]:
        # With so few tokens one side may not vary, which has no correlation.
        assert row["set_by_gap"] is None or -1 <= row["set_by_gap"] <= 1
    assert any(row["set_by_certainty"] is not None for row in found["correlations"])
    assert [row["prompt"] for row in found["documents"]] == [0, 1, 2, 3]
    assert sum(row["tokens"] for row in found["documents"]) == tokens
    (table,) = found["replacement"]
    assert table["task"] == "tiny_bbh" and table["metric"].startswith("exact_match")
    assert table["original"] == table["replaced"] == 1.0
    for name in ("certainty.json", "layers.md", "replacement.md", "predictability.svg"):
        assert (tmp_path / name).stat().st_size > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--text", "a.txt"], "text='a.txt' has no effect on analyze predictability"),
        pytest.param(
            ["--tasks", "tiny_bhb"],
            "tasks='tiny_bhb' is not known. Did you mean 'tiny_bbh'",
            marks=pytest.mark.slow,  # lm-eval indexes all its tasks
        ),
        (["--limit", "0"], "limit=0 must be 1 or more"),
        (["--pretrained", "some/model"], "tasks: name tasks that generate text"),
        (["--tasks", "tiny_arc"], "tasks='tiny_arc' generate nothing (multiple_choice)"),
        (["--profile", "nowhere.safetensors"], "there is no such file"),
        (["--pretrained", "./none"], "pretrained='./none': there is no such folder"),
    ],
)
def test_what_makes_no_sense_is_refused(
    words: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before a model is loaded, which takes a real one minutes."""
    monkeypatch.setattr(predictability, "MoECacheLM", None)
    assert main(["analyze", "predictability", *words]) == 2
    assert message in capsys.readouterr().err

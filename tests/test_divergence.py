"""`moecache analyze divergence`: its figures by hand, nothing of a lossless policy, the command."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from lm_eval_moecache.analysis.analyzed_model import AnalyzedModel
from lm_eval_moecache.analysis.divergence import Reading, Window, analyze, compare, figures
from lm_eval_moecache.cli.main import main
from tests.conftest import Checkpoint

TEXT = "One, two, three, four, five."


def reading(shares: list[list[float]], experts: list[list[list[int]]]) -> Reading:
    """Three tokens of text, two words known; the last token's routes predict nothing."""
    return Reading(
        tokens_T=torch.tensor([0, 1, 0]),
        logits_TV=torch.tensor(shares).log(),
        experts_LTK=tuple(map(torch.tensor, experts)),
    )


def test_two_readings_are_compared_by_hand() -> None:
    plain = reading([[0.5, 0.5], [0.25, 0.75]], [[[0, 1]] * 3, [[2, 3]] * 3])
    other = reading([[0.25, 0.75], [0.5, 0.5]], [[[1, 0]] * 3, [[2, 0], [0, 1], [0, 1]]])
    found = compare(plain, other)
    assert found.tokens == 2
    # The text goes on with word 1 (0.75), then with word 0 (0.5).
    assert found.loss == pytest.approx(-math.log(0.75) - math.log(0.5))
    first = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    second = 0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5)
    assert found.kl == pytest.approx(first + second)
    # Both first words are the unmodified model's 0 against 1; where two are level, 0 comes first.
    assert found.same_top == 0
    # Of token 0 all in one layer and half in the other, of token 1 all and none.
    assert found.routes == pytest.approx((1 + 0.5) / 2 + (1 + 0) / 2)


def test_figures_divide_by_all_tokens_and_the_error_is_over_windows() -> None:
    windows = [
        Window(tokens=1, loss=1.0, kl=0.3, same_top=1, routes=1.0),
        Window(tokens=3, loss=3.0, kl=0.1, same_top=2, routes=1.5),
    ]
    found = figures(windows)
    assert found["tokens"] == 4 and found["perplexity"] == pytest.approx(math.e)
    assert found["kl"] == pytest.approx(0.1) and found["top1_agreement"] == 0.75
    assert found["route_agreement"] == pytest.approx(2.5 / 4)
    # Residuals 0.3 - 0.1 x 1 and 0.1 - 0.1 x 3, each 0.2; two windows.
    assert found["kl_stderr"] == pytest.approx(math.sqrt(0.08 * 2) / 4)
    assert figures(windows[:1])["kl_stderr"] is None


def test_only_a_lossy_policy_moves_the_output(checkpoint: Checkpoint) -> None:
    analyzed = AnalyzedModel(str(checkpoint("olmoe")), [TEXT, "Six."], 40)
    policies = {"exact": {"policy": "on_demand"}, "drop": {"miss": "drop", "miss.h": 2}}
    unmodified, exact, drop = analyze(analyzed, policies, "3/layer")
    assert unmodified["kl"] == exact["kl"] == 0.0
    assert exact["top1_agreement"] == exact["route_agreement"] == exact["routing_fidelity"] == 1.0
    assert exact["perplexity"] == unmodified["perplexity"]
    assert drop["kl"] > 0 and drop["routing_fidelity"] < 1 and drop["route_agreement"] < 1
    assert drop["bytes_per_token"] < exact["bytes_per_token"]


def test_the_command_writes_table_and_pictures(
    checkpoint: Checkpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    given = ["--pretrained", str(checkpoint("olmoe")), "--text", str(text), "--max_tokens", "20"]
    given += ["--policies", "on_demand,mixture_cache", "--capacity", "4/layer"]
    out = tmp_path / "out"
    assert main(["analyze", "divergence", *given, "--out", str(out), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["policy"] for row in rows] == ["unmodified", "on_demand", "mixture_cache"]
    names = {path.name for path in out.iterdir()}
    assert names == {f"divergence.{end}" for end in ("json", "md", "svg", "png")}

"""The calibrated logit range is the mean range of what the routers say, on text of one's choice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lm_eval_moecache.analysis.analyzed_model import AnalyzedModel
from lm_eval_moecache.cli.main import main
from lm_eval_moecache.profiling.logit_range import measure
from tests.conftest import Checkpoint


def test_it_is_the_mean_of_max_less_min_of_each_layers_logits(checkpoint: Checkpoint) -> None:
    analyzed = AnalyzedModel(str(checkpoint("olmoe")), ["some text " * 20], 60, window=16)
    found = measure(analyzed)
    assert all(not layer.router._forward_hooks for layer in analyzed.layers)
    with torch.no_grad():
        outputs = [
            analyzed.model(window[None], output_router_logits=True).router_logits
            for window in analyzed.windows
        ]
    for layer, value in enumerate(found):
        logits = torch.cat([logits[layer] for logits in outputs]).float()
        expected = (logits.max(-1).values - logits.min(-1).values).mean()
        assert value == pytest.approx(float(expected), rel=1e-4)


def test_the_command_prints_what_routing_logit_range_takes(
    tmp_path: Path, checkpoint: Checkpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "a.txt"
    text.write_text("some text " * 20)
    model = f"--pretrained={checkpoint('olmoe')}"
    out = tmp_path / "range.json"
    command = ["profile", "logit_range", model, f"--data={text}", f"--out={out}"]
    assert main(command) == 0
    printed = json.loads(capsys.readouterr().out)
    kept = json.loads(out.read_text())["logit_range"]
    assert printed == pytest.approx(kept, abs=1e-4)

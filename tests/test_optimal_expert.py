"""The search for the best expert of a rank: against trials by hand, and at the command line."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lm_eval_moecache.analysis.analyzed_model import AnalyzedModel
from lm_eval_moecache.analysis.optimal_expert import ForcedExpert, analyze
from lm_eval_moecache.cli.main import main
from lm_eval_moecache.testing.streams import make_event, make_geometry
from tests.conftest import Checkpoint


def test_a_forced_expert_takes_its_rank_unless_the_token_has_it_already() -> None:
    routing = ForcedExpert(make_geometry(num_experts=5, top_k=3), rank=2)
    logits = [[5, 4, 3, 2, 1], [1, 2, 3, 4, 5], [5, 1, 4, 2, 3]]
    event = make_event(routing.geometry, 0, 1, logits)
    assert routing.select(event, ()) is None
    routing.layer, routing.wanted = 1, np.asarray([0, 0, 4])
    selection = routing.select(event, ())
    assert selection is not None
    # Experts 0, 1, 2 have 0 first; 4, 3, 2 get 0 in the place of 3; 0, 2, 4 have 4 last.
    assert selection.experts.tolist() == [[0, 1, 2], [4, 0, 2], [0, 2, 4]]


def test_one_tokens_search_is_the_least_loss_of_all_trials(checkpoint: Checkpoint) -> None:
    """With one token to predict, no other token's change is in its loss."""
    analyzed = AnalyzedModel(str(checkpoint("olmoe")), ["ab"], 2)
    analyzed.windows = [window[:2] for window in analyzed.windows[:1]]
    [window], rank = analyzed.windows, 2
    rows = analyze(analyzed, rank)
    plain = float(analyzed.losses(window)[0])
    for layer, row in enumerate(rows):
        losses = [loss for loss in tried_by_hand(analyzed, window, layer, rank)]
        assert row["perplexity"] == pytest.approx(math.exp(plain), rel=1e-4)
        assert row["oracle"] == pytest.approx(math.exp(min([*losses, plain])), rel=1e-4)
        assert row["agreement"] == float(plain <= min(losses))


def tried_by_hand(analyzed: AnalyzedModel, window: Any, layer: int, rank: int) -> list[float]:
    """The token's loss with each expert that it did not choose, by a hook on the router alone."""
    router, found = analyzed.layers[layer].router, []
    seen: list[Any] = []
    handle = router.register_forward_hook(lambda module, args, output: seen.append(output))
    analyzed.losses(window)
    handle.remove()
    logits, _, chosen = seen[0]
    order = logits[0].argsort(descending=True).tolist()
    for expert in range(analyzed.geometry.num_experts):
        if expert in chosen[0].tolist():
            continue

        def swap(module: Any, args: Any, output: Any, expert: int = expert) -> Any:
            scores, weights, experts = (part.clone() for part in output)
            place = experts[0].tolist().index(order[rank - 1])
            experts[0, place] = expert
            whole = torch.softmax(scores.float(), -1)
            own = whole.gather(-1, experts)
            if module.norm_topk_prob:
                own = own / own.sum(-1, keepdim=True)
            weights[0] = own[0].to(weights.dtype)
            return scores, weights, experts

        handle = router.register_forward_hook(swap)
        found.append(float(analyzed.losses(window)[0]))
        handle.remove()
    return found


def test_the_command_writes_table_and_pictures(
    checkpoint: Checkpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("One, two, three.")
    given = ["--pretrained", str(checkpoint("olmoe")), "--text", str(text), "--max_tokens", "6"]
    out = tmp_path / "out"
    assert main(["analyze", "optimal_expert", *given, "--out", str(out), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["layer"] for row in rows] == [0, 1, 2]
    assert all(0 <= row["agreement"] <= 1 for row in rows)
    names = {path.name for path in out.iterdir()}
    assert names == {f"optimal_expert.{end}" for end in ("json", "md", "svg", "png")}

"""`moecache plan`: what fits, by hand, and its figures as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lm_eval_moecache.analysis.plan import fit, stand_in
from lm_eval_moecache.cli.main import main
from lm_eval_moecache.records.emulation import load_real_model
from lm_eval_moecache.records.hardware import load_hardware
from tests.engine import traces


def test_what_fits_by_hand() -> None:
    model, card = load_real_model("Mixtral-8x7B"), load_hardware("rtx-4090")
    room = fit(model, card, 1000)
    # 2 bytes a weight of attention, router, output layer and embeddings; 8 KV heads of 128.
    attention = 2 * 4096 * 128 * (32 + 8)
    dense = 2 * (32 * (attention + 4096 * 8) + 2 * 32000 * 4096)
    kv_cache = 1000 * 32 * 2 * 8 * 128 * 2
    assert (room.dense, room.kv_cache) == (dense, kv_cache)
    assert room.experts == 24_000_000_000 - dense - kv_cache
    assert room.all_experts == 32 * 8 * 3 * 4096 * 14336 * 2


def test_a_model_that_fits_whole_takes_no_more_than_itself() -> None:
    room = fit(load_real_model("OLMoE-1B-7B"), load_hardware("a100-5GBps"), 4096)
    assert room.experts == room.all_experts and room.share == 1


def test_a_context_that_leaves_no_room_is_refused_with_its_bytes() -> None:
    with pytest.raises(ValueError, match=r"KV cache of 200000 tokens 26\.2") as error:
        fit(load_real_model("Mixtral-8x7B"), load_hardware("rtx-4090"), 200_000)
    assert "shorter --context" in str(error.value)


@pytest.mark.parametrize(
    ("name", "trace"),
    [("OLMoE-1B-7B", "olmoe-1b-7b"), ("Qwen3-30B-A3B", "qwen3-30b-a3b")],
)
def test_a_model_is_planned_by_its_own_routing_where_that_ships(name: str, trace: str) -> None:
    assert stand_in(load_real_model(name)).stem == trace


def test_its_json_agrees_with_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, _ = traces.record(tmp_path)
    command = ["plan", "OLMoE-1B-7B", "--hardware", "rtx-2080-ti", "--trace", str(path), "--json"]
    assert main(command) == 0
    found = json.loads(capsys.readouterr().out)
    rows = found["rows"]
    full = [row for row in rows if row["capacity_bytes"] == found["fit"]["experts"]]
    assert full and max(row["capacity_bytes"] for row in rows) == full[0]["capacity_bytes"]
    for row in rows:
        assert row["capacity_cycles"] == pytest.approx(
            row["capacity_bytes"] / (16 * 8 * 12_582_912), rel=1e-6
        )
        assert row["tok_per_s"] > 0 and row["bound"] in ("link", "compute", "launches")
    by_policy: dict[str, list[float]] = {}
    for row in rows:
        by_policy.setdefault(row["policy"], []).append(row["tok_per_s"])
    assert all(speed == sorted(speed) for name, speed in by_policy.items() if "belady" in name)


def test_an_unknown_model_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "Qwen3-30B"]) == 2
    assert "Did you mean 'Qwen3-30B-A3B'" in capsys.readouterr().err

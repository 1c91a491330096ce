"""`moecache plan`: what fits, by hand, and its figures as JSON."""

from __future__ import annotations

from pathlib import Path

import pytest

from lm_eval_moecache.cli.plan import fit, stand_in, two_digits
from lm_eval_moecache.records.emulation import load_real_model
from lm_eval_moecache.records.hardware import load_hardware
from tests.conftest import Moecache


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
    with pytest.raises(ValueError, match=r"KV cache of 200000 tokens 26\.2.*shorter --context"):
        fit(model, card, 200_000)
    small = fit(load_real_model("OLMoE-1B-7B"), load_hardware("a100-5GBps"), 4096)
    assert small.experts == small.all_experts and small.share == 1


@pytest.mark.parametrize(
    ("name", "trace"), [("OLMoE-1B-7B", "olmoe-1b-7b"), ("Qwen3-30B-A3B", "qwen3-30b-a3b")]
)
def test_a_model_is_planned_by_its_own_routing_where_that_ships(name: str, trace: str) -> None:
    assert stand_in(load_real_model(name)).stem == trace


def test_its_json_agrees_with_itself_and_a_drive_is_slower_than_the_host(
    trace: Path, moecache: Moecache
) -> None:
    command = ["OLMoE-1B-7B", "--hardware", "rtx-2080-ti", "--trace", str(trace)]
    ram, disk = moecache.json("plan", *command), moecache.json("plan", *command, "--store", "disk")
    rows = ram["rows"]
    full = [row for row in rows if row["capacity_bytes"] == ram["fit"]["experts"]]
    assert full and max(row["capacity_bytes"] for row in rows) == full[0]["capacity_bytes"]
    for row in rows:
        cycles = row["capacity_bytes"] / (16 * 8 * 12_582_912)
        assert row["capacity_cycles"] == pytest.approx(cycles, rel=1e-6)
        assert row["tok_per_s"] > 0 and row["bound"] in ("link", "compute", "launches", "host")
    bound = [row["tok_per_s"] for row in rows if row["policy"] == "bound"]
    assert len(bound) > 1 and bound == sorted(bound)
    assert ram["ttft_ms"] > ram["ttft_loads_ms"] > 0
    # A drive has no host compute.
    assert disk["link_bytes_per_s"] == 5.6e9 and disk["ttft_ms"] > ram["ttft_ms"]
    ram_policies, disk_policies = ({row["policy"] for row in plan["rows"]} for plan in (ram, disk))
    assert ram_policies - disk_policies == {"host"}


def test_what_fits_needs_no_cache_and_is_as_fast_as_its_reads_and_launches(
    moecache: Moecache,
) -> None:
    context = ["--context", "1024", "--hardware", "rtx-4090-24gb"]
    plan = moecache.json("plan", "OLMoE-1B-7B", "--precision", "int4", *context)
    assert plan["fit"]["whole"] and "no cache needed" in plan["verdict"]
    (row,) = plan["rows"]
    card, model = load_hardware("rtx-4090-24gb"), load_real_model("OLMoE-1B-7B")
    experts = 16 * 8 * round(3 * 2048 * 1024 * 4.5 / 8)
    dense = 16 * (4 * 2048**2 + 2048 * 64) * 4.5 / 8 + 2 * 50304 * 2048
    reads = experts + dense + model.kv_bytes(1024)
    seconds = reads / card.memory_bytes_per_s + 16 * 45 * card.kernel_overhead_s
    assert row["tok_per_s"] == pytest.approx(1 / seconds, rel=1e-4)


def test_a_longer_context_takes_memory_and_time(moecache: Moecache) -> None:
    command = ["Mixtral-8x7B", "--precision", "int4", "--hardware", "rtx-5090", "--context"]
    short, long = (moecache.json("plan", *command, tokens) for tokens in ("1024", "16384"))
    assert long["fit"]["kv_cache"] - short["fit"]["kv_cache"] == 15360 * 131072
    assert long["rows"][-1]["tok_per_s"] < short["rows"][-1]["tok_per_s"]


def test_its_page_fits_a_terminal_and_explains_its_words(
    trace: Path, moecache: Moecache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    words = ("OLMoE-1B-7B", "--hardware", "rtx-2080-ti", "--trace", trace)
    lines = moecache("plan", *words).splitlines()
    assert max(map(len, lines)) <= 80
    assert all(any(line.startswith(word) for line in lines) for word in ("cycles", "prefetch"))


@pytest.mark.parametrize(
    ("number", "shown"),
    [(0, "0"), (0.0314, "0.031"), (1.04, "1.0"), (9.96, "10"), (117.2, "120"), (3455, "3500")],
)
def test_figures_have_two_significant_digits(number: float, shown: str) -> None:
    assert two_digits(number) == shown

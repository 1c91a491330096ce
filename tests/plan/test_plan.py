"""`moecache plan`: what fits, by hand, and its figures as JSON."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from lm_eval_moecache.emulate.models import EMULATED_DIR, load_real_model
from lm_eval_moecache.engine.stand_in import stand_in
from lm_eval_moecache.engine.virtual.costs import attention_s
from lm_eval_moecache.records.event import DECODE
from lm_eval_moecache.records.hardware import Hardware, load_hardware
from lm_eval_moecache.records.real_model import RealModel
from lm_eval_moecache.trace.importers import load_trace
from moecache_plan import ideal
from moecache_plan.ideal import first_token_s, fit
from moecache_plan.table import two_digits
from tests.conftest import Moecache


def test_what_fits_by_hand() -> None:
    model, card = load_real_model("Mixtral-8x7B"), load_hardware("rtx-4090")
    room = fit(model, card, 1000)
    # 2 bytes a weight of attention, router, output layer and embeddings; 8 KV heads of 128.
    attention = 2 * 4096 * 128 * (32 + 8)
    dense = 2 * (32 * (attention + 4096 * 8) + 2 * 32000 * 4096)
    kv_cache = 1000 * 32 * 2 * 8 * 128 * 2
    assert (room.dense, room.kv_cache) == (dense, kv_cache)
    # A GB is for the context of the card and buffers.
    assert room.experts == 24_000_000_000 - dense - kv_cache - 1_000_000_000
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


SHIPPED = Path(__file__).resolve().parents[2] / "traces"
QWEN = SHIPPED / "qwen3-30b-a3b.parquet"


def planned(
    monkeypatch: pytest.MonkeyPatch, model: RealModel, card: Hardware, share: float, policy: str
) -> dict[str, Any]:
    """Return the one row of this share of experts, at a context of one token."""
    monkeypatch.setattr(ideal, "POLICIES", {policy: ideal.POLICIES[policy]})
    monkeypatch.setattr(ideal, "SHARES", ())
    room = fit(model, replace(card, memory_bytes=1e12), 1)
    room = replace(room, experts=int(share * room.all_experts))
    (row,) = ideal.speeds(model, card, room, load_trace(str(QWEN)), 1)
    return row


@pytest.mark.parametrize("policy", ["lru", "host"])
def test_it_agrees_with_replay(
    policy: str, tmp_path: Path, moecache: Moecache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trace of Qwen3 has six of eight experts a token: as a model of six, both are one."""
    config = yaml.safe_load((EMULATED_DIR / "Qwen3-30B-A3B.yaml").read_text())
    config |= {"num_experts_per_tok": 6, "expert_bits": 4.87}
    six = tmp_path / "six.yaml"
    six.write_text(yaml.safe_dump(config))
    model, card = load_real_model(str(six)), load_hardware("rtx-3060-12gb")
    row = planned(monkeypatch, model, card, 0.25, policy)
    miss = ["--miss", "host", "--miss.rule=balanced"] if policy == "host" else []
    options = ["--hardware", card.name, "--capacity", "25%", "--eviction", "lru", *miss]
    options += ["--emulate", six, "--bound", "false"]
    (run,) = moecache.json("replay", QWEN, *options)["runs"]
    attended_s = model.num_layers * attention_s(model, card, DECODE, np.zeros(1, int))
    seconds = 1 / row["tok_per_s"] - attended_s
    assert row["decode_miss_rate"] == run["metrics"]["decode_miss_rate"]
    assert seconds == pytest.approx(run["metrics"]["tpot_ms"]["mean"] / 1000, rel=1e-6)
    notes = ideal.routing_notes(load_real_model("Qwen3-30B-A3B"), load_trace(str(QWEN)))
    assert "recorded with 6 of the model's 8 experts a token" in notes


def test_a_stand_in_is_matched_by_cycles_and_named(
    moecache: Moecache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """5% of DeepSeek-V3 are 1.6 cycles of its 32 a layer, and 7.5% of the trace's 21.3."""
    model = load_real_model("DeepSeek-V3")
    assert stand_in(model) == QWEN
    row = planned(monkeypatch, model, load_hardware("rtx-5090"), 0.05, "lru")
    assert row["capacity_cycles"] == pytest.approx(1.6, rel=1e-3)
    options = ["--capacity", "7.5%", "--eviction", "lru", "--bound", "false"]
    (run,) = moecache.json("replay", QWEN, *options)["runs"]
    assert row["decode_miss_rate"] == pytest.approx(run["metrics"]["decode_miss_rate"], abs=0.005)
    assert 0.3 < row["decode_miss_rate"] < 0.9
    assert "It is a stand-in: 48 layers x 128 experts, 6 a token, for 58 x 256, 8" in (
        ideal.routing_notes(model, load_trace(str(QWEN)))
    )


def test_cycles_carry_over_from_one_model_to_another_and_shares_do_not(moecache: Moecache) -> None:
    """Misses of OLMoE (8 cycles in a layer) and of Qwen3 (21.3) at equal cycles, and at a share."""

    def missed(trace: str, *shares: float) -> list[float]:
        capacities, alone = ",".join(f"{share}%" for share in shares), ["--bound", "false"]
        runs = moecache.json(
            "replay", SHIPPED / f"{trace}.parquet", "--capacity", capacities, *alone
        )
        return [run["metrics"]["decode_miss_rate"] for run in runs["runs"]]

    two, four = missed("olmoe-1b-7b", 25, 50)
    same_two, same_four, same_share = missed("qwen3-30b-a3b", 9.375, 18.75, 25)
    assert max(two / same_two, same_two / two) < 1.35
    assert max(four / same_four, same_four / four) < 1.35
    assert two / same_share > 2


def test_a_regime_that_the_stand_in_lacks_is_marked(
    moecache: Moecache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ideal, "POLICIES", {"lru": ideal.POLICIES["lru"]})
    command = ["Qwen3-Next-80B-A3B", "--hardware", "rtx-5090", "--precision", "q4_k_m"]
    report = moecache.json("plan", *command)
    by_capacity = {row["capacity"]: row["in_regime"] for row in report["rows"]}
    assert by_capacity["25%"] and not by_capacity["50%"]  # 26 of the trace's 21.3 cycles
    assert "cannot show how many of them miss" in report["verdict"]
    page = moecache("plan", *command, "--all").splitlines()
    assert any(line.split()[:4] == ["50%", "24", "26", "?"] for line in page)
    assert any(line.startswith("?  ") for line in page)


@pytest.mark.parametrize(("prompt", "share"), [(1, 0.125), (100, 0.5), (4096, 1.0)])
def test_the_first_token_by_hand(prompt: int, share: float) -> None:
    """OLMoE: 16 layers of 64 experts, eight a token; launches of 45 kernels in each layer."""
    model = load_real_model("OLMoE-1B-7B")
    card = replace(load_hardware("rtx-2080-ti"), memory_bytes=8e9, link_efficiency=1.0)
    room = fit(model, card, prompt)
    expert, vocabulary = 3 * 2048 * 1024, 50304 * 2048
    layer = 4 * 2048**2 + 2048 * 64
    flops = 2 * prompt * 16 * (layer + 8 * expert) + 2 * vocabulary
    # Token i attends to i tokens: 2 x 2048 multiply-adds with each of them in every layer.
    flops += 2 * 16 * 2 * 2048 * prompt**2 / 2
    reads = 2 * (16 * (layer + 64 * share * expert) + vocabulary)
    launches = 16 * 45 * card.kernel_overhead_s
    compute_s, link_s = first_token_s(model, card, room, prompt, share)
    expected = max(flops / card.peak_flops, reads / card.memory_bytes_per_s) + launches
    assert compute_s == pytest.approx(expected, rel=1e-4)
    loads = 16 * 64 * share
    moved_s = loads * (2 * expert / card.link_bytes_per_s + card.link_latency_s)
    assert link_s == pytest.approx(moved_s, rel=1e-6)
    whole = fit(model, load_hardware("h100"), prompt)
    assert first_token_s(model, card, whole, prompt, share) == (compute_s, 0.0)


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
    short = moecache("plan", *words[:3]).splitlines()
    assert len(short) <= 15 and max(map(len, short)) <= 80
    assert not any("ideal" in line for line in short)
    lines = moecache("plan", *words).splitlines()  # a trace is for the ideal clock
    assert lines[: len(short) - 1] == short[:-1]
    whole = moecache("plan", *words[:3], "--all").splitlines()
    assert whole[: len(short) - 1] == short[:-1] and len(whole) > 30
    assert max(map(len, lines)) <= 80
    assert all(
        any(line.startswith(word) for line in lines) for word in ("cycles", "prefetch", "-  ")
    )


@pytest.mark.parametrize(
    ("number", "shown"),
    [(0, "0"), (0.0314, "0.031"), (1.04, "1.0"), (9.96, "10"), (117.2, "120"), (3455, "3500")],
)
def test_figures_have_two_significant_digits(number: float, shown: str) -> None:
    assert two_digits(number) == shown


def test_a_processors_first_token_is_told_where_its_cores_are_known(moecache: Moecache) -> None:
    asked = ("plan", "gpt-oss-20b", "--hardware", "none", "--ram", "64GB")
    assert "not modelled" in moecache(*asked)
    page = moecache(*asked, "--cores", "16")
    assert "not modelled" not in page and re.search(r"llama\.cpp +cpu .* s\n", page)


def test_a_chips_memory_that_nobody_names_is_told_as_assumed(moecache: Moecache) -> None:
    asked = ("plan", "gpt-oss-20b", "--hardware", "Radeon 890M 32GB")
    page = moecache(*asked)
    assert "assumed: memory 120 GB/s" in page and "For a closer forecast: --host_memory" in page
    assert "assumed" not in moecache(*asked, "--host_memory", "2x5600")
    assert "assumed" not in moecache("plan", "gpt-oss-20b", "--hardware", "Jetson Thor")

"""`moecache plan`: how memory is divided, by hand, its page, and what a machine runs."""

from __future__ import annotations

import re

import pytest

from lm_eval_moecache.emulate.models import emulated_names, load_real_model
from lm_eval_moecache.records.hardware import load_hardware
from moecache_plan.advice import two_digits
from moecache_plan.machines import as_machine, with_overrides
from moecache_plan.plan import memory_of
from tests.conftest import Moecache


def test_memory_is_divided_as_by_hand() -> None:
    model, card = load_real_model("Mixtral-8x7B"), as_machine(load_hardware("rtx-4090"))
    room = memory_of(model, card, 1000)
    # 2 bytes a weight of attention, router, output layer and embeddings; 8 KV heads of 128.
    attention = 2 * 4096 * 128 * (32 + 8)
    dense = 2 * (32 * (attention + 4096 * 8) + 2 * 32000 * 4096)
    kv_cache = 1000 * 32 * 2 * 8 * 128 * 2
    assert (room["dense"], room["kv_cache"]) == (dense, kv_cache)
    # A GB is for the context of the card and buffers.
    assert room["experts"] == 24_000_000_000 - dense - kv_cache - 1_000_000_000
    assert room["all_experts"] == 32 * 8 * 3 * 4096 * 14336 * 2
    with pytest.raises(ValueError, match=r"KV cache of 200000 tokens 26\.2.*shorter --context"):
        memory_of(model, card, 200_000)
    large = as_machine(load_hardware("a100-5GBps"))
    assert memory_of(load_real_model("OLMoE-1B-7B"), large, 4096)["share"] == 1


@pytest.mark.parametrize(
    ("number", "shown"),
    [(0, "0"), (0.0314, "0.031"), (1.04, "1.0"), (9.96, "10"), (117.2, "120"), (3455, "3500")],
)
def test_figures_have_two_significant_digits(number: float, shown: str) -> None:
    assert two_digits(number) == shown


def test_a_processors_first_token_is_told_where_its_cores_are_known(
    moecache: Moecache, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "not modelled" in moecache("plan", "gpt-oss-20b", "--hardware", "none", "--ram", "64GB")
    box = as_machine(load_hardware("none"), cores=16, about="this machine (a box)")
    monkeypatch.setattr(
        "moecache_plan.detect.detect_machine", lambda: with_overrides(box, ram=64e9)
    )
    monkeypatch.setattr("moecache_plan.detect.memory_rate", lambda cores: 40e9)
    page = moecache("plan", "gpt-oss-20b")
    said = "gpt-oss-20b on this machine (a box, memory measured: copies at 40 GB/s)."
    assert page.startswith(said)
    assert "not modelled" not in page and re.search(r"llama\.cpp +cpu .* s\n", page)


def test_what_a_cache_takes_from_the_page_cache_is_said_to_be_not_modelled(
    moecache: Moecache,
) -> None:
    asked = ("plan", "GLM-5", "--hardware", "rtx-5090", "--ram", "64GB", "--runtime")
    said = "not modelled: what a large cache takes"
    assert said in moecache(*asked, "colibri")
    assert said not in moecache("plan", "gpt-oss-20b", "--hardware", "rtx-5090")


def test_a_chips_memory_that_nobody_names_is_told_as_assumed(moecache: Moecache) -> None:
    asked = ("plan", "gpt-oss-20b", "--hardware", "Radeon 890M 32GB")
    page = moecache(*asked)
    assert "assumed: memory 120 GB/s" in page and "For a closer forecast: --host_memory" in page
    assert "assumed" not in moecache(*asked, "--host_memory", "2x5600")
    assert "assumed" not in moecache("plan", "gpt-oss-20b", "--hardware", "Jetson Thor")


def test_without_a_model_it_lists_those_that_the_machine_runs(
    moecache: Moecache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    command = ("--hardware", "rtx-3060-12gb", "--ram", "64GB")
    found = moecache.json("plan", *command)
    rows = found["models"]
    assert len(rows) + len(found["left_out"]) == len(emulated_names()) and len(rows) > 20
    sizes = [row["weights"] for row in rows]
    assert sizes == sorted(sizes, reverse=True) and "Kimi-K2" in found["left_out"]
    # Each as `plan MODEL` has it.
    one = next(row for row in rows if row["model"] == "Qwen3-30B-A3B")
    alone = moecache.json("plan", "Qwen3-30B-A3B", *command)
    assert one["precision"] == alone["runtimes_precision"] == "q4_k_m"
    assert alone["first"].startswith(f"{one['runtime']} {one['flags']}: ")
    page = moecache("plan", *command).splitlines()
    assert page[0].startswith("What rtx-3060-12gb (12 GB) runs") and max(map(len, page)) <= 80
    assert "needs a MODEL" in moecache("plan", *command, "--placement", "cpu", code=2)

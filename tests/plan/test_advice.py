"""What is advised: the drive where RAM is small, measurements, placements and flags."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from lm_eval_moecache.emulate.models import load_real_model
from lm_eval_moecache.emulate.stored import load_stored
from lm_eval_moecache.records.real_model import RealModel
from moecache_plan.advice import Setup, advise
from moecache_plan.detect import parse_machine
from moecache_plan.forecast import USUAL_CORES
from moecache_plan.machines import Machine
from moecache_plan.mechanisms import mechanisms
from tests.conftest import Moecache

MODEL = load_real_model("gpt-oss-120b")
SMALL = replace(load_real_model("Qwen3-30B-A3B"), stored=load_stored("q4_k_m"))
CARD = "rtx-4090-24gb"


def machine(name: str = CARD, **said: str) -> Machine:
    given = [said.get(key) for key in ("ram", "host_memory", "disk")]
    return parse_machine(name, ram=given[0], host_memory=given[1], disk=given[2])


def advised(model: RealModel = MODEL, box: Machine | str = CARD, **more: Any) -> dict[str, Any]:
    box = machine(box) if isinstance(box, str) else box
    return advise(Setup(model=model, machine=box, context=4096, prompt=512), **more)


def rows(measured: str | None = None, **said: str) -> dict[str, dict[str, Any]]:
    advice = advised(box=machine(**said), measured=measured)
    return {row["runtime"]: row for row in advice["runtimes"]}


def speed(name: str = "llama.cpp", **said: str) -> float:
    return float(rows(**said)[name]["tok_per_s"])


def test_what_is_said_of_a_machine_counts() -> None:
    assert speed(host_memory="2x8000") > speed() > speed(host_memory="40GB/s")
    slow, fast = (speed(ram="32GB", disk=disk) for disk in ("1GB/s", "8GB/s"))
    assert slow < fast < speed()
    assert rows(ram="32GB")["llama.cpp"]["needs_drive"]
    assert "--no-mmap" not in str(rows(ram="32GB")["llama.cpp"]["flags"])
    assert not rows(ram="64GB")["llama.cpp"]["needs_drive"]
    assert "GB of RAM, and there are 32" in rows(ram="32GB")["freetoken"]["why"]


def test_the_placement_is_the_best_that_fits_and_its_flags_say_so() -> None:
    row = rows()["llama.cpp"]
    assert row["flags"] == f"-ngl 99 --n-cpu-moe {row['placement'][12:]} --no-mmap"
    assert advised()["first"].startswith(f"llama.cpp {row['flags']}: ")
    three = advised(box=f"3x {CARD}")["first"]
    assert three.startswith("llama.cpp -ngl 99: ") and three.endswith("all of it fits.")


def test_a_measurement_is_met_and_moves_the_others() -> None:
    """A machine of half the speed halves every row that waits for memory alone."""
    placement = rows()["llama.cpp"]["placement"]
    half = speed() / 2
    said = f"llama.cpp {placement} {half:.4f}"
    assert speed(measured=said) == pytest.approx(half, rel=1e-4)
    ratio = speed("freetoken", measured=said) / speed("freetoken")
    assert ratio == pytest.approx(0.5, rel=1e-4)
    row = rows(measured=said)["llama.cpp"]
    plain = rows()["llama.cpp"]
    width = [each["high"] / each["low"] for each in (row, plain)]
    assert width[0] < width[1]
    told = [advised(measured=text)["measured"] for text in (said, "llama.cpp 9")]
    assert told[0] == f"measured llama.cpp {placement}: {half:g} tok/s"
    assert told[1] == f"measured llama.cpp {placement} (assumed): 9 tok/s"
    # Where the drive is read, the difference is the drive's: what needs none stays as it was.
    slow = speed(ram="32GB") / 2
    reads = f"llama.cpp {slow:.4f}"
    assert speed(ram="32GB", measured=reads) == pytest.approx(slow, rel=1e-4)


def test_unified_memory_reads_the_drive_only_beyond_all_of_it() -> None:
    found = advised(load_real_model("Qwen3-30B-A3B"), "m4-pro-24gb")["runtimes"]
    names = {row["runtime"]: row for row in found}
    assert names["mlx"]["why"]
    assert names["llama.cpp"]["needs_drive"]  # bf16 weights
    assert "slotstream" not in names  # runs another model only


def test_plan_prints_what_to_run_first(moecache: Moecache) -> None:
    words = ("gpt-oss-120b", "--hardware", "2x rtx-3090", "--ram", "64GB")
    lines = moecache("plan", *words).splitlines()
    # The card first: one of 2020 is taken to come with DDR4.
    assert lines[0] == "gpt-oss-120b on 2x rtx-3090 (48 GB); assumed: host memory 51.2 GB/s."
    assert lines[1].startswith("llama.cpp -ngl 99 --n-cpu-moe ") and len(lines) <= 15
    assert any(line.startswith("Memory, GB: 48 = ") and "buffers 2.0" in line for line in lines)
    assert lines[-1] == "For a closer forecast: --host_memory, --measured."
    report = moecache.json("plan", *words)
    assert report["hardware"] == "2x rtx-3090" and report["memory"]["memory"] == 48e9
    assert report["memory"]["buffers"] == 2e9
    assert report["runtimes"][0]["low"] < report["runtimes"][0]["tok_per_s"]
    assert "ram='many'" in moecache("plan", *words[:3], "--ram", "many", code=2)


@pytest.mark.parametrize("model", ["GLM-5", "Kimi-K2", "Mixtral-8x7B", "gpt-oss-120b"])
def test_the_answer_is_fifteen_lines_that_fit_a_terminal(
    model: str, moecache: Moecache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for card in ("rtx-3060", "none"):
        lines = moecache("plan", model, "--hardware", card, "--ram", "128GB").splitlines()
        assert len(lines) <= 15 and max(map(len, lines)) <= 80, lines


def test_a_mac_may_give_its_gpu_more_memory_and_whole_layers_are_not_advised() -> None:
    assert "iogpu.wired_limit_mb=" in advised(SMALL, "m4-pro-24gb")["first"]
    assert "iogpu" not in advised(SMALL, "m2-16gb")["first"]
    card = rows()
    assert "use fewer bits" in card["vllm"]["why"]
    placed = card["ktransformers"]
    assert placed["placement"].startswith("resident_experts=")
    assert placed["placement"][17:] in placed["flags"]


def test_a_processor_alone_reads_all_of_a_token_from_its_ram(moecache: Moecache) -> None:
    words = ("qwen3-30b-a3b", "--precision", "q4_k_m", "--hardware", "cpu")
    report = moecache.json("plan", *words, "--host_memory", "2x2666", "--ram", "64GB")
    assert {row["placement"] for row in report["runtimes"]} == {"cpu"}
    assert report["first"].startswith("llama.cpp -ngl 0 --no-mmap: ") and not report["assumed"]
    model, cost = SMALL, mechanisms().constants
    layers = model.num_layers
    nbytes = layers * (model.layer_dense_bytes + 8 * model.expert_bytes) + model.kv_bytes(4096)
    seconds = nbytes / (2 * 2666 * 8e6 * cost["host_share"]) + 1e-6 * layers * cost["host_layer_us"]
    seconds += 1e-15 * model.attention_flops(4096) * cost["host_attention_us"] / USUAL_CORES
    assert report["runtimes"][0]["tok_per_s"] == pytest.approx(1 / seconds)
    small = moecache.json("plan", *words, "--host_memory", "2x2666", "--ram", "16GB")
    assert small["runtimes"][0]["needs_drive"] and "--no-mmap" not in small["first"]
    # bf16 does not fit in 64 GB with the system.
    usual = moecache.json("plan", "qwen3-30b-a3b", "--hardware", "none")
    assert usual["runtimes_precision"] == "q4_k_m"


@pytest.mark.parametrize(
    ("placement", "runtimes", "flags"),
    [
        (
            "n-cpu-moe=30",
            (),
            {
                "llama.cpp": "-ngl 99 --n-cpu-moe 30 --no-mmap",
                "ik_llama.cpp": "-ngl 99 --n-cpu-moe 30 -fmoe -rtr",
            },
        ),
        # All of it is more than the RAM, and stays a mapped file.
        ("host_layers=all", ("llama.cpp",), {"llama.cpp": "-ngl 99 --n-cpu-moe 36"}),
        (
            "-ngl 10",
            ("llama.cpp", "ollama", "vllm"),
            {"llama.cpp": "-ngl 10 --no-mmap", "ollama": "num_gpu 10"},
        ),
    ],
)
def test_flags_are_those_of_the_placement_that_is_asked_for(
    placement: str, runtimes: tuple[str, ...], flags: dict[str, str]
) -> None:
    found = advised(placement=placement, runtimes=runtimes)["runtimes"]
    assert {row["runtime"]: row["flags"] for row in found} == flags
    assert all(row["tok_per_s"] < speed() for row in found)  # fewer layers than fit


def test_programs_that_divide_layers_have_the_flag_for_it_on_several_cards() -> None:
    found = advised(SMALL, "2x rtx-3090", runtimes=("llama.cpp", "vllm"))["runtimes"]
    assert [row["flags"] for row in found] == ["-ngl 99", "--tensor-parallel-size 2"]


def test_under_pytorch_four_bits_are_not_fast() -> None:
    """Its launches take 15 ms of a token: some 46 tok/s, where graphs would give 150."""
    model = replace(SMALL, stored=load_stored("int4"))
    (row,) = advised(model, runtimes=("accelerate",))["runtimes"]
    assert row["placement"] == "resident" and row["tok_per_s"] == pytest.approx(46, rel=0.05)


@pytest.mark.parametrize(
    ("chip", "names"),
    [
        ("M1 Max 64GB", {"llama.cpp", "mlx", "ds4", "flash-moe"}),
        ("Strix Halo", {"llama.cpp", "ollama"}),
        ("Jetson AGX Orin 64GB", {"llama.cpp", "ollama"}),
        ("iPhone 16 Pro", {"bigmoeonedge"}),
    ],
)
def test_programs_of_macs_are_offered_on_macs_alone(chip: str, names: set[str]) -> None:
    found = {row["runtime"] for row in advised(SMALL, chip)["runtimes"]}
    own = {"mlx", "ollama", "bigmoeonedge"}
    assert found <= names and own & found == own & names


@pytest.mark.parametrize(
    ("card", "runtime", "kernels"),
    [
        ("RX 6900 XT", "imp", "(ROCm), but on CUDA of compute capability 9.0"),
        ("RTX 4090", "mlx", "(CUDA), but on Metal"),
        ("GTX 1050 Ti", "vllm", "compute capability 7.5 and more"),
        ("RX 6900 XT", "vllm", "ROCm of some cards"),
    ],
)
def test_a_program_without_kernels_for_a_card_is_refused_and_not_offered(
    card: str, runtime: str, kernels: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(kernels)):
        advised(SMALL, card, runtimes=(runtime,))
    assert runtime not in {row["runtime"] for row in advised(SMALL, card)["runtimes"]}
    assert "imp" in {row["runtime"] for row in advised(SMALL, "RTX 5090")["runtimes"]}


def test_a_card_has_the_memory_that_is_soldered_on_it_and_no_less_than_it_is_sold_with() -> None:
    assert machine("MI50 32GB").memory_bytes == 32e9 == 2 * machine("MI50").memory_bytes
    with pytest.raises(ValueError, match="'RTX 3090 12GB' is not known"):
        machine("RTX 3090 12GB")


def test_a_machine_of_many_channels_has_the_ram_of_as_many_modules() -> None:
    assert machine("none", host_memory="12x6400").ram == 384e9
    assert machine("none", host_memory="12x6400", ram="64GB").ram == 64e9
    assert machine("none", host_memory="2x5600").ram == 64e9

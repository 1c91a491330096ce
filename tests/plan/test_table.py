"""What `plan` says of runtimes: the drive where RAM is small, measurements, and flags."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lm_eval_moecache.emulate.models import load_real_model
from lm_eval_moecache.emulate.stored import load_stored
from lm_eval_moecache.records.hardware import load_hardware
from lm_eval_moecache.records.runtimes import load_runtime, mechanisms
from moecache_plan.machines import known, machine, of_its_time, sized
from moecache_plan.table import advise
from tests.conftest import Moecache

pytestmark = pytest.mark.usefixtures("replay_little")
MODEL = load_real_model("gpt-oss-120b")
CARD = load_hardware("rtx-4090-24gb")


def rows(measured: str | None = None, **options: str) -> dict[str, dict[str, object]]:
    advice = advise(MODEL, CARD, known(**options), 4096, 512, measured)
    return {row["runtime"]: row for row in advice["runtimes"]}


def speed(name: str = "llama.cpp", **options: str) -> float:
    found = rows(**options)[name]["tok_per_s"]
    assert isinstance(found, float)
    return found


def test_what_is_said_of_a_machine_counts() -> None:
    assert speed(host_memory="2x8000") > speed() > speed(host_memory="40GB/s")
    slow, fast = (speed(ram="32GB", disk=disk) for disk in ("1GB/s", "8GB/s"))
    assert slow < fast < speed()
    assert rows(ram="32GB")["llama.cpp"]["needs_drive"]
    assert "--no-mmap" not in str(rows(ram="32GB")["llama.cpp"]["flags"])
    assert not rows(ram="64GB")["llama.cpp"]["needs_drive"]
    why = rows(ram="32GB")["freetoken"]["why"]
    assert isinstance(why, str) and "GB of RAM, and there are 32" in why


def test_the_placement_is_the_best_that_fits_and_its_flags_say_so() -> None:
    row = rows()["llama.cpp"]
    assert row["flags"] == f"-ngl 99 --n-cpu-moe {str(row['placement'])[12:]} --no-mmap"
    text = advise(MODEL, CARD, known(), 4096, 512)["first"]
    assert text.startswith(f"llama.cpp {row['flags']}: ")
    two = advise(MODEL, CARD, known(cards=3), 4096, 512)["first"]
    assert two.startswith("llama.cpp -ngl 99: ") and two.endswith("all of it fits.")


def test_a_measurement_is_met_and_moves_the_others() -> None:
    """A machine of half the speed halves every row that waits for memory alone."""
    placement = str(rows()["llama.cpp"]["placement"])
    half = speed() / 2
    said = f"llama.cpp {placement} {half:.4f}"
    assert speed(measured=said) == pytest.approx(half, rel=1e-4)
    ratio = speed("freetoken", measured=said) / speed("freetoken")
    assert ratio == pytest.approx(0.5, rel=1e-4)
    row = rows(measured=said)["llama.cpp"]
    plain = rows()["llama.cpp"]
    width = [float(r["high"]) / float(r["low"]) for r in (row, plain)]  # type: ignore[arg-type]
    assert width[0] < width[1]
    told = [
        advise(MODEL, CARD, known(), 4096, 512, text)["measured"] for text in (said, "llama.cpp 9")
    ]
    assert told[0] == f"measured llama.cpp {placement}: {half:g} tok/s"
    assert told[1] == f"measured llama.cpp {placement} (assumed): 9 tok/s"
    # Where the drive is read, the difference is the drive's: what needs none stays as it was.
    slow = speed(ram="32GB") / 2
    reads = f"llama.cpp {slow:.4f}"
    assert speed(ram="32GB", measured=reads) == pytest.approx(slow, rel=1e-4)


@pytest.mark.parametrize("text", ["fast", "llama.cpp", "llama.cpp host_layers=x 20"])
def test_a_measurement_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="measured="):
        rows(measured=text)


def test_unified_memory_reads_the_drive_only_beyond_all_of_it() -> None:
    model, mac = load_real_model("Qwen3-30B-A3B"), load_hardware("m4-pro-24gb")
    found = advise(model, mac, known(), 4096, 512)["runtimes"]
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
    assert lines[-1] == "For a closer forecast: --host_memory, --measured. More: --all."
    report = moecache.json("plan", *words)
    assert report["hardware"] == "2x rtx-3090" and report["fit"]["memory"] == 48e9
    assert report["fit"]["buffers"] == report["memory"]["buffers"] == 2e9
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
    model = replace(load_real_model("Qwen3-30B-A3B"), stored=load_stored("q4_k_m"))
    mac = advise(model, load_hardware("m4-pro-24gb"), known(), 4096, 512)
    assert "iogpu.wired_limit_mb=" in mac["first"]
    assert "iogpu" not in advise(model, load_hardware("m2-16gb"), known(), 4096, 512)["first"]
    card = rows()
    assert "use fewer bits" in str(card["vllm"]["why"])
    assert str(card["ktransformers"]["placement"]).startswith("resident_experts=")
    assert str(card["ktransformers"]["placement"])[17:] in str(card["ktransformers"]["flags"])


def test_a_processor_alone_reads_all_of_a_token_from_its_ram(moecache: Moecache) -> None:
    words = ("qwen3-30b-a3b", "--precision", "q4_k_m", "--hardware", "cpu")
    report = moecache.json("plan", *words, "--host_memory", "2x2666", "--ram", "64GB")
    assert {row["placement"] for row in report["runtimes"]} == {"cpu"}
    assert report["first"].startswith("llama.cpp -ngl 0 --no-mmap: ") and not report["assumed"]
    model = replace(load_real_model("qwen3-30b-a3b"), stored=load_stored("q4_k_m"))
    layers, cost = model.num_layers, mechanisms().constants
    nbytes = layers * (model.layer_dense_bytes + 8 * model.expert_bytes) + model.kv_bytes(4096)
    seconds = nbytes / (2 * 2666 * 8e6 * cost["host_share"]) + 1e-6 * layers * cost["host_layer_us"]
    seconds += 1e-15 * model.attention_flops(4096) * cost["host_attention_us"]
    assert report["runtimes"][0]["tok_per_s"] == pytest.approx(1 / seconds)
    small = moecache.json("plan", *words, "--host_memory", "2x2666", "--ram", "16GB")
    assert small["runtimes"][0]["needs_drive"] and "--no-mmap" not in small["first"]
    # bf16 does not fit in 64 GB with the system.
    usual = moecache.json("plan", "qwen3-30b-a3b", "--hardware", "none")
    assert usual["runtimes_precision"] == "q4_k_m"


@pytest.mark.parametrize(
    ("name", "rate"),
    [("rtx-3060-12gb", 51.2), ("RTX 2080", 51.2), ("RTX 3070", 51.2), ("rtx-4070", 89.6)],
)
def test_a_cards_generation_decides_which_memory_is_assumed_with_it(name: str, rate: float) -> None:
    found = machine(of_its_time(load_hardware(name)), load_runtime("llama.cpp"))
    assert found.host_bytes_per_s == pytest.approx(rate * 1e9)
    assert f"host memory {rate} GB/s" in found.assumed


def test_the_ram_that_is_said_of_a_unified_machine_is_its_cards() -> None:
    """Of an M3 Max with 36 GB the memory is narrower; a size that none is sold with is scaled."""
    mac = load_hardware("M3 Max 64GB")
    assert sized(mac, 36e9) == load_hardware("M3 Max 36GB")
    odd = sized(mac, 80e9)
    assert (odd.name, odd.memory_bytes, odd.host_memory_bytes) == ("m3-max-80gb", 60e9, 80e9)
    card = load_hardware("rtx-3090")
    assert sized(card, 36e9) is card


def test_flags_are_those_of_the_placement_the_cache_and_the_cards_that_are_asked_for() -> None:
    found = advise(MODEL, CARD, known(), 4096, 512, placement="n-cpu-moe=30", cache_type="q8_0")[
        "runtimes"
    ]
    assert {row["runtime"]: row["flags"] for row in found} == {
        "llama.cpp": "-ngl 99 --n-cpu-moe 30 --no-mmap -ctk q8_0 -ctv q8_0 -fa on",
        "ik_llama.cpp": "-ngl 99 --n-cpu-moe 30 -fmoe -rtr -ctk q8_0 -ctv q8_0",
    }
    assert found[0]["tok_per_s"] < speed()  # six layers more than fit
    asked = ("llama.cpp", "ollama", "vllm")
    layers = advise(MODEL, CARD, known(), 4096, 512, runtimes=asked, placement="-ngl 10")
    assert {row["runtime"]: row["flags"] for row in layers["runtimes"]} == {
        "llama.cpp": "-ngl 10 --no-mmap",
        "ollama": "num_gpu 10",
    }
    small = replace(load_real_model("Qwen3-30B-A3B"), stored=load_stored("q4_k_m"))
    programs = ("llama.cpp", "ik_llama.cpp", "vllm")
    rows_ = advise(
        small,
        load_hardware("rtx-3090"),
        known(cards=2, split="tensor"),
        4096,
        512,
        runtimes=programs,
    )["runtimes"]
    assert "divides a layer" in str(rows_[0]["why"])
    assert [row["flags"] for row in rows_[1:]] == [
        "-ngl 99 -fmoe -sm graph",
        "--tensor-parallel-size 2",
    ]


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
    model = replace(load_real_model("Qwen3-30B-A3B"), stored=load_stored("q4_k_m"))
    found = advise(model, load_hardware(chip), known(), 4096, 512)["runtimes"]
    assert {row["runtime"] for row in found} <= names
    assert {"mlx", "ollama", "bigmoeonedge"} & {row["runtime"] for row in found} == (
        {"mlx", "ollama", "bigmoeonedge"} & names
    )

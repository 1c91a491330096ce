"""This machine as `plan` finds it, by what its programs and files would say."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from moecache_plan import detect as module
from moecache_plan.detect import detect_machine
from tests.conftest import Moecache

CPU = "processor\t: 0\nmodel name\t: AMD Ryzen 5  5600X 6-Core Processor\n"


@pytest.fixture
def box(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    """Return what programs print on a machine of 32 GiB and six cores; no card yet."""
    said: dict[str, str] = {}
    (tmp_path / "cpuinfo").write_text(CPU)
    monkeypatch.setattr(module, "_CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(module, "_LIMIT", tmp_path / "memory.max")
    monkeypatch.setattr(module, "_output", lambda *command: said.get(command[0], ""))
    monkeypatch.setattr(
        module.platform, "system", lambda: "Darwin" if "sysctl" in said else "Linux"
    )
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=32 * 2**30))
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 6)
    monkeypatch.setattr(module, "memory_rate", lambda cores: 16e9)
    return said


def test_a_card_is_found_with_its_link_and_its_host(box: dict[str, str]) -> None:
    box["nvidia-smi"] = "NVIDIA GeForce RTX 3060, 12288, 3, 8\n"
    found = detect_machine()
    assert (found.name, found.cards, found.ram) == ("rtx-3060-12gb", 1, 32 * 2**30)
    assert found.link_bytes_per_s == 8 * 0.985e9
    assert found.link_efficiency == 0.8
    assert found.about == (
        "this machine (NVIDIA GeForce RTX 3060, link of 7.9 GB/s, "
        "AMD Ryzen 5 5600X 6-Core Processor, 6 cores, 32 GiB of RAM)"
    )


@pytest.mark.parametrize(
    ("printed", "name", "cards"),
    [
        ("NVIDIA GeForce RTX 3090, 24576, 4, 16\n" * 2, "rtx-3090", 2),
        ("NVIDIA GeForce RTX 4060 Laptop GPU, 8188, 4, 8\n", "rtx-4060-mobile", 1),
        ("NVIDIA H100 80GB HBM3, 81559, 5, 16\n", "h100", 1),
        ("NVIDIA A100-SXM4-40GB, 40960, 4, 16\n", "a100-40gb", 1),
        ("NVIDIA GeForce RTX 4060 Ti, 16380, 4, 8\n", "rtx-4060-ti-16gb", 1),
        ("NVIDIA GB10, [N/A], 1, 1\n", "dgx-spark", 1),
        ("NVIDIA T400, 4096, 3, 16\nNVIDIA GeForce RTX 3090, 24576, 4, 16\n", "rtx-3090", 1),
    ],
)
def test_cards_are_known_by_the_names_that_drivers_have(
    box: dict[str, str], printed: str, name: str, cards: int
) -> None:
    box["nvidia-smi"] = printed
    found = detect_machine()
    assert (found.name, found.cards) == (name, cards)
    assert ("left out" in found.about) == ("T400" in printed)


def test_cards_of_amd_are_found_by_rocm(box: dict[str, str]) -> None:
    card = {"Card Series": "AMD Radeon RX 7900 XTX", "VRAM Total Memory (B)": "25753026560"}
    box["rocm-smi"] = json.dumps({"card0": card, "card1": card})
    assert (detect_machine().name, detect_machine().cards) == ("rx-7900-xtx", 2)
    box["rocm-smi"] = "no json"
    assert detect_machine().name == "none"


def test_a_mac_is_its_chip_with_its_memory(box: dict[str, str]) -> None:
    box["sysctl"] = "Apple M1 Max\n"
    assert detect_machine().name == "m1-max-32gb"
    assert detect_machine().memory_bytes_per_s == 400e9


def test_without_a_card_it_is_a_processor_and_a_container_has_what_it_may_take(
    box: dict[str, str], tmp_path: Path, moecache: Moecache, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert detect_machine().name == "none" and detect_machine().about.startswith(
        "this machine (no card, AMD Ryzen 5"
    )
    (tmp_path / "memory.max").write_text("max\n")
    assert detect_machine().ram == 32 * 2**30
    (tmp_path / "memory.max").write_text(f"{24 * 2**30}\n")
    assert detect_machine().ram == 24 * 2**30
    monkeypatch.setenv("COLUMNS", "100")
    page = moecache("plan", "qwen3-30b-a3b", "--precision", "q4_k_m").splitlines()
    assert page[0].startswith("Qwen3-30B-A3B on this machine (no card, AMD Ryzen 5 5600X")
    assert "24 GiB of RAM, memory measured: copies at 16 GB/s)." in " ".join(page[:2])
    assert "RAM 64 GB" not in " ".join(page)
    page = moecache("plan", "qwen3-30b-a3b", "--host_memory", "2x5600").splitlines()
    assert "measured" not in " ".join(page[:2]), "what is said needs no measuring"


def test_memory_is_measured_by_copies_of_all_cores() -> None:
    """A container's slowest and a server's twelve channels, in half a second."""
    assert 5e8 < module.memory_rate(2) < 2e12


def test_the_drive_is_measured_where_weights_do_not_fit(
    box: dict[str, str], tmp_path: Path, moecache: Moecache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the hub cache's largest file, and of a file system with direct reads, or not at all."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "hub/model").mkdir(parents=True)
    (tmp_path / "hub/model/part").write_bytes(bytes(2**24))
    assert "drive 5.6 GB/s" in moecache("plan", "Kimi-K2"), "no file is large"
    monkeypatch.setattr(module, "_LARGE", 2**24)
    found = module.drive_rate(tmp_path / "hub/model/part")
    assert found is None or 1e6 < found < 1e12
    monkeypatch.setattr(module, "drive_rate", lambda file: 2e9 if file.name == "part" else None)
    page = " ".join(moecache("plan", "Kimi-K2").split())
    assert "drive measured: reads at 2 GB/s)" in page and "drive 5.6" not in page
    assert "drive measured" not in moecache("plan", "OLMoE-1B-7B")
    assert "drive measured" not in moecache("plan", "Kimi-K2", "--disk", "3GB/s")


def test_a_card_that_no_table_knows_is_named(box: dict[str, str]) -> None:
    box["nvidia-smi"] = "NVIDIA Quantum 1, 8192, 4, 16\n"
    with pytest.raises(ValueError, match=r"'NVIDIA Quantum 1'\. Say --hardware: Nearest: "):
        detect_machine()

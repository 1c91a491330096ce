"""Machines: what is said of them, what is assumed, and what no machine has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from lm_eval_moecache.records.hardware import load_hardware
from lm_eval_moecache.records.runtimes import Runtime, load_runtime
from moecache_plan.detect import parse_machine
from moecache_plan.machines import (
    Machine,
    as_machine,
    rate,
    with_overrides,
    with_period_dram,
    with_ram,
)
from moecache_plan.mechanisms import mechanisms
from tests.conftest import Moecache

HOST = Runtime(name="r", absent="host")


def machine(name: str, **said: float) -> Machine:
    return with_overrides(as_machine(load_hardware(name)), **said)


def test_what_is_said_comes_before_what_a_profile_assumes() -> None:
    assumed = machine("rtx-3060")
    assert assumed.host_rate(HOST) == 89.6e9
    assert assumed.assumed(HOST) == ["host memory 89.6 GB/s", "drive 5.6 GB/s", "RAM 64 GB"]
    said = machine("rtx-3060", host=50e9, ram=32e9, drive=1e9, link=32e9)
    # A rate that is given is reached, though it is PCIe's nominal one.
    rates = (said.host_rate(HOST), said.ram, said.drive_rate, said.copy_rate)
    assert rates == (50e9, 32e9, 1e9, 32e9)
    assert said.assumed(HOST) == [] and said.is_host_given
    # The virtual clock reads the same record: the host's products keep their share of the rate.
    share = load_hardware("rtx-3060").host_memory_bytes_per_s / 89.6e9  # type: ignore[operator]
    assert said.host_memory_bytes_per_s == pytest.approx(50e9 * share)
    mac = machine("m4-pro", host=200e9, drive=2e9)
    assert mac.host_rate(HOST) is None and mac.copy_rate is None
    assert (mac.memory_bytes_per_s, mac.drive_rate) == (200e9, 2e9)


def test_a_processor_alone_has_ram_for_memory_and_the_drive_for_a_link() -> None:
    assumed = machine("none")
    assert assumed.assumed(HOST) == ["host memory 89.6 GB/s", "drive 5.6 GB/s", "RAM 64 GB"]
    assert (assumed.card_bytes, assumed.shares_memory) == (0.0, False)
    said = machine("none", host=40e9, ram=16e9, drive=1e9)
    assert (said.host_rate(HOST), said.ram, said.drive_rate) == (40e9, 16e9, 1e9)
    assert (said.memory_bytes, said.link_rate) == (12e9, 1e9)


def test_more_memory_than_a_desktop_takes_is_a_servers() -> None:
    server = machine("rtx-3060", ram=512e9)
    assert server.host_rate(HOST) == pytest.approx(307.2e9)
    assert "host memory 307 GB/s" in server.assumed(HOST)
    assert machine("rtx-3060", ram=256e9).host_rate(HOST) == 89.6e9
    assert machine("rtx-3060", ram=512e9, host=50e9).host_rate(HOST) == 50e9
    assert machine("rtx-3060").with_server_memory(600e9) == replace(
        server, host_memory_bytes=64e9, source=machine("rtx-3060").with_server_memory(600e9).source
    )


@pytest.mark.parametrize(("sockets", "share", "found"), [(1, 0.5, 32), (2, 0.5, 32), (2, 0.75, 48)])
def test_of_two_sockets_a_runtime_reaches_its_share(
    sockets: int, share: float, found: float
) -> None:
    """Four channels of 1,000 MT/s are 32 GB/s a socket."""
    figures = {"host_memory_channels": 4, "host_memory_mt_per_s": 1000.0, "host_sockets": sockets}
    server = as_machine(replace(load_hardware("rtx-3090"), **figures))
    assert server.host_rate(replace(HOST, socket_share=share)) == pytest.approx(found * 1e9)


@pytest.mark.parametrize(
    ("name", "found"),
    [("rtx-3060-12gb", 51.2), ("RTX 2080", 51.2), ("RTX 3070", 51.2), ("rtx-4070", 89.6)],
)
def test_a_cards_generation_decides_which_memory_is_assumed_with_it(
    name: str, found: float
) -> None:
    box = with_period_dram(machine(name))
    assert box.host_rate(HOST) == pytest.approx(found * 1e9)
    assert f"host memory {found} GB/s" in box.assumed(HOST)


def test_the_ram_that_is_said_of_a_unified_machine_is_its_cards() -> None:
    """Of an M3 Max with 36 GB the memory is narrower; a size that none is sold with is scaled."""
    mac = machine("M3 Max 64GB")
    assert with_ram(mac, 36e9) == machine("M3 Max 36GB")
    odd = with_ram(mac, 80e9)
    assert (odd.name, odd.memory_bytes, odd.host_memory_bytes) == ("m3-max-80gb", 60e9, 80e9)
    card = machine("rtx-3090")
    assert with_ram(card, 36e9) is card


@pytest.mark.parametrize(
    ("text", "found"),
    [
        *(("83", 83), ("83GB/s", 83), ("2x5600", 89.6), ("8x DDR4-3200", 204.8), ("8x3200", 204.8)),
        *(("8-channel DDR4-3200", 204.8), ("dual channel DDR5-6000", 96), ("2x8x4800", 614.4)),
        *(("measured 80 GB/s", 100), ("~45", 45), ("", None)),
    ],
)
def test_a_rate_of_memory_is_read_as_typed(text: str, found: float | None) -> None:
    assert rate(text, "host_memory") == (None if found is None else pytest.approx(found * 1e9))


def test_a_processors_own_profile_is_a_processor_and_no_card(
    tmp_path: Path, moecache: Moecache
) -> None:
    """As `profile hardware` writes it: the link is a copy within memory, the host the device."""
    path = tmp_path / "mine.yaml"
    measured = {"peak_flops": 1e11, "memory_bytes_per_s": 8e9, "memory_bytes": 32e9}
    measured |= {"link_bytes_per_s": 5e9, "link_latency_s": 1e-6, "kernel_overhead_s": 1e-5}
    measured |= {"host_flops": 1e11, "host_memory_bytes_per_s": 16e9, "is_processor": True}
    path.write_text(yaml.safe_dump({"name": "mine", **measured}))
    box = parse_machine(str(path), ram=None, host_memory=None, disk=None)
    # Products read four fifths of the nominal rate at most.
    assert box.host_rate(HOST) == pytest.approx(20e9) and box.ram == 32e9
    assert box.assumed(HOST) == ["drive 5.6 GB/s"]
    found = moecache.json("plan", "OLMoE-1B-7B", "--precision", "q4_k_m", "--hardware", path)
    assert {row["placement"] for row in found["runtimes"]} == {"cpu"}
    assert "n-cpu-moe" not in found["first"]


def test_pytorchs_launches_cost_every_runtime_that_it_runs() -> None:
    eager = {"accelerate", "transformers", "deepspeed", "fiddler", "moe-infinity"}
    assert all(load_runtime(name).eager for name in eager | {"mixtral-offloading"})
    device = load_hardware("rtx-4090-24gb")
    fast, slow = (replace(HOST, eager=eager).on(device) for eager in (False, True))
    more = slow.layer_overhead_s - fast.layer_overhead_s
    assert more == pytest.approx(1e-6 * mechanisms().constants["eager_layer_us"])

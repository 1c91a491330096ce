"""Chips whose card shares the memory, by the name on the box: Macs, other SoCs, phones.

Rates of memory are nominal: the makers' of Macs, of Strix Halo and of GB10, of others as their
`source` says. What a name does not tell is that of a profile of the same kind.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from lm_eval_moecache.records.cards import Card
from lm_eval_moecache.records.names import Naming, spell


class Chip(NamedTuple):
    """A chip's memory in GB/s, its card's TFLOP/s, and the sizes of memory it is sold with, GB."""

    gb_per_s: float
    tflops: float
    sizes: tuple[int, ...]
    like: str
    """Name of the profile whose other figures are assumed."""
    smaller: Mapping[int, float] = {}
    """Sizes of memory that come with less of the chip -> GB/s."""
    called: str = ""
    """Other names, a comma between them."""
    source: str = "the maker's data sheet, nominal"
    """Where the memory's rate is from; `assumed` where nothing read says which memory it has."""


_BASE, _PRO, _MAX, _ULTRA = "m4-16gb", "m4-pro-24gb", "m4-max-64gb", "m3-ultra-96gb"
_HALO, _SPARK, _PHONE = "strix-halo", "dgx-spark", "phone-12gb"
CHIPS: Mapping[str, Chip] = {
    "m1": Chip(68.3, 2.6, (8, 16), _BASE),
    "m1-pro": Chip(200, 5.2, (16, 32), _PRO),
    "m1-max": Chip(400, 10.4, (32, 64), _MAX),
    "m1-ultra": Chip(800, 20.8, (64, 128), _ULTRA),
    "m2": Chip(100, 3.6, (8, 16, 24), _BASE),
    "m2-pro": Chip(200, 6.8, (16, 32), _PRO),
    "m2-max": Chip(400, 13.6, (32, 64, 96), _MAX),
    "m2-ultra": Chip(800, 27.2, (64, 128, 192), _ULTRA),
    "m3": Chip(100, 3.6, (8, 16, 24), _BASE),
    "m3-pro": Chip(150, 6.4, (18, 36), _PRO),
    "m3-max": Chip(400, 14.2, (36, 48, 64, 96, 128), _MAX, {36: 300, 96: 300}),
    "m3-ultra": Chip(819, 28.4, (96, 256, 512), _ULTRA),
    "m4": Chip(120, 4.6, (16, 24, 32), _BASE),
    "m4-pro": Chip(273, 9.2, (24, 48, 64), _PRO),
    "m4-max": Chip(546, 18.4, (36, 48, 64, 128), _MAX, {36: 410}),
    "m5": Chip(153.6, 18.4, (16, 24, 32), "m5-16gb"),
    "m5-pro": Chip(307, 36.8, (24, 48, 64), "m5-pro-24gb"),
    "m5-max": Chip(614, 73.6, (36, 48, 64, 128), "m5-max-64gb", {36: 460}),
    "strix-halo": Chip(
        256,
        59.4,
        (32, 64, 96, 128),
        _HALO,
        called="Ryzen AI Max+ 395, Ryzen AI Max 395, AI Max 395, Radeon 8060S, Framework Desktop, "
        "EVO-X2",
    ),
    "ryzen-ai-max-385": Chip(256, 46.0, (32, 64, 96, 128), _HALO, called="Radeon 8050S"),
    "ryzen-ai-9-hx-370": Chip(
        120,
        23.8,
        (16, 24, 32, 64, 96),
        _HALO,
        called="HX 370, Radeon 890M, Strix Point",
        source="assumed, LPDDR5X-7500 on 128 bits (8000 is the most, DDR5-5600 the least)",
    ),
    "radeon-780m": Chip(
        89.6,
        16.6,
        (16, 32, 64, 96),
        _HALO,
        called="780M",
        source="assumed, DDR5-5600 on 128 bits (LPDDR5X-7500: 120)",
    ),
    "arc-140v": Chip(
        136.5,
        8.2,
        (16, 32),
        _HALO,
        called="Lunar Lake, Core Ultra 7 258V",
        source="LPDDR5X-8533 on 128 bits: igorslab.de, Lunar Lake MX",
    ),
    "arc-140t": Chip(
        134.4,
        9.2,
        (16, 32, 64, 96),
        _HALO,
        called="Core Ultra 9 285H",
        source="assumed, LPDDR5X-8400 on 128 bits (DDR5-6400: 102.4)",
    ),
    "snapdragon-x-elite": Chip(
        135,
        9.2,
        (16, 32, 64),
        _HALO,
        called="X Elite, X1E-80-100",
        source="assumed, LPDDR5X-8448 on 128 bits",
    ),
    "snapdragon-x-plus": Chip(
        135,
        7.6,
        (16, 32),
        _HALO,
        called="X Plus, Snapdragon X",
        source="assumed, LPDDR5X-8448 on 128 bits",
    ),
    "snapdragon-x2-elite": Chip(
        152,
        11.4,
        (16, 32, 48),
        _HALO,
        called="X2 Elite",
        source="Qualcomm, by en.shiftdelete.net/?p=706596",
    ),
    "snapdragon-x2-elite-extreme": Chip(
        228,
        14.6,
        (48, 128),
        _HALO,
        called="X2 Elite Extreme",
        source="LPDDR5X-9523 on 192 bits: heise.de/-10676658",
    ),
    "dgx-spark": Chip(273, 62.5, (128,), _SPARK, called="GB10, Ascent GX10, Dell Pro Max GB10"),
    "jetson-agx-thor": Chip(
        273,
        62.5,
        (128,),
        _SPARK,
        called="Jetson Thor, Jetson T5000",
        source="developer.ridgerun.com, NVIDIA Jetson AGX Thor, SoM overview",
    ),
    "jetson-agx-orin": Chip(
        204.8, 42.5, (32, 64), _SPARK, called="AGX Orin", source="assumed, LPDDR5-6400 on 256 bits"
    ),
    "jetson-orin-nx": Chip(
        102.4, 25.0, (8, 16), _SPARK, called="Orin NX", source="assumed, LPDDR5-6400 on 128 bits"
    ),
    "jetson-orin-nano": Chip(
        102.4,
        16.7,
        (8,),
        _SPARK,
        called="Orin Nano, Orin Nano Super, Jetson Orin Nano Super",
        source="since JetPack 6.1 (68 GB/s before): NVIDIA, by brojogopalsapui.com",
    ),
    "snapdragon-8-gen-3": Chip(
        76.8,
        0.3,
        (8, 12, 16, 24),
        _PHONE,
        called="Galaxy S24 Ultra",
        source="LPDDR5X at 4,800 MHz on 64 bits: droidholic.com/snapdragon-8-gen-3-launched",
    ),
    "snapdragon-8-elite": Chip(
        84.8,
        0.3,
        (12, 16, 24),
        _PHONE,
        called="Galaxy S25, Galaxy S25 Ultra, OnePlus 13",
        source="LPDDR5X at 5,300 MHz on 64 bits: geektopia.es, 22 October 2024",
    ),
    "dimensity-9400": Chip(
        85.3, 0.3, (12, 16, 24), _PHONE, source="assumed, LPDDR5X-10667 on 64 bits"
    ),
    "tensor-g4": Chip(
        68.3,
        0.3,
        (12, 16),
        _PHONE,
        called="Pixel 9, Pixel 9 Pro",
        source="assumed, LPDDR5X-8533 on 64 bits",
    ),
    "a17-pro": Chip(
        51.2, 0.3, (8,), _PHONE, called="iPhone 15 Pro", source="assumed, LPDDR5-6400 on 64 bits"
    ),
    "a18-pro": Chip(
        60.0, 0.3, (8,), _PHONE, called="iPhone 16 Pro", source="assumed, LPDDR5X-7500 on 64 bits"
    ),
    "a19-pro": Chip(
        76.8, 0.3, (12,), _PHONE, called="iPhone 17 Pro", source="assumed, LPDDR5X-9600 on 64 bits"
    ),
}
_NAMING = Naming(
    aliases={
        other: name for name, chip in CHIPS.items() for other in chip.called.split(", ") if other
    },
    filler="-(?:apple|macbook|mac|studio|mini|air|imac|chip|soc|amd|qualcomm|nvidia|unified|memory|"
    "ram|laptop|with|inch|1[3-6](?=-m-[0-9])|pro(?=(?:-1[3-6])?-m-[0-9]))",
)
_SYSTEM_GB = {_SPARK: 8, _PHONE: 4}
"""Profile -> GB that the system leaves to no program; of others the card may take a share."""


def chip_of(typed: str) -> Card | None:
    """Return the figures of a chip by its name, None where no chip has it.

    Without a size of memory the middle of those it is sold with. Raises ValueError for a size
    that it is not sold with.
    """
    spelled = spell(typed, _NAMING)
    size = re.search(r"-([0-9]+)-gb?$", spelled)
    names = {spell(name, _NAMING): name for name in [*_NAMING.aliases, *CHIPS]}
    found = names.get(spelled[: size.start()] if size else spelled)
    if found is None:
        return None
    name = _NAMING.aliases.get(found, found)
    chip = CHIPS[name]
    memory = int(size[1]) if size else chip.sizes[len(chip.sizes) // 2]
    if memory not in chip.sizes:
        raise ValueError(
            f"hardware={typed!r}: {name} is sold with {', '.join(map(str, chip.sizes))} GB, not "
            f"{memory}."
        )
    rate = chip.smaller.get(memory, chip.gb_per_s)
    figures = {
        "peak_flops": chip.tflops * 1e12,
        "memory_bytes_per_s": rate * 1e9,
        "memory_bytes": for_card(memory * 1e9, chip.like),
        "host_memory_bytes": memory * 1e9,
    }
    sold = "so many GB of unified memory" if size else f"assumed, {memory} GB of {chip.sizes}"
    sources = {
        "peak_flops": "assumed, the order of its card in fp16",
        "memory_bytes_per_s": chip.source,
        "memory_bytes": "assumed, what the system lets the card take by default",
        "host_memory_bytes": sold,
    }
    return Card(f"{name}-{memory}gb", chip.like, figures, sources)


def for_card(memory_bytes: float, like: str) -> float:
    """Return the bytes of a unified memory that its card may take.

    macOS gives it two thirds up to 36 GB and three quarters beyond; others are taken alike.
    """
    if like in _SYSTEM_GB:
        return max(memory_bytes - _SYSTEM_GB[like] * 1e9, memory_bytes / 2)
    return memory_bytes * (2 / 3 if memory_bytes <= 36e9 else 3 / 4)

"""The machine that is meant: the one that a user names, or else the one a command runs on."""

from __future__ import annotations

import csv
import json
import mmap
import os
import platform
import random
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from threading import Barrier
from time import perf_counter

import numpy as np

from lm_eval_moecache.records.cards import LANE_BYTES_PER_S, chip_of
from lm_eval_moecache.records.hardware import NO_CARD, Hardware, load_hardware
from lm_eval_moecache.records.sizes import parse_bytes
from moecache_plan.machines import (
    LINK_SHARE,
    MEASURED_SHARE,
    PROCESSORS,
    Machine,
    as_machine,
    channels_of,
    check_one_kind,
    rate,
    soldered,
    with_overrides,
    with_period_dram,
    with_ram,
    with_usual_ram,
)

_CPUINFO = Path("/proc/cpuinfo")
_LIMIT = Path("/sys/fs/cgroup/memory.max")
_AMD_NAMES = ("Device Name", "Card Series", "Card series", "Card Model")
LEAST_RAM = 10**9
_COPIED, _SECONDS = 2**28, 0.3
"""Bytes that all cores copy together, more than their caches hold, and for how long."""
_BLOCK, _READERS, _LARGE = 2**22, 4, 2**30
"""Bytes of a read of about an expert, how many are under way, and the least of a file to read."""
_NVIDIA = "name,memory.total,pcie.link.gen.max,pcie.link.width.max"


def parse_machine(
    name: str | None, *, ram: str | None, host_memory: str | None, disk: str | None
) -> Machine:
    """Return the machine that a user names, or the one this runs on, with what else they say.

    The rate of this one's memory is measured, where nobody says it.

    `name` is that of a profile, a card or a chip (`2x rtx-3090`: several cards), or a YAML. Raises
    ValueError naming the option.
    """
    given = {
        "ram": None if ram is None else parse_bytes(ram, "ram", unit="GB", least=LEAST_RAM),
        "host": None if host_memory is None else rate(host_memory, "host_memory"),
        "drive": None if disk is None else rate(disk, "disk"),
    }
    if name is None:
        found = detect_machine()
        if given["host"] is None and not found.shares_memory:
            measured = memory_rate(found.cores or 1)
            found = found.with_host_rate(measured / MEASURED_SHARE, "measured on this machine")
            found = _told(found, f"memory measured: copies at {measured / 1e9:.3g} GB/s")
    else:
        several = re.fullmatch(r"([0-9]{1,2}) ?[xX] ?(.+)", name.strip())
        cards = max(int(several[1]), 1) if several else 1
        found = as_machine(_named(several[2] if several else name), cards=cards)
    found = with_overrides(with_period_dram(with_ram(found, given["ram"])), **given)
    if given["ram"] is None and (channels := channels_of(host_memory or "")):
        return with_usual_ram(found, channels)
    return found


def _named(name: str) -> Hardware:
    """Return the profile of a name; of a processor's name, how to ask for it."""
    check_one_kind(name)
    try:
        return load_hardware(name)
    except ValueError:
        if (card := soldered(name)) is not None:
            return card
        if PROCESSORS.search(name.lower()) is None:
            raise
        raise ValueError(
            f"hardware={name!r} names a processor. Allowed: --hardware none, with the memory that "
            "decides its speed, as --host_memory 2x5600 --ram 64GB."
        ) from None


def detect_machine() -> Machine:
    """Return this machine: its profile or card, how many, its RAM and processor, where they can be
    read. Raises ValueError where it has a card that no table knows."""
    import psutil

    ram, cores = float(psutil.virtual_memory().total), psutil.cpu_count(logical=False)
    limit = _LIMIT.read_text().strip() if _LIMIT.is_file() else ""
    if limit.isdigit():
        ram = min(ram, float(limit))
    processor = _processor()
    text = f"{processor}, {cores} cores, " if cores else f"{processor}, "
    text += f"{ram / 2**30:.0f} GiB of RAM"
    count, chip = 1, None
    if processor.startswith("Apple"):
        chip = chip_of(f"{processor} {_sold(ram)}GB")
    if chip is not None:
        hardware = load_hardware(chip.name)
    elif found := _nvidia() or _amd():
        hardware, count, card = _best(found)
        text = f"{card}, {text}"
    else:
        hardware, text = load_hardware(NO_CARD), f"no card, {text}"
    about = f"this machine ({text})"
    return with_overrides(as_machine(hardware, cards=count, cores=cores, about=about), ram=ram)


@cache
def memory_rate(cores: int) -> float:
    """Return the bytes/s that this machine's memory reads and writes while all cores copy arrays,
    measured once, in half a second."""
    start = Barrier(cores)

    def copied(_: int) -> float:
        source = np.ones(_COPIED // cores, dtype=np.uint8)
        target = source.copy()  # so that its pages are there
        start.wait()
        begin, moved, spent = perf_counter(), 0, 0.0
        while spent < _SECONDS:
            np.copyto(target, source)
            moved += 2 * source.nbytes
            spent = perf_counter() - begin
        return moved / spent

    with ThreadPoolExecutor(cores) as pool:
        return sum(pool.map(copied, range(cores)))


def with_measured_drive(machine: Machine, model: str) -> Machine:
    """Return this machine with the rate at which its drive reads a large file past the page cache:
    the model's, or else the largest of the hub cache; as it is where there is none."""
    from huggingface_hub.constants import HF_HUB_CACHE

    for place in (Path(model), Path(HF_HUB_CACHE)):
        files = [place] if place.is_file() else place.rglob("*") if place.is_dir() else ()
        sizes = {file: file.stat().st_size for file in files if file.is_file()}
        file = max(sizes, key=lambda each: sizes[each], default=None)
        if file is not None and sizes[file] >= _LARGE and (rate := drive_rate(file)) is not None:
            text = f"drive measured: reads at {rate / 1e9:.2g} GB/s"
            return _told(with_overrides(machine, drive=rate), text)
    return machine


def drive_rate(file: Path) -> float | None:
    """Return the bytes/s of scattered direct reads of a file, in half a second; None where the
    system or the file system has none."""
    blocks, direct = file.stat().st_size // _BLOCK, getattr(os, "O_DIRECT", None)

    def read(seed: int) -> float:
        draw, buffer = random.Random(seed), mmap.mmap(-1, _BLOCK)
        handle = os.open(file, os.O_RDONLY | (direct or 0))
        begin, moved, spent = perf_counter(), 0, 0.0
        try:
            while spent < _SECONDS:
                moved += os.preadv(handle, [buffer], draw.randrange(blocks) * _BLOCK)
                spent = perf_counter() - begin
        finally:
            os.close(handle)
        return moved / spent

    if direct is None or not blocks:
        return None
    try:
        with ThreadPoolExecutor(_READERS) as pool:
            return sum(pool.map(read, range(_READERS)))
    except OSError:
        return None


def _told(machine: Machine, text: str) -> Machine:
    return replace(machine, about=f"{machine.about[:-1]}, {text})")


def _best(found: list[tuple[str, float, float]]) -> tuple[Hardware, int, str]:
    """Return of cards of several kinds the one with the most memory, how many are like it, and it
    in words, with its link as it was read."""
    name, memory, link = max(found, key=lambda card: card[1])
    count = sum(card[0] == name for card in found)
    hardware = _known(name, memory)
    text = f"{count}x {name}" if count > 1 else name
    if len(found) > count:
        text += f" ({len(found) - count} cards of other kinds left out)"
    if link and not hardware.is_unified:
        source = {**hardware.sources, "link_bytes_per_s": "read on this machine, nominal"}
        share = min(hardware.link_efficiency, LINK_SHARE)
        hardware = replace(hardware, link_bytes_per_s=link, link_efficiency=share, source=source)
        text += f", link of {link / 1e9:.2g} GB/s"
    return hardware, count, text


def _output(*command: str) -> str:
    """Return what a program prints, an empty text where it is missing or fails."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _processor() -> str:
    if platform.system() == "Darwin":
        return _output("sysctl", "-n", "machdep.cpu.brand_string").strip()
    text = _CPUINFO.read_text() if _CPUINFO.is_file() else ""
    named = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return re.sub(r"\s+", " ", named[1]) if named else platform.processor() or platform.machine()


def _sold(ram: float) -> int:
    """Return the size of memory in GB as it is sold."""
    return round(ram / 2**30)


def _nvidia() -> list[tuple[str, float, float]]:
    """Return each card's name, bytes of memory, and bytes/s of its link (0: not known)."""
    text = _output("nvidia-smi", f"--query-gpu={_NVIDIA}", "--format=csv,noheader,nounits")
    cards = []
    for fields in csv.reader(text.splitlines(), skipinitialspace=True):
        name, memory, generation, lanes = (*fields, "", "", "", "")[:4]
        link = 0.0
        if generation.isdigit() and lanes.isdigit():
            link = LANE_BYTES_PER_S.get(int(generation), 0.0) * int(lanes)
        cards.append((name, float(memory) * 2**20 if memory.isdigit() else 0.0, link))
    return cards


def _amd() -> list[tuple[str, float, float]]:
    """Return each card's name and bytes of memory, as `rocm-smi` has them."""
    text = _output("rocm-smi", "--showproductname", "--showmeminfo", "vram", "--json")
    try:
        cards = json.loads(text or "{}")
    except json.JSONDecodeError:
        return []
    found = []
    for card in cards.values():
        name = next((card[key] for key in _AMD_NAMES if card.get(key, "N/A") != "N/A"), "")
        memory = str(card.get("VRAM Total Memory (B)", ""))
        if name:
            found.append((str(name), float(memory) if memory.isdigit() else 0.0, 0.0))
    return found


def _known(name: str, memory: float) -> Hardware:
    """Return the profile or card of a name as a driver has it."""
    bare = re.sub(r"\b(HBM\w*|Graphics|SXM\d*|OEM)\b", " ", name).strip()
    for typed in (f"{bare} {_sold(memory)}GB", bare, re.sub(r"[- ]\d+ ?GB\b", "", bare)):
        try:
            return load_hardware(typed)
        except ValueError as error:
            problem = error
    raise ValueError(
        f"This machine has a card that is not known: {name!r}. Say --hardware: "
        f"{str(problem).partition(chr(10))[2]}"
    )

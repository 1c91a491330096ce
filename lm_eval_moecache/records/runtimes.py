"""Runtime profiles: how a program serves absent experts, and what share of each bandwidth it gets.

A hardware profile is a machine, a runtime profile (`runtimes/NAME.yaml`) a program on it. Constants
belong to mechanisms, not to programs, and are in one file that `moecache profile runtimes` writes
from published speeds: most programs were measured on too few machines for a factor of their own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from lm_eval_moecache.records.files import read_yaml
from lm_eval_moecache.records.hardware import Hardware
from lm_eval_moecache.records.numbers import unknown_name_error
from lm_eval_moecache.records.plugins import yaml_files
from lm_eval_moecache.records.ranges import Count, Positive, Share

RUNTIME_DIR = Path(__file__).resolve().parent.parent / "runtimes"
MECHANISMS_FILE = RUNTIME_DIR / "mechanisms.yaml"
IDEAL = "ideal"
RESIDENT, HOST, COPY, LAYER, READ, BOTH = "resident", "host", "copy", "layer", "read", "both"
MECHANISMS = {
    RESIDENT: "every expert lies in the device's memory",
    HOST: "the host's processor computes absent experts from its memory",
    COPY: "absent experts are copied over the link into slots on the device",
    LAYER: "whole layers are copied over the link, whatever was routed",
    READ: "absent experts are read from the drive",
    BOTH: "the device has a cache of experts, and the host computes those that are absent",
}
"""What `absent` may be, and what it means."""
CUDA, ROCM, METAL = "cuda", "rocm", "metal"
"""How a card's kernels are launched: by CUDA graphs, one by one (HIP, Vulkan, SYCL), or Metal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Runtime:
    """One program that serves Mixture-of-Experts models.

    `absent` is one of `MECHANISMS`. `placement` is how it divides a model of which a part fits:
    `auto`, by layers or slots; `resident_experts`, so many of each layer; or `gpu_layers`, whole
    layers, attention included. `flags` are what a user types, with `{host_layers}`, `{slots}` and
    `{cache_gib}` to be filled in.
    """

    name: str
    absent: str
    based_on: str = ""
    """The runtime that this one is a variant of."""
    called: str = ""
    """Pattern of the names that people give it, in lower case."""
    placement: Literal["auto", "resident_experts", "gpu_layers"] = "auto"
    flags: str = ""
    resident_flags: str = ""
    """Flags where all experts fit."""
    layer_flags: str = ""
    """Flags that put whole layers on the card, with `{gpu_layers}` to be filled in."""
    processor_flags: str = ""
    """Flags where the processor computes everything."""
    tensor_flags: str = ""
    """Flags that divide each layer over all cards, with `{cards}` to be filled in."""
    devices: Literal["any", "card"] = "any"
    """`card`: runs only on a device with memory of its own."""
    runs_on: tuple[str, ...] = ()
    """What it has kernels for: `CUDA`, `CUDA 8.0` (of cards from that compute capability on),
    `ROCm`, `ROCm rx-9|mi3` (of cards by their names), `SYCL`, `Vulkan`, `Metal`, `processor`,
    `phone`; empty where nobody says."""
    models: str = ""
    """Pattern of the models that it runs, in lower case; empty for any."""
    gguf: bool = False
    """Whether its MXFP4 files have all but the experts in eight bits (Ollama's: bf16)."""
    eager: bool = False
    """Whether PyTorch launches its kernels one by one, where others replay captured graphs."""
    prefill: Literal["copy", "layer", "host", "read", "token"] = "copy"
    """What it does with a prompt's absent experts: `copy` those that are needed, copy whole
    layers (`layer`), `host`, `read`, or read for one `token` after the other."""
    ships_from: Count = 32
    """Prompt tokens from which absent experts are copied; the host computes shorter prompts."""
    chunk: Count = 512
    """Tokens of a prompt that go through the model together."""
    core_factor: Positive = 1.0
    """FLOP/s of a prompt that a core reaches with its kernels, over llama.cpp's."""
    splits: Literal["layer", "tensor"] = "layer"
    """Several cards: `layer` after `layer`, or every layer over all of them (`tensor`)."""
    socket_share: Share = 0.5
    """Share of two sockets' memory bandwidth it reaches: 0.5 one of them, 0.75 a copy on each."""
    factor: Positive = 1.0
    """Measured over predicted speed of this runtime; 1 unless rows of several machines say more."""
    source: str = ""

    def __post_init__(self) -> None:
        if self.absent not in MECHANISMS:
            raise unknown_name_error(f"runtime {self.name!r}: absent", self.absent, MECHANISMS)
        try:
            re.compile(self.called)
        except re.error as error:
            raise ValueError(
                f"runtime {self.name!r}: called={self.called!r} is not a pattern: {error}."
            ) from error

    @property
    def is_ideal(self) -> bool:
        """Whether it reaches everything, as the virtual clock alone does."""
        return self.name == IDEAL

    def on(self, hardware: Hardware) -> Hardware:
        """Return the device with what this runtime makes of it: what the virtual clock charges.

        `ideal` changes nothing; others change the rates, and the name that results show.
        """
        if self.is_ideal:
            return hardware
        shares = constants()
        extra = {HOST: "host_layer_us", BOTH: "host_layer_us", READ: "read_layer_us"}
        layer_us = shares[f"{launches(hardware)}_layer_us"]
        layer_us += shares[extra.get(self.absent, "copy_layer_us")]
        layer_us += shares["eager_layer_us"] if self.eager else 0.0
        link_share = shares["drive_share" if self.absent == READ else "link_share"]
        host = hardware.host_nominal_bytes_per_s
        host_rate = None if host is None else host * shares["host_share"] * self.factor
        source = f"runtime={self.name}: shares of mechanism {self.absent!r}"
        changed: dict[str, Any] = {
            "memory_bytes_per_s": hardware.memory_bytes_per_s * shares["card_share"] * self.factor,
            "peak_flops": hardware.peak_flops * shares["prefill_compute_share"],
            "link_efficiency": min(1.0, hardware.link_efficiency * link_share * self.factor),
            "layer_overhead_s": layer_us * 1e-6 / self.factor,
            # The measured overhead of a layer has its kernels' in it.
            "kernel_overhead_s": 0.0,
            "host_memory_bytes_per_s": host_rate,
        }
        return replace(
            hardware,
            name=f"{hardware.name}, {self.name}",
            **changed,
            source={**hardware.sources, **{k: source for k, v in changed.items() if v}},
        )


def launches(hardware: Hardware) -> str:
    """Return how kernels are launched on a device: `CUDA`, `ROCM` (others' too) or `METAL`."""
    name = hardware.name.lower()
    if re.match(r"m[1-9](-|$)|a1[0-9]-pro", name):
        return METAL
    others = r"rx|radeon|ai-pro|pro-[wv]|ryzen|strix|mi\d|instinct|arc|flex|snapdragon|adreno|mali"
    return ROCM if re.match(others, name) else CUDA


@cache
def constants() -> Mapping[str, float]:
    """Return the constants of mechanisms, as `moecache profile runtimes` fitted them."""
    data = read_yaml(MECHANISMS_FILE, f"mechanisms={str(MECHANISMS_FILE)!r}")
    return {name: float(value) for name, value in data["constants"].items()}


@cache
def _shipped() -> Mapping[str, Runtime]:
    files = yaml_files("runtimes", RUNTIME_DIR)
    return {name: _read(file) for name, file in files.items() if file != MECHANISMS_FILE}


def load_runtime(name: str) -> Runtime:
    """Load a runtime by its name, a name that people give it (`ollama 0.30`), or a YAML's path.

    Of several that match, a variant wins over what it is based on. Raises ValueError for an
    unknown name or an unreadable file.
    """
    if str(name).endswith((".yaml", ".yml")):
        return _read(Path(name))
    wanted = str(name).strip().lower()
    shipped = _shipped()
    for runtime in shipped.values():
        if wanted == runtime.name.lower():
            return runtime
    found = {
        runtime.name: match.end() - match.start()
        for runtime in shipped.values()
        if runtime.called and (match := re.search(runtime.called, wanted))
    }
    for runtime in shipped.values():
        if runtime.name in found:
            found.pop(runtime.based_on, None)
    if not found:
        raise unknown_name_error("runtime", name, shipped)
    return shipped[max(found, key=lambda each: (found[each], each))]


def _read(path: Path) -> Runtime:
    # Imported late: pydantic is slow to import.
    from lm_eval_moecache.records.schemas.inputs import read_profile

    return read_profile(Runtime, path, "runtime")

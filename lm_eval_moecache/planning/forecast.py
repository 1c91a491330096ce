"""How fast a program runs a model on a machine: one formula, a sum over what a token waits for.

    seconds a token = bytes read on the card / (share x its bandwidth)
                    + bytes the host reads / (share x its memory's)
                    + bytes that come over the link, or off the drive / (share x its rate)
                    + layers x an overhead, by mechanism
                    + an overhead a token of context

The shares and overheads are constants of mechanisms (`runtimes/mechanisms.yaml`), fitted to
published speeds. The sum is linear in `1 / share` and in the overheads: `Work` holds what they are
multiplied with, so that fit and forecast are one function.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lm_eval_moecache.planning.runtimes import (
    BOTH,
    COPY,
    HOST,
    LAYER,
    READ,
    RESIDENT,
    SHARES,
    Mechanisms,
    Runtime,
    mechanisms,
)
from lm_eval_moecache.planning.stored import load_stored
from lm_eval_moecache.records.hardware import Hardware
from lm_eval_moecache.records.real_model import RealModel
from lm_eval_moecache.records.sizes import parse_bytes

DESKTOP_BYTES_PER_S = 89.6e9
"""Assumed of a host whose memory is not known: two channels of DDR5-5600."""
DESKTOP_RAM = 64e9
NVME_BYTES_PER_S = 5.6e9
"""Assumed of an unknown drive: scattered reads at 80% of the 7 GB/s of a PCIe 4.0 NVMe drive."""
LINK_SHARE = 0.8
_NOMINAL = (7.88e9, 8e9, 15.75e9, 16e9, 31.5e9, 32e9, 63e9, 64e9)
"""Nominal rates of PCIe, of which large pinned copies reach `LINK_SHARE`."""
BUFFERS = 1.0e9
"""Bytes a card that compute buffers, a context and the allocator take."""
SYSTEM = 4.0e9
"""Bytes of RAM that the operating system and its programs take."""
FAULTS = 0.2
"""Share of the drive's rate that page faults of a mapped file reach (flash-moe's results.tsv)."""
AUTO = "auto"
KINDS = (RESIDENT, "host_layers", "resident_experts", "slots", "cache", AUTO, "cpu")
_LEAST_CACHE = 2**30
_FORMS = "resident, host_layers=N, host_layers=all, resident_experts=N, slots=N, cache=8GiB, auto"


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Where experts lie: `kind`, one of `KINDS`, and how many (inf: all), or bytes of a cache."""

    kind: str
    amount: float = 0.0

    def __str__(self) -> str:
        if self.kind in (RESIDENT, AUTO, "cpu"):
            return self.kind
        if self.kind == "cache":
            return f"cache={self.amount / 2**30:.3g}GiB"
        return f"{self.kind}={'all' if math.isinf(self.amount) else f'{self.amount:.0f}'}"


def read_placement(text: str, key: str = "placement") -> Placement:
    """Read `host_layers=25`, `slots=88`, `cache=8GiB` and the like; an empty text is `auto`.

    Raises ValueError that names `key`, the value and the forms.
    """
    body = re.sub(r"\s+", " ", str(text).strip().lower()).lstrip("-")
    if body in ("", AUTO, "fit"):
        return Placement(kind=AUTO)
    if body in (RESIDENT, "all resident", "gpu", "vram"):
        return Placement(kind=RESIDENT)
    if body in ("cpu", "cpu only", "cpu-only"):
        return Placement(kind="cpu")
    if body in ("host", "host all", "offload", "all", "cmoe", "cpu-moe", "exps=cpu", "ot exps=cpu"):
        return Placement(kind="host_layers", amount=math.inf)
    match = re.match(
        r"(host_layers|n[-_]?cpu[-_]?moe|ncmoe|resident_experts|slots|cache)\s*=?\s*"
        r"(all|[0-9.]+)\s*([kmgt]i?b)?(/layer)?",
        body,
    )
    if match is None or (match[3] and match[1] != "cache"):
        raise ValueError(f"{key}={text!r} is not a placement. Allowed: {_FORMS}.")
    kind = "host_layers" if match[1].startswith("n") else match[1]
    if kind == "cache":
        # llama.cpp counts caches in MiB; so small a number was meant in GB.
        least = 0 if match[3] else _LEAST_CACHE
        size = parse_bytes(match[2] + (match[3] or "MiB"), f"{key}: cache", least=least)
        return Placement(kind=kind, amount=size)
    return Placement(kind=kind, amount=math.inf if match[2] == "all" else float(match[2]))


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
    host_bytes_per_s: float | None
    """None where the card shares the host's memory."""
    ram: float = DESKTOP_RAM
    link_bytes_per_s: float | None = None
    """What large pinned copies reach."""
    drive_bytes_per_s: float = NVME_BYTES_PER_S
    """Scattered reads of about an expert each."""
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
) -> Machine:
    """Return the machine of a hardware profile (None: no card), with what is known of it.

    `host`, `link` and `drive` are bytes/s that replace the profile's. On a device with unified
    memory `host` is that memory's rate.
    """
    assumed = []
    guesses = {} if hardware is None else hardware.sources

    def is_guess(key: str) -> bool:
        return guesses.get(key, "assumed").startswith("assumed")

    unified = hardware is not None and hardware.is_unified
    card = None if hardware is None else hardware.memory_bytes_per_s
    if unified:
        card, host = host or card, None
    elif host is None:
        sockets = 1 if hardware is None else hardware.host_sockets
        nominal = None if hardware is None else hardware.host_nominal_bytes_per_s
        host = nominal or DESKTOP_BYTES_PER_S
        if sockets > 1:
            host *= sockets * runtime.socket_share
        if is_guess("host_memory_mt_per_s"):
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
        host_bytes_per_s=host,
        ram=ram or 0.0,
        link_bytes_per_s=link,
        drive_bytes_per_s=drive,
        assumed=tuple(assumed),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """A model on a machine: by which mechanism, and what share of its routed experts is where."""

    mechanism: str
    placement: Placement
    on_host: float = 0.0
    """Share of a token's experts that the host computes."""
    moved: float = 0.0
    """Share of a token's experts that are copied or read; under `layer`, of all experts."""
    cached: float = 1.0
    """Share of all experts that the device's memory holds."""
    hit: float | None = None
    """Hits that a cache was taken to have; None without a cache."""
    by_faults: bool = False
    """Whether misses are page faults of a mapped file."""


def stored_for(runtime: Runtime, model: RealModel) -> RealModel:
    """Return a model as the runtime's files store it: GGUF's MXFP4 has the rest in q8_0."""
    if runtime.gguf and model.stored.name == "mxfp4":
        return replace(model, stored=load_stored("mxfp4_moe"))
    return model


def room(model: RealModel, machine: Machine, context: int) -> float:
    """Return the bytes of the cards' memory that are left for experts; may be negative."""
    used = model.dense_bytes + model.kv_bytes(context) + BUFFERS * machine.cards
    return machine.card_bytes - used


def hit_rate(model: RealModel, cached: float, known: Mechanisms | None = None) -> float:
    """Return the hits of an LRU cache with this share of a layer's experts, on ordinary text.

    The geometric mean of two estimates of the misses: a curve through published hit rates, and a
    replay of the routing that is nearest by top-k / experts.
    """
    known = known or mechanisms()
    if cached >= 1:
        return 1.0
    if cached <= 0:
        return 0.0
    missed = 1 - cached * (1 + known.curve) / (cached + known.curve)
    points = [0.0, *_nearest_routing(model, known)["hits"]]
    place = cached * (len(points) - 1)
    left = min(int(place), len(points) - 2)
    replayed = points[left] + (place - left) * (points[left + 1] - points[left])
    return 1 - math.sqrt(missed * max(1 - replayed, 1e-6))


def _nearest_routing(model: RealModel, known: Mechanisms) -> Mapping[str, Any]:
    def distance(routing: Mapping[str, Any]) -> float:
        share = routing["top_k"] / routing["experts"]
        return abs(math.log(share * model.num_experts / model.top_k))

    return min(known.routings.values(), key=distance)


def touched_share(model: RealModel, tokens: float, known: Mechanisms | None = None) -> float:
    """Return the share of a layer's experts that these tokens of one text need.

    Uses of an expert are counted as a Poisson's whose rate is gamma distributed: few experts are
    popular, so that 128 tokens need 60% of 128 experts where independent choices would need all.
    The gamma's shape is fitted to the nearest shipped routing, which has up to 299 tokens.
    """
    known = known or mechanisms()
    shape = float(_nearest_routing(model, known)["popularity_shape"])
    share = model.top_k / model.num_experts
    if tokens <= 1:
        return share * tokens
    return max(share, float(1 - (1 + tokens * share / shape) ** -shape))


def place(
    model: RealModel,
    machine: Machine,
    runtime: Runtime,
    placement: Placement,
    context: int,
    hit: float | None = None,
    known: Mechanisms | None = None,
) -> Placed:
    """Return where a runtime puts a model's experts.

    `hit` is a measured hit rate; without it hits are estimated, by the curve of `known`.

    Raises ValueError where the model cannot run so: its dense weights do not fit, or the runtime
    has no way to serve absent experts.
    """
    layers, experts = model.num_layers, model.num_experts
    kind, amount = placement.kind, placement.amount
    if kind == "cpu" or (machine.card_bytes_per_s is None and runtime.absent != READ):
        return Placed(mechanism=HOST, placement=Placement(kind="cpu"), on_host=1.0, cached=0.0)
    if kind == AUTO:
        placement = automatic(model, machine, runtime, context)
        kind, amount = placement.kind, placement.amount
    if kind == RESIDENT:
        return Placed(mechanism=RESIDENT, placement=placement)
    absent = runtime.absent
    if kind in ("host_layers", "resident_experts"):
        share = amount / layers if kind == "host_layers" else 1 - min(amount / experts, 1.0)
        share = min(share, 1.0)
        if kind == "host_layers" and absent == LAYER:
            return Placed(mechanism=LAYER, placement=placement, moved=share, cached=1 - share)
        mechanism = RESIDENT if kind == "host_layers" and share == 0 else HOST
        return Placed(mechanism=mechanism, placement=placement, on_host=share, cached=1 - share)
    cached = amount / experts if kind == "slots" else amount / model.all_expert_bytes
    cached = min(cached, 1.0)
    found = hit_rate(model, cached, known) if hit is None else hit
    mechanism = absent if absent in (COPY, READ, BOTH) else BOTH if absent == HOST else COPY
    if mechanism != READ and machine.host_bytes_per_s is None:
        mechanism = READ  # unified memory has no other place for what is absent
    placed = Placed(mechanism=mechanism, placement=placement, cached=cached, hit=found)
    if mechanism == BOTH:
        return replace(placed, on_host=1 - found)
    return replace(placed, moved=1 - found)


def automatic(model: RealModel, machine: Machine, runtime: Runtime, context: int) -> Placement:
    """Return the placement of most experts on the device that fits with KV cache and buffers."""
    left, every = room(model, machine, context), model.all_expert_bytes
    if left >= every:
        return Placement(kind=RESIDENT)
    if runtime.absent == READ and machine.card_bytes_per_s is None:
        left = machine.ram - SYSTEM - model.dense_bytes - model.kv_bytes(context)
    if left < 0 and runtime.absent != HOST:
        raise ValueError(
            f"{model.name} does not run on {machine.name}: beside dense weights of "
            f"{model.dense_bytes / 1e9:.1f} GB and a KV cache no memory is left for experts."
        )
    share = max(left, 0.0) / every
    match runtime.absent:
        case "resident":
            raise ValueError(
                f"{runtime.name} keeps every expert in the device's memory, and {model.name} "
                f"needs {every / 1e9:.1f} GB for them where {machine.name} has "
                f"{max(left, 0) / 1e9:.1f}."
            )
        case "host" if runtime.placement == "resident_experts":
            amount = math.floor(share * model.num_experts)
            return Placement(kind="resident_experts", amount=amount)
        case "host" | "layer":
            number = math.ceil(model.num_layers * (1 - share))
            return Placement(kind="host_layers", amount=number)
    return Placement(kind="slots", amount=max(math.floor(share * model.num_experts), 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Seconds by what they wait for, were every share 1; layers and tokens that cost overheads."""

    card: float = 0.0
    host: float = 0.0
    link: float = 0.0
    drive: float = 0.0
    layer: float = 0.0
    host_layer: float = 0.0
    copy_layer: float = 0.0
    read_layer: float = 0.0
    context: float = 0.0

    def seconds(self, constants: Mapping[str, float]) -> dict[str, float]:
        """Return the seconds of each part under these constants."""
        shares = {name[: -len("_share")]: 1 / constants[name] for name in SHARES}
        layers = ("layer", "host_layer", "copy_layer", "read_layer", "context")
        shares |= {name: 1e-6 * constants[f"{name}_us"] for name in layers}
        return {name: getattr(self, name) * cost for name, cost in shares.items()}


def token_work(
    model: RealModel, machine: Machine, placed: Placed, context: int, top_k: int | None = None
) -> Work:
    """Return what one decoded token at this context length waits for."""
    routed = model.num_layers * (top_k or model.top_k) * model.expert_bytes
    dense = model.num_layers * model.layer_dense_bytes + model.kv_bytes(context)
    layers = model.num_layers
    card_rate, host_rate = machine.together_bytes_per_s, machine.host_bytes_per_s
    on_host = placed.on_host * routed
    if card_rate is None or placed.placement.kind == "cpu":
        # A unified machine's processor reads the memory that its card reads.
        rate = host_rate or machine.card_bytes_per_s or DESKTOP_BYTES_PER_S
        work = Work(host=(dense + routed) / rate, layer=layers, context=context)
        host_layers: float = layers
    else:
        host_layers = layers if placed.mechanism == BOTH else layers * math.ceil(placed.on_host)
        if placed.placement.kind == "host_layers":
            host_layers = min(placed.placement.amount, layers)
        work = Work(
            card=(dense + routed - on_host) / card_rate,
            host=on_host / (host_rate or card_rate),
            layer=layers,
            context=context,
        )
    if placed.mechanism in (HOST, BOTH):
        return replace(work, host_layer=host_layers)
    if placed.mechanism == READ:
        rate = machine.drive_bytes_per_s * (FAULTS if placed.by_faults else 1.0)
        return replace(work, drive=placed.moved * routed / rate, read_layer=layers)
    if placed.mechanism in (COPY, LAYER):
        moved = placed.moved * (model.all_expert_bytes if placed.mechanism == LAYER else routed)
        rate = machine.link_bytes_per_s or machine.drive_bytes_per_s
        return replace(work, link=moved / rate, copy_layer=layers)
    return work


def rule_of_thumb_s(work: Work) -> float:
    """Return the seconds a token by the rule that others use: 0.55 of the card's bandwidth, 0.7 of
    the host memory's nominal rate (a measured one), and the whole of link or drive."""
    return work.card / 0.55 + work.host / 0.7 + work.link + work.drive


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """A decode speed in tokens/s with the range where 80% of the mechanism's rows fall."""

    tok_per_s: float
    low: float
    high: float
    placed: Placed
    work: Work
    is_stated: bool
    """Whether all inputs that matter to the mechanism were given, not assumed."""


def forecast(
    model: RealModel,
    machine: Machine,
    runtime: Runtime,
    placed: Placed,
    context: int,
    *,
    top_k: int | None = None,
    is_stated: bool = False,
    known: Mechanisms | None = None,
) -> Forecast:
    """Return the decode speed of a placed model, by the shipped constants or by `known`."""
    known = known or mechanisms()
    work = token_work(model, machine, placed, context, top_k)
    if runtime.is_ideal:
        speed = 1 / (work.card + work.host + work.link + work.drive)
    else:
        speed = runtime.factor / sum(work.seconds(known.constants).values())
    spread = known.spread(placed.mechanism, is_stated)
    return Forecast(
        tok_per_s=speed,
        low=speed * spread.low,
        high=speed * spread.high,
        placed=placed,
        work=work,
        is_stated=is_stated,
    )


# --- the prompt ---


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptWork:
    """Seconds of a prompt by what they wait for, were every share 1, and its number of chunks."""

    compute: float = 0.0
    link: float = 0.0
    card: float = 0.0
    drive: float = 0.0
    chunks: float = 0.0
    token: Work | None = None
    """What each token waits for where they go through the model one by one."""

    def seconds(self, constants: Mapping[str, float]) -> float:
        """Return the seconds of the prompt under these constants."""
        if self.token is not None:
            return self.chunks * sum(self.token.seconds(constants).values())
        return (
            self.compute / constants["prefill_compute_share"]
            + self.link / constants["prefill_link_share"]
            + self.card / constants["prefill_card_share"]
            + self.drive / constants["drive_share"]
            + self.chunks * 1e-3 * constants["prefill_chunk_ms"]
        )


def prompt_work(
    model: RealModel,
    machine: Machine,
    runtime: Runtime,
    placed: Placed,
    prompt: int,
    chunk: int | None = None,
    known: Mechanisms | None = None,
) -> PromptWork | None:
    """Return what a prompt waits for, from a cold cache, or None where that is not modelled.

    Not modelled are prompts that the processor computes: its rate differs by 20 times between
    programs with and without matrix instructions. Copied are the experts that a chunk needs
    (`touched_share`), or all of a layer.
    """
    if machine.card_bytes_per_s is None or placed.placement.kind == "cpu":
        return None
    if placed.on_host and (runtime.prefill == HOST or prompt < runtime.ships_from):
        return None
    if runtime.prefill == "token" and placed.mechanism == READ:
        return PromptWork(chunks=prompt, token=token_work(model, machine, placed, prompt // 2))
    chunks = math.ceil(prompt / (chunk or runtime.chunk))
    touched = touched_share(model, prompt / chunks, known)
    every = model.all_expert_bytes
    dense = model.num_layers * model.layer_dense_bytes
    shipped = 1.0 if runtime.prefill == LAYER else touched
    absent = shipped * (1 - placed.cached) * every * chunks
    cards = machine.cards if machine.is_split else 1
    work = PromptWork(
        compute=model.prompt_flops(prompt) / (machine.peak_flops * cards),
        card=chunks * (dense + touched * every) / (machine.together_bytes_per_s or 1.0),
        chunks=chunks,
    )
    if placed.mechanism == READ:
        return replace(work, drive=absent / machine.drive_bytes_per_s)
    if machine.link_bytes_per_s:
        return replace(work, link=absent / (machine.link_bytes_per_s * cards))
    return work


def prefill_tok_per_s(
    work: PromptWork, prompt: int, runtime: Runtime, known: Mechanisms | None = None
) -> float:
    """Return the prompt tokens/s, by the shipped constants or by `known`."""
    if runtime.is_ideal:
        return prompt / (max(work.compute, work.card) + work.link + work.drive)
    return prompt / work.seconds((known or mechanisms()).constants)

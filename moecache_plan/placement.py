"""Where a program puts a model's experts on a machine, and which of them a token finds there."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lm_eval_moecache.emulate.stored import load_stored
from lm_eval_moecache.records.real_model import RealModel
from lm_eval_moecache.records.runtimes import (
    BOTH,
    COPY,
    HOST,
    LAYER,
    READ,
    RESIDENT,
    Runtime,
)
from lm_eval_moecache.records.sizes import parse_bytes
from moecache_plan.machines import SYSTEM, Machine
from moecache_plan.mechanisms import PROCESSOR, Mechanisms, mechanisms

BUFFERS = 1.0e9
"""Bytes a card that compute buffers, a context and the allocator take."""
AUTO = "auto"
_LEAST_CACHE = 2**30
_FORMS = (
    "resident, host_layers=N, host_layers=all, gpu_layers=N, resident_experts=N, slots=N, "
    "cache=8GiB, auto"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Where experts lie: `kind`, as in `_FORMS` or `cpu`, and how many (inf: all), or bytes."""

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
        r"(host_layers|n[-_]?cpu[-_]?moe|ncmoe|gpu_layers|ngl|num_gpu|n[-_]gpu[-_]layers"
        r"|resident_experts|slots|cache)\s*=?\s*"
        r"(all|[0-9.]+)\s*([kmgt]i?b)?(/layer)?",
        body,
    )
    if match is None or (match[3] and match[1] != "cache"):
        raise ValueError(f"{key}={text!r} is not a placement. Allowed: {_FORMS}.")
    kind = match[1]
    if kind.startswith("n"):
        kind = "host_layers" if "moe" in kind else "gpu_layers"
    if kind == "cache":
        # llama.cpp counts caches in MiB; so small a number was meant in GB.
        least = 0 if match[3] else _LEAST_CACHE
        size = parse_bytes(match[2] + (match[3] or "MiB"), f"{key}: cache", least=least)
        return Placement(kind=kind, amount=size)
    return Placement(kind=kind, amount=math.inf if match[2] == "all" else float(match[2]))


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """A model on a machine: by which mechanism, and what share of its routed experts is where."""

    mechanism: str
    placement: Placement
    on_host: float = 0.0
    """Share of a token's experts that the host computes."""
    whole: float = 0.0
    """Share of the layers that the host computes whole, attention included."""
    moved: float = 0.0
    """Share of a token's experts that are copied or read; under `layer`, of all experts."""
    cached: float = 1.0
    """Share of all experts that the device's memory holds."""
    hit: float | None = None
    """Hits that a cache was taken to have; None without a cache."""
    by_faults: bool = False
    """Whether misses are page faults of a mapped file."""

    @property
    def group(self) -> str:
        """The rows whose errors its forecast is expected to have."""
        return PROCESSOR if self.placement.kind == "cpu" else self.mechanism


def stored_for(runtime: Runtime, model: RealModel) -> RealModel:
    """Return a model as the runtime's files store it: GGUF's MXFP4 has the rest in q8_0."""
    if runtime.gguf and model.stored.name == "mxfp4":
        return replace(model, stored=load_stored("mxfp4_moe"))
    return model


def room(model: RealModel, machine: Machine, context: int) -> float:
    """Return the bytes of the cards' memory, without a card of RAM, left for experts.

    May be negative.
    """
    used = model.dense_bytes + model.kv_bytes(context)
    if machine.is_processor:
        return machine.ram - SYSTEM - used
    return machine.card_bytes - used - BUFFERS * machine.cards


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
    if machine.is_processor and runtime.absent != READ and kind in ("slots", "cache"):
        raise ValueError(f"{placement}: {runtime.name} has no cache of experts on a processor")
    if kind == "cpu" or (machine.is_processor and runtime.absent != READ):
        cpu = Placement(kind="cpu")
        return Placed(mechanism=HOST, placement=cpu, on_host=1.0, whole=1.0, cached=0.0)
    if kind == AUTO:
        placement = automatic(model, machine, runtime, context)
        kind, amount = placement.kind, placement.amount
    if kind == RESIDENT:
        return Placed(mechanism=RESIDENT, placement=placement)
    absent = runtime.absent
    if kind == "gpu_layers":
        share = 1 - min(amount / layers, 1.0)
        return Placed(
            mechanism=HOST if share else RESIDENT,
            placement=placement,
            on_host=share,
            whole=share,
            cached=1 - share,
        )
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
    if mechanism != READ and machine.shares_memory:
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
    if left < 0 and runtime.absent != HOST:
        raise ValueError(
            f"{model.name} does not run on {machine.title}: dense weights of "
            f"{model.dense_bytes / 1e9:.1f} GB and a KV cache leave no memory for experts."
        )
    share = max(left, 0.0) / every
    match runtime.absent:
        case "resident":
            raise ValueError(
                f"{runtime.name} keeps every expert in the device's memory, and {model.name} "
                f"needs {every / 1e9:.1f} GB for them where {machine.title} has "
                f"{max(left, 0) / 1e9:.1f}."
            )
        case "host" if runtime.placement == "gpu_layers":
            held = left + model.dense_bytes + model.kv_bytes(context)
            whole = every + model.dense_bytes + model.kv_bytes(context)
            amount = math.floor(model.num_layers * max(held, 0.0) / whole)
            return Placement(kind="gpu_layers", amount=amount)
        case "host" if runtime.placement == "resident_experts":
            amount = math.floor(share * model.num_experts)
            return Placement(kind="resident_experts", amount=amount)
        case "host" | "layer":
            number = math.ceil(model.num_layers * (1 - share))
            return Placement(kind="host_layers", amount=number)
    return Placement(kind="slots", amount=max(math.floor(share * model.num_experts), 1))


def settled(
    model: RealModel,
    machine: Machine,
    runtime: Runtime,
    context: int,
    placement: Placement | None = None,
) -> Placed:
    """Return where the runtime puts the model, the drive included where RAM is too small.

    `placement` is where its user does; by default most experts lie on the device. Raises
    ValueError where it cannot run.
    """
    is_unified = machine.shares_memory
    if runtime.devices == "card" and is_unified:
        raise ValueError("needs a card of its own memory")
    where = placement or automatic(model, machine, runtime, context)
    placed = place(model, machine, runtime, where, context)
    if placement is not None and placed.placement.kind != "cpu":
        left, held = room(model, machine, context), placed.cached * model.all_expert_bytes
        # Layers that the host computes whole have their dense weights and KV cache there, too.
        left += placed.whole * (model.dense_bytes + model.kv_bytes(context))
        if held > left:
            raise ValueError(
                f"{placed.placement} needs {held / 1e9:.1f} GB for experts; dense weights, "
                f"KV cache and buffers leave {max(left, 0.0) / 1e9:.1f} GB"
            )
    every = model.all_expert_bytes
    absent = (1 - placed.cached) * every
    if placed.mechanism == RESIDENT or not absent:
        return placed
    if placed.mechanism == READ and not is_unified:
        return placed
    if is_unified:
        # The processor may use more of the one memory than the card: what is absent from both
        # lies on the drive.
        held = (machine.ram - SYSTEM - model.dense_bytes - model.kv_bytes(context)) / every
        held = max(held, placed.cached)
        if held >= 1 and placed.mechanism == HOST:
            return placed
        return _from_drive(model, placed, held, by_faults=runtime.absent != READ)
    # A program that copies, or maps its file without locking it, needs RAM for what is absent.
    space = machine.ram - SYSTEM
    if placed.placement.kind == "cpu":
        space -= model.dense_bytes + model.kv_bytes(context)
    if absent <= space:
        return placed
    if placed.mechanism in (COPY, LAYER):
        raise ValueError(
            f"needs {(absent + SYSTEM) / 1e9:.0f} GB of RAM, and there are {machine.ram / 1e9:.0f}"
        )
    held = placed.cached + max(space, 0.0) / every
    return _from_drive(model, placed, held, by_faults=True)


def _from_drive(model: RealModel, placed: Placed, held: float, *, by_faults: bool) -> Placed:
    hit = hit_rate(model, min(held, 1.0))
    return replace(placed, mechanism=READ, on_host=0.0, moved=1 - hit, hit=hit, by_faults=by_faults)

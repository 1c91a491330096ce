"""The regime of a run: the dimensionless numbers by which two runs may be compared."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lm_eval_moecache.engine.costs import Costs
from lm_eval_moecache.engine.setting import CONTEXT, Setting
from lm_eval_moecache.records.event import DECODE, PREFILL
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.hardware import Hardware
from lm_eval_moecache.records.ledger import RequestRecord

LINK, COMPUTE, LAUNCHES, HOST = "link", "compute", "launches", "host"


class Waits(NamedTuple):
    """Mean waits of a layer's decode step, in seconds."""

    link_s: float
    host_s: float = 0.0
    """Waiting only for the outputs of experts executed on the host."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Regime:
    """The regime of a run. Times are seconds of a decode step per layer, averaged over layers."""

    cycles: float
    """Capacity in cycles: how many tokens' experts (layers x top-k each) it holds."""
    transfer_s: float
    """One expert over the link, latency included."""
    compute_s: float
    """Reading and multiplying one layer's weights and its top-k experts."""
    launches_s: float
    """Overheads of one layer: kernel launches, and those of the software stack."""

    @property
    def transfer_per_layer(self) -> float:
        """One expert's transfer / one layer's decode step without waiting; inf where that is 0."""
        layer_s = self.compute_s + self.launches_s
        return self.transfer_s / layer_s if layer_s else float("inf")

    def bound(self, waits: Waits) -> str:
        """Name what takes the largest part of a layer's step."""
        parts = {COMPUTE: self.compute_s, LAUNCHES: self.launches_s}
        parts |= {LINK: waits.link_s, HOST: waits.host_s}
        return max(parts, key=lambda name: parts[name])

    def as_dict(self, waits: Waits | None = None) -> dict[str, Any]:
        """Return the numbers as JSON data; the step's bound only where its waits are known."""
        ratio = self.transfer_per_layer
        numbers: dict[str, Any] = {
            "capacity_cycles": self.cycles,
            "transfer_per_layer": None if ratio == float("inf") else ratio,
            "transfer_s": self.transfer_s,
            "layer_compute_s": self.compute_s,
            "layer_launches_s": self.launches_s,
        }
        if waits is not None:
            numbers["layer_stall_s"] = waits.link_s
            if waits.host_s:
                numbers["layer_host_wait_s"] = waits.host_s
            numbers["bound"] = self.bound(waits)
        return numbers


def regime_of(geometry: Geometry, capacity_bytes: int, hardware: Hardware) -> Regime:
    """Return the regime of a model with this cache capacity (bytes) on this hardware."""
    num_layers, top_k = geometry.num_layers, geometry.top_k
    best = [levels[0] for levels in geometry.expert_bytes]
    transfers = [hardware.link_latency_s + size / hardware.link_rate for size in best]
    costs, step_s = Costs(hardware, geometry), 0.0
    for layer in range(num_layers):
        step_s += costs.dense_s(layer, 1)
        step_s += costs.experts_s(layer, top_k, top_k)
    launches_s = costs.overhead_s
    return Regime(
        cycles=capacity_bytes / (top_k * sum(best)),
        transfer_s=sum(transfers) / num_layers,
        compute_s=step_s / num_layers - launches_s,
        launches_s=launches_s,
    )


def decode_waits(requests: Iterable[RequestRecord], num_layers: int) -> Waits | None:
    """Return the mean waits of a layer's decode step, or None where nothing was decoded.

    A pass that served several requests counts once.
    """
    passes = {p.index: p for request in requests for p in request.passes if p.phase == DECODE}
    if not passes:
        return None
    steps = len(passes) * num_layers
    link_s = sum(p.stall_s for p in passes.values()) / steps
    return Waits(link_s, sum(p.host_wait_s for p in passes.values()) / steps)


def s_mbu(requests: Sequence[RequestRecord], geometry: Geometry, setting: Setting) -> float | None:
    """Return the share of the card's memory bandwidth that decoding uses (MoE-CAP's S-MBU).

    Bytes of the dense weights, of the experts activated on the card (at the store's first
    precision) and, under `attention=context`, of the KV caches, over the time of decoding x the
    profile's bandwidth. 1 is the roof; what waits for the link is below it. None where nothing was
    decoded, or that bandwidth is infinite.
    """
    decoded = {p.index: p for r in requests for p in r.passes if p.phase != PREFILL}
    duration_s = sum(p.duration_s for p in decoded.values())
    bandwidth = setting.hardware.memory_bytes_per_s
    if not duration_s or math.isinf(bandwidth):
        return None
    per_expert = sum(levels[0] for levels in geometry.expert_bytes) / geometry.num_layers
    on_card = sum(max(p.requests - p.avoided - p.host_executed, 0) for p in decoded.values())
    nbytes = len(decoded) * sum(geometry.dense_bytes) + on_card * per_expert
    if setting.attention == CONTEXT and setting.emulate is not None:
        for request in requests:
            steps = sum(p.phase != PREFILL for p in request.passes)
            contexts = range(request.prompt_tokens + 1, request.prompt_tokens + steps + 1)
            nbytes += sum(map(setting.emulate.kv_bytes, contexts))
    return nbytes / (duration_s * bandwidth)

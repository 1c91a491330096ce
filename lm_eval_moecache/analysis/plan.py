"""What a device can do with a model: what fits, in which regime, how fast it would answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from pyarrow.parquet import read_schema

from lm_eval_moecache.algorithms.policy import load_policy
from lm_eval_moecache.engine.regime import Regime, Waits, decode_waits, regime_of
from lm_eval_moecache.engine.replay import replay
from lm_eval_moecache.engine.setting import Setting
from lm_eval_moecache.records.emulation import PRECISIONS, RealModel
from lm_eval_moecache.records.event import DECODE
from lm_eval_moecache.records.files import traces_dir
from lm_eval_moecache.records.hardware import Hardware
from lm_eval_moecache.records.sizes import Capacity
from lm_eval_moecache.trace.future import Future
from lm_eval_moecache.trace.header import read_header
from lm_eval_moecache.trace.trace import Trace

RECALL = 0.85
"""Of a prefetcher as good as the next layer's gate is on real models (80.7 to 88.6%)."""
GATE = {"prefetch": "oracle", "prefetch.recall": RECALL, "prefetch.precision": RECALL}
LRU, HAZARD, PREFETCH, HOST, BOUND = "lru", "hazard", "prefetch", "host", "bound"
POLICIES: Mapping[str, Mapping[str, Any]] = {
    LRU: {"eviction": "lru"},
    HAZARD: {"eviction": "hazard"},
    PREFETCH: {"eviction": "hazard", **GATE},
    HOST: {"eviction": "lru", "miss": "host", "miss.rule": "balanced"},
    BOUND: {"eviction": "belady"},
}
ONLY_WHERE_IT_FITS = (HAZARD, PREFETCH)
"""Policies that are replayed at the largest capacity alone: they take seconds."""
SHARES = (0.05, 0.1, 0.25, 0.5)
_SMALLER = 2
_WINDOW = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """What of a device's memory is taken, in bytes, and what is left for experts."""

    memory: int
    dense: int
    kv_cache: int
    experts: int
    """Bytes left for experts, at most all of them."""
    all_experts: int

    @property
    def share(self) -> float:
        return self.experts / self.all_experts

    @property
    def is_whole(self) -> bool:
        return self.experts == self.all_experts


def fit(model: RealModel, hardware: Hardware, context: int) -> Fit:
    """Return what fits beside the dense weights and a KV cache of `context` tokens.

    Activations and what an allocator loses are left out. ValueError where not one expert fits.
    """
    kv_cache = model.kv_bytes(context)
    left = int(hardware.memory_bytes) - model.dense_bytes - kv_cache
    if left < model.expert_bytes:
        raise ValueError(
            f"{model.name} does not run on {hardware.name}: of "
            f"{hardware.memory_bytes / 1e9:.1f} GB the dense weights take "
            f"{model.dense_bytes / 1e9:.1f} ({model.stored.name}) and a KV cache of {context} "
            f"tokens {kv_cache / 1e9:.1f}, and one expert needs {model.expert_bytes / 1e9:.2f}. "
            "Allowed: a shorter --context, fewer bits (--precision), or a device with more memory."
        )
    every = _all_experts(model)
    return Fit(
        memory=int(hardware.memory_bytes),
        dense=model.dense_bytes,
        kv_cache=kv_cache,
        experts=min(left, every),
        all_experts=every,
    )


def _all_experts(model: RealModel) -> int:
    return model.num_layers * model.num_experts * model.expert_bytes


def fitting_precision(model: RealModel, hardware: Hardware, context: int) -> str | None:
    """Return the stored precision of most bits below the model's at which all of it fits."""
    fewer = [p for p in PRECISIONS.values() if p.expert_bits < model.stored.expert_bits]
    room = hardware.memory_bytes - model.kv_bytes(context)
    for stored in sorted(fewer, key=lambda each: -each.expert_bits):
        smaller = replace(model, stored=stored)
        if _all_experts(smaller) + smaller.dense_bytes <= room:
            return stored.name
    return None


def stand_in(model: RealModel) -> Path:
    """Return the shipped trace that routes most like the model: the nearest share of experts."""
    wanted = model.top_k / model.num_experts

    def distance(path: Path) -> tuple[float, str]:
        # The header says it: reading all the rows of all traces takes a second.
        found = read_header(path.name, read_schema(path).metadata).geometry
        own = (found.num_layers, found.num_experts) == (model.num_layers, model.num_experts)
        return (0.0 if own else 1.0 + abs(found.top_k / found.num_experts - wanted), path.name)

    return min(sorted(traces_dir().glob("*.parquet")), key=distance)


def touched_share(trace: Trace, num_tokens: int) -> float:
    """Return the share of a layer's experts that a prompt of so many tokens needs.

    Counted over windows of a routing's tokens; longer prompts as if windows were independent.
    """
    geometry, experts = trace.geometry, trace.columns.experts
    layers = np.repeat(
        np.arange(len(trace.row_bounds) - 1) % geometry.num_layers, np.diff(trace.row_bounds)
    )
    window = min(num_tokens, _WINDOW)
    shares = []
    for layer in range(geometry.num_layers):
        rows = experts[layers == layer]
        for start in range(0, max(len(rows) - window, 0) + 1, window):
            shares.append(len(np.unique(rows[start : start + window])) / geometry.num_experts)
    return float(1 - (1 - np.mean(shares)) ** (num_tokens / window))


def first_token_s(
    model: RealModel, hardware: Hardware, room: Fit, prompt: int, share: float
) -> tuple[float, float]:
    """Return the seconds of a prompt's pass: its compute, and the loads that it waits for.

    From a cold cache every expert that the prompt needs is loaded once, and none of that hides
    behind compute; where all experts fit they are there.
    """
    weights = model.num_layers * (model.layer_weights + model.top_k * model.expert_weights)
    flops = 2.0 * prompt * (weights + model.read_once - model.output) + 2.0 * model.output
    flops += prompt * model.attention_flops(prompt) / 2
    needed = share * room.all_experts
    dense_bytes = model.num_layers * model.layer_dense_bytes
    read_s = (needed + dense_bytes) / hardware.memory_bytes_per_s
    launches_s = regime_of(model.geometry(), room.experts, hardware).launches_s
    compute_s = max(flops / hardware.peak_flops, read_s) + model.num_layers * launches_s
    loads = model.num_layers * model.num_experts * share
    link_s = needed / hardware.link_rate + loads * hardware.link_latency_s
    return compute_s, 0.0 if room.is_whole else link_s


def attention_s(model: RealModel, hardware: Hardware, context: int) -> float:
    """Return the seconds in which one token attends to its context: its KV cache is read once."""
    read_s = model.kv_bytes(context) / hardware.memory_bytes_per_s
    return max(read_s, model.attention_flops(context) / hardware.peak_flops)


def speeds(
    model: RealModel,
    hardware: Hardware,
    room: Fit,
    trace: Trace,
    context: int,
    on_progress: Callable[[str], object] = lambda _: None,
) -> Iterator[dict[str, Any]]:
    """Yield one row for each capacity up to what fits, and each policy; one row where all fits.

    The trace's layers are charged as the model's. Capacities are shares of all experts: what fits,
    and up to two round shares below. A layer waits for the link (or the host) as its traced twin
    does, in proportion to top-k; a token takes the model's number of such layers, and attends to
    `context` tokens.
    """
    context_s = attention_s(model, hardware, context)

    def row(share: float, regime: Regime, policy: str, missed: float, waits: Waits) -> Any:
        layer_s = regime.compute_s + regime.launches_s + waits.link_s + waits.host_s
        return {
            "capacity": f"{100 * share:.3g}%",
            "capacity_bytes": int(room.all_experts * share),
            "capacity_cycles": regime.cycles,
            "policy": policy,
            "decode_miss_rate": missed,
            "tok_per_s": 1 / (model.num_layers * layer_s + context_s),
            "bound": regime.bound(waits),
            "transfer_per_layer": regime.transfer_per_layer,
        }

    if room.is_whole:
        regime = regime_of(model.geometry(), room.experts, hardware)
        yield row(1.0, regime, "resident", 0.0, Waits(0.0))
        return
    future = Future(trace)
    charged = model.emulated_by(trace.geometry)
    more = model.top_k / trace.geometry.top_k
    below = [share for share in SHARES if share < 0.95 * room.share]
    for share in [*below[-_SMALLER:], room.share]:
        size = max(int(charged.total_expert_bytes * share), model.expert_bytes)
        regime = regime_of(model.geometry(), int(room.all_experts * share), hardware)
        for name, overrides in POLICIES.items():
            if name == HOST and not hardware.host_flops:
                continue
            if name in ONLY_WHERE_IT_FITS and share != room.share:
                continue
            on_progress(f"{100 * share:.0f}%, {name}")
            setting = Setting(
                policy=load_policy("on_demand", overrides),
                capacity=Capacity(text=f"{100 * share:.3g}%", bytes_by_partition=(size,)),
                hardware=hardware,
                seed=trace.seed,
                emulate=model,
            )
            ledger = replay(trace, setting, future=future).ledger
            passes = [p for p in ledger.passes if p.phase == DECODE]
            missed = sum(p.misses + p.late for p in passes) / sum(p.requests for p in passes)
            waits = decode_waits(ledger.requests, trace.geometry.num_layers) or Waits(0.0)
            yield row(share, regime, name, missed, Waits(waits.link_s * more, waits.host_s * more))

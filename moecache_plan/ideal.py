"""What the virtual clock says of a model on a device: what fits, and how fast at best."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lm_eval_moecache.algorithms.policy import load_policy
from lm_eval_moecache.emulate.stored import SUGGESTED, load_stored
from lm_eval_moecache.engine.regime import Regime, Waits, decode_waits, regime_of
from lm_eval_moecache.engine.setting import Setting
from lm_eval_moecache.engine.stand_in import context_seconds, cycle_ratio, step_time, traced_bytes
from lm_eval_moecache.records.event import DECODE, PHASES
from lm_eval_moecache.records.hardware import Hardware
from lm_eval_moecache.records.real_model import RealModel
from lm_eval_moecache.records.sizes import Capacity
from lm_eval_moecache.trace.future import Future
from lm_eval_moecache.trace.trace import Trace
from lm_eval_moecache.trace.use import touched
from moecache_plan.placement import BUFFERS

RECALL = 0.85
"""Recall, and precision, of a prefetcher as good as real models' next-layer gates (80.7-88.6%)."""
GATE = {"prefetch": "oracle", "prefetch.recall": RECALL, "prefetch.precision": RECALL}
POLICIES: Mapping[str, Mapping[str, Any]] = {
    "lru": {"eviction": "lru"},
    "hazard": {"eviction": "hazard"},
    "prefetch": {"eviction": "hazard", **GATE},
    "host": {"eviction": "lru", "miss": "host", "miss.rule": "balanced"},
    "bound": {"eviction": "belady"},
}
ONLY_WHERE_IT_FITS = ("hazard", "prefetch")
"""Policies replayed at the largest capacity alone: each replay takes seconds."""
SHARES = (0.05, 0.1, 0.25, 0.5)
_SMALLER = 2
_NEARLY_ALL = 0.95
"""Share of a trace's experts from which on its misses say nothing but which came first."""
_WINDOW = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """How a device's memory is divided, in bytes."""

    memory: int
    dense: int
    kv_cache: int
    buffers: int = 0
    """What compute buffers, a context and the allocator take of a card."""
    experts: int
    """Bytes left for experts, at most `all_experts`."""
    all_experts: int

    @property
    def share(self) -> float:
        """Share of all expert bytes that fits."""
        return self.experts / self.all_experts

    @property
    def is_whole(self) -> bool:
        """Whether all experts fit."""
        return self.experts == self.all_experts


def fit(model: RealModel, hardware: Hardware, context: int, cards: int = 1) -> Fit:
    """Return what fits next to the dense weights, a KV cache of `context` tokens, and buffers.

    Raises ValueError where not one expert fits.
    """
    kv_cache = model.kv_bytes(context)
    buffers = 0 if hardware.is_processor else int(BUFFERS * cards)
    room = int(hardware.memory_bytes) - model.dense_bytes - kv_cache - buffers
    if room < model.expert_bytes:
        name = "a processor alone" if hardware.is_processor else hardware.name
        raise ValueError(
            f"{model.name} does not run on {name}: of "
            f"{hardware.memory_bytes / 1e9:.1f} GB the dense weights take "
            f"{model.dense_bytes / 1e9:.1f} ({model.stored.name}) and a KV cache of {context} "
            f"tokens {kv_cache / 1e9:.1f}, buffers {buffers / 1e9:.1f}, and one expert needs "
            f"{model.expert_bytes / 1e9:.2f}. "
            "Allowed: a shorter --context, fewer bits (--precision), or a device with more memory."
        )
    return Fit(
        memory=int(hardware.memory_bytes),
        dense=model.dense_bytes,
        kv_cache=kv_cache,
        buffers=buffers,
        experts=min(room, model.all_expert_bytes),
        all_experts=model.all_expert_bytes,
    )


def fitting_precision(model: RealModel, hardware: Hardware, context: int) -> str | None:
    """Return the highest precision below the model's at which all of it fits, or None."""
    fewer = [p for p in map(load_stored, SUGGESTED) if p.expert_bits < model.stored.expert_bits]
    room = hardware.memory_bytes - model.kv_bytes(context)
    room -= 0 if hardware.is_processor else BUFFERS
    for stored in sorted(fewer, key=lambda each: -each.expert_bits):
        smaller = replace(model, stored=stored)
        if smaller.all_expert_bytes + smaller.dense_bytes <= room:
            return stored.name
    return None


def routing_notes(model: RealModel, trace: Trace) -> str:
    """Return what routing is replayed, and what is odd about it as the model's."""
    traced = trace.geometry
    columns = trace.columns
    decoded = np.unique(columns.pass_index[columns.phase == PHASES.index(DECODE)]).size
    texts = len(trace.requests)
    text = (
        f"Misses are those of {traced.model}'s routing in {decoded:,} decoded tokens of "
        f"{'one text' if texts == 1 else f'{texts:,} texts'}, replayed from an empty cache"
    )
    if traced.model != model.name:
        text += f" of as many cycles; its layers take {model.name}'s sizes"
    sizes = (traced.num_layers, traced.num_experts)
    if sizes != (model.num_layers, model.num_experts):
        text += (
            f". It is a stand-in: {sizes[0]} layers x {sizes[1]} experts, {traced.top_k} a token, "
            f"for {model.num_layers} x {model.num_experts}, {model.top_k} a token"
        )
    elif traced.top_k != model.top_k:
        text += (
            f". It was recorded with {traced.top_k} of the model's {model.top_k} experts a token: "
            f"waits and reads of experts count {model.top_k}/{traced.top_k} times"
        )
    return text + "."


def touched_share(trace: Trace, num_tokens: int) -> float:
    """Return the share of a layer's experts that a prompt of `num_tokens` needs.

    Counted over windows of the trace's tokens; longer prompts as if windows were independent.
    """
    window = min(num_tokens, _WINDOW)
    return float(1 - (1 - touched(trace, window)) ** (num_tokens / window))


def first_token_s(
    model: RealModel, hardware: Hardware, room: Fit, prompt: int, share: float
) -> tuple[float, float]:
    """Return (compute, link): the seconds a prompt's pass computes and waits for loads.

    From a cold cache every expert that the prompt needs is loaded once, without overlap with
    compute; nothing is loaded where all experts fit.
    """
    needed_bytes = share * room.all_experts
    dense_bytes = model.num_layers * model.layer_dense_bytes
    read_s = (needed_bytes + dense_bytes) / hardware.memory_bytes_per_s
    launches_s = regime_of(model.geometry(), room.experts, hardware).launches_s
    flop_s = model.prompt_flops(prompt) / hardware.peak_flops
    compute_s = max(flop_s, read_s) + model.num_layers * launches_s
    loads = model.num_layers * model.num_experts * share
    link_s = needed_bytes / hardware.link_rate + loads * hardware.link_latency_s
    return compute_s, 0.0 if room.is_whole else link_s


def speeds(
    model: RealModel, hardware: Hardware, room: Fit, trace: Trace, context: int
) -> Iterator[dict[str, Any]]:
    """Yield one row for each capacity and policy; one row where all experts fit.

    The trace's layers take the model's sizes. Capacities are shares of all experts: what fits,
    and up to two round shares below; the trace has a cache of as many cycles. A layer takes what
    the replayed layers take, reads of experts and waits in proportion to top-k; a token takes the
    model's number of such layers, and attends to `context` tokens. Where both have the same top-k
    and layers, that is what `replay` reports. `in_regime` is false for a capacity at which the
    trace would hold nearly all of its experts.
    """
    # Imported once the options are checked: importing the engine takes half a second.
    from lm_eval_moecache.engine.replay import replay

    step_s = step_time(model, hardware, trace.geometry, context)
    cycles_ratio = 1 / cycle_ratio(model, trace.geometry)

    def row(
        share: float, regime: Regime, policy: str, missed: float, seconds: float, waits: Waits
    ) -> dict[str, Any]:
        return {
            "capacity": f"{100 * share:.3g}%",
            "capacity_bytes": int(room.all_experts * share),
            "capacity_cycles": regime.cycles,
            "policy": policy,
            "decode_miss_rate": missed,
            "tok_per_s": 1 / seconds,
            "bound": regime.bound(waits),
            "transfer_per_layer": regime.transfer_per_layer,
            "in_regime": room.is_whole or share * cycles_ratio < _NEARLY_ALL,
        }

    if room.is_whole:
        regime = regime_of(model.geometry(), room.experts, hardware)
        layer_s = regime.compute_s + regime.launches_s
        seconds = model.num_layers * layer_s + context_seconds(model, hardware, context)
        yield row(1.0, regime, "resident", 0.0, seconds, Waits(0.0))
        return
    future = Future(trace)
    top_k_ratio = model.top_k / trace.geometry.top_k
    smaller = [share for share in SHARES if share < 0.95 * room.share]
    for share in [*smaller[-_SMALLER:], room.share]:
        size = traced_bytes(model, trace.geometry, share)
        regime = regime_of(model.geometry(), int(room.all_experts * share), hardware)
        for name, overrides in POLICIES.items():
            if name == "host" and not hardware.host_flops:
                continue
            if name in ONLY_WHERE_IT_FITS and share != room.share:
                continue
            _say(f"replaying {100 * share:.0f}%, {name}")
            setting = Setting(
                policy=load_policy("on_demand", overrides),
                capacity=Capacity(text=f"{100 * share:.3g}%", bytes_by_partition=(size,)),
                hardware=hardware,
                seed=trace.seed,
                emulate=model,
            )
            ledger = replay(trace, setting, future=future, cache_reset="never").ledger
            passes = [p for p in ledger.passes if p.phase == DECODE]
            missed = sum(p.misses + p.late for p in passes) / sum(p.requests for p in passes)
            waits = decode_waits(ledger.requests, trace.geometry.num_layers) or Waits(0.0)
            seconds = step_s(sum(p.duration_s for p in passes) / len(passes))
            scaled = Waits(waits.link_s * top_k_ratio, waits.host_s * top_k_ratio)
            yield row(share, regime, name, missed, seconds, scaled)
    _say("")


def _say(step: str) -> None:
    """Show what is being replayed, on a terminal."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{step:40s}\r")
        sys.stderr.flush()

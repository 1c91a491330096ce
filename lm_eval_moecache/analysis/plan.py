"""What a card can do with a model: what fits, in which regime, and how fast it would decode."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lm_eval_moecache.algorithms.policy import load_policy
from lm_eval_moecache.engine.regime import Waits, decode_waits, regime_of
from lm_eval_moecache.engine.replay import replay
from lm_eval_moecache.engine.setting import Setting
from lm_eval_moecache.records.emulation import RealModel
from lm_eval_moecache.records.hardware import Hardware
from lm_eval_moecache.records.paths import traces_dir
from lm_eval_moecache.records.sizes import Capacity
from lm_eval_moecache.trace.future import Future
from lm_eval_moecache.trace.importers import load_trace
from lm_eval_moecache.trace.trace import Trace

GATE = {"prefetch": "oracle", "prefetch.recall": 0.85, "prefetch.precision": 0.85}
"""A prefetcher as good as the next layer's gate is on real models (80.7 to 88.6% recall)."""
POLICIES: Mapping[str, Mapping[str, Any]] = {
    "on demand, lru": {"eviction": "lru"},
    "on demand, hazard": {"eviction": "hazard"},
    "next gate (recall 0.85), lru": {"eviction": "lru", **GATE},
    "next gate (recall 0.85), hazard": {"eviction": "hazard", **GATE},
    "on demand, belady (bound)": {"eviction": "belady"},
}
SHARES = (0.05, 0.1, 0.25, 0.5)


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


def fit(model: RealModel, hardware: Hardware, context: int) -> Fit:
    """Return what fits beside the dense weights and a KV cache of `context` tokens.

    Activations and what an allocator loses are left out. ValueError where not one expert fits.
    """
    kv_cache = model.kv_bytes_per_token * context
    left = int(hardware.memory_bytes) - model.dense_bytes - kv_cache
    if left < model.expert_bytes:
        raise ValueError(
            f"{model.name} does not run on {hardware.name}: of "
            f"{hardware.memory_bytes / 1e9:.1f} GB the dense weights take "
            f"{model.dense_bytes / 1e9:.1f} and a KV cache of {context} tokens "
            f"{kv_cache / 1e9:.1f}, and one expert needs {model.expert_bytes / 1e9:.2f}. "
            "Allowed: a shorter --context, or a device with more memory."
        )
    every = model.num_layers * model.num_experts * model.expert_bytes
    return Fit(
        memory=int(hardware.memory_bytes),
        dense=model.dense_bytes,
        kv_cache=kv_cache,
        experts=min(left, every),
        all_experts=every,
    )


def stand_in(model: RealModel) -> Path:
    """Return the shipped trace that routes most like the model: the nearest share of experts."""
    wanted = model.top_k / model.num_experts

    def distance(path: Path) -> tuple[float, str]:
        found = load_trace(str(path)).geometry
        own = (found.num_layers, found.num_experts) == (model.num_layers, model.num_experts)
        return (0.0 if own else 1.0 + abs(found.top_k / found.num_experts - wanted), path.name)

    return min(sorted(traces_dir().glob("*.parquet")), key=distance)


def speeds(
    model: RealModel, hardware: Hardware, room: Fit, trace: Trace
) -> Iterator[dict[str, Any]]:
    """Yield one row for each capacity up to what fits, and each policy.

    The trace's layers are charged as the model's. Capacities are shares of all experts. A layer
    waits for the link as its traced twin does, in proportion to top-k; a token takes the model's
    number of such layers.
    """
    future = Future(trace)
    charged = model.emulated_by(trace.geometry)
    own = model.geometry()
    for share in sorted({room.share, *(s for s in SHARES if s < room.share)}):
        size = max(int(charged.total_expert_bytes * share), model.expert_bytes)
        regime = regime_of(own, int(own.total_expert_bytes * share), hardware)
        layer_s = regime.compute_s + regime.launches_s
        for name, overrides in POLICIES.items():
            setting = Setting(
                policy=load_policy("on_demand", overrides),
                capacity=Capacity(text=f"{100 * share:.3g}%", bytes_by_partition=(size,)),
                hardware=hardware,
                seed=trace.seed,
                emulate=model,
            )
            engine = replay(trace, setting, future=future)
            passes = [p for p in engine.ledger.passes if p.phase == "decode"]
            waits = decode_waits(engine.ledger.requests, trace.geometry.num_layers)
            stall_s = waits.link_s * model.top_k / trace.geometry.top_k if waits else 0.0
            missed = sum(p.misses + p.late for p in passes)
            yield {
                "capacity": setting.capacity.text,
                "capacity_bytes": int(own.total_expert_bytes * share),
                "capacity_cycles": regime.cycles,
                "policy": name,
                "decode_miss_rate": missed / sum(p.requests for p in passes),
                "tok_per_s": 1 / (model.num_layers * (layer_s + stall_s)),
                "bound": regime.bound(Waits(stall_s)),
                "transfer_per_layer": regime.transfer_per_layer,
            }

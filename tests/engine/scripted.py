"""Scripted stand-ins for the algorithms, and a machine whose times add up by hand."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from lm_eval_moecache.algorithms.eviction.base import EvictionAlgorithm
from lm_eval_moecache.algorithms.prefetch.base import PrefetchAlgorithm
from lm_eval_moecache.algorithms.registry import find_algorithm
from lm_eval_moecache.engine.setting import Setting
from lm_eval_moecache.engine.virtual.engine import VirtualEngine
from lm_eval_moecache.engine.wall.link import Transfer
from lm_eval_moecache.records.event import DECODE, PREFILL, Event, unique_in_order
from lm_eval_moecache.records.geometry import Draft, Geometry
from lm_eval_moecache.records.hardware import Hardware
from lm_eval_moecache.records.ledger import PassRecord
from lm_eval_moecache.records.sizes import parse_capacity

HUGE = 1e30
Script = Mapping[tuple[int, int], Sequence[int]]


class FixedPrefetch(PrefetchAlgorithm):
    """Proposes a script's keys for (pass, layer)."""

    source: ClassVar[str] = "test"

    def __init__(self, geometry: Geometry, script: Script) -> None:
        super().__init__(geometry)
        self.script = script

    def propose(self, event: Event) -> Sequence[int]:
        return self.script.get((event.pass_index, event.layer), ())


class OldestFirst(EvictionAlgorithm):
    """Evicts in the order of loading, and logs the predictions of resident experts."""

    source: ClassVar[str] = "test"

    def __init__(self, geometry: Geometry, *, seed: int = 0) -> None:
        super().__init__(geometry, seed=seed)
        self.order: dict[int, None] = {}
        self.predicted: list[int] = []

    def on_insert(self, key: int, prefetched: bool) -> None:
        assert key not in self.order, f"{key} came twice"
        self.order[key] = None

    def on_predicted(self, key: int) -> None:
        assert key in self.order, f"{key} is not resident"
        self.predicted.append(key)

    def on_evict(self, key: int) -> None:
        del self.order[key]

    def victim(self, pinned: Container[int], layer: int) -> int | None:
        return next((key for key in self.order if key not in pinned), None)


@dataclass
class Always:
    """Builds one axis by a function of the geometry."""

    make: Callable[[Geometry], Any]

    def build(self, geometry: Geometry, seed: int) -> Any:
        return self.make(geometry)


@dataclass
class ScriptedPolicy:
    """`on_demand` with eviction in the order of loading, unless an axis is replaced."""

    phases: str = "all"
    routing: Always = field(default_factory=lambda: Always(find_algorithm("routing", "standard")))
    prefetch: Always = field(default_factory=lambda: Always(find_algorithm("prefetch", "none")))
    eviction: Always = field(default_factory=lambda: Always(OldestFirst))
    miss: Always = field(default_factory=lambda: Always(find_algorithm("miss", "fetch")))


def prefetching(script: Script) -> ScriptedPolicy:
    return ScriptedPolicy(prefetch=Always(lambda geometry: FixedPrefetch(geometry, script)))


def make_geometry(
    num_layers: int = 3, num_experts: int = 4, top_k: int = 2, **changes: Any
) -> Geometry:
    """Experts of 100 bytes and 200 bytes of dense weights a layer, but for `changes`."""
    defaults = {"expert_bytes": ((100,),) * num_layers, "dense_bytes": (200,) * num_layers}
    sizes = {"num_layers": num_layers, "num_experts": num_experts, "top_k": top_k}
    return Geometry(model="scripted", **{**sizes, **defaults, **changes})


TWO_LEVELS = {"expert_bytes": ((100, 25),), "precision": ("bf16", "int4")}
"""Changes of a geometry of one layer."""


class StillMover:
    """A mover that moves nothing and takes no time."""

    depth = 1

    def fence(self) -> object:
        return None

    def place(self, transfer: Transfer) -> None:
        return

    def begin(self, transfer: Transfer) -> object:
        return None

    def finish(self, token: object) -> float | None:
        return None

    def synchronize(self) -> None:
        return


def make_hardware(**figures: float) -> Hardware:
    """Dense part of a layer 2 s, an expert 1 s, a transfer 1 + 4 = 5 s; nothing else costs."""
    defaults = {"peak_flops": HUGE, "memory_bytes_per_s": 100.0, "memory_bytes": HUGE}
    defaults |= {"link_bytes_per_s": 25.0, "link_latency_s": 1.0, "kernel_overhead_s": 0.0}
    return Hardware(name="by-hand", **{**defaults, **figures})


def make_engine(
    policy: ScriptedPolicy | None = None,
    capacity: object = 4,
    geometry: Geometry | None = None,
    hardware: Hardware | None = None,
    draft: Draft | None = None,
    reads_per_expert: int = 1,
) -> VirtualEngine:
    geometry = geometry or make_geometry()
    setting = Setting(
        policy=policy or ScriptedPolicy(),
        capacity=parse_capacity(capacity, geometry),
        hardware=hardware or make_hardware(),
        draft=draft,
        reads_per_expert=reads_per_expert,
    )
    return VirtualEngine(geometry, setting)


def decode(engine: VirtualEngine, *keys_by_layer: Sequence[int], gates: int = 0) -> PassRecord:
    """Run a pass of one token, layer by layer, and check the accounts after each."""
    record = engine.begin_pass(DECODE, 1)
    for layer, keys in enumerate(keys_by_layer):
        engine.enter(layer, 1)
        scores = np.zeros((1, engine.geometry.num_experts), dtype=np.float32)
        predicted = {layer + 1 + i: scores for i in range(gates)}
        engine.run(Event(record.index, layer, DECODE, 1, list(keys), predicted=predicted))
        engine.check_integrity()
    engine.end_pass()
    engine.check_integrity()
    return record


def prefill_event(record: PassRecord, geometry: Geometry, layer: int, experts: Any) -> Event:
    """Build the event of several tokens from their experts [tokens, top_k]."""
    array = np.asarray(experts, dtype=np.int64)
    keys = unique_in_order(layer, geometry.num_experts, array)
    return Event(record.index, layer, record.phase, len(array), keys, array)


def prefill(engine: VirtualEngine, experts: Any, layer: int = 0) -> PassRecord:
    """Run one layer of a prefill of these experts [tokens, top_k], and check the accounts."""
    record = engine.begin_pass(PREFILL, len(experts))
    engine.enter(layer, len(experts))
    engine.run(prefill_event(record, engine.geometry, layer, experts))
    engine.end_pass()
    engine.check_integrity()
    return record

"""Scripted stand-ins for the algorithms, and a machine whose times add up by hand."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np

from lm_eval_moecache.algorithms.eviction.base import StatefulEviction
from lm_eval_moecache.algorithms.prefetch.base import PrefetchAlgorithm
from lm_eval_moecache.algorithms.registry import find_algorithm
from lm_eval_moecache.engine.engine import Engine
from lm_eval_moecache.engine.kernel.cache import evict
from lm_eval_moecache.engine.kernel.serve import FILL
from lm_eval_moecache.engine.setting import Setting
from lm_eval_moecache.engine.wall.link import Transfer
from lm_eval_moecache.records.event import DECODE, DROPPED, PREFILL, UNSEEN_SCORES, Event
from lm_eval_moecache.records.geometry import Draft, Geometry
from lm_eval_moecache.records.hardware import Hardware
from lm_eval_moecache.records.ledger import PassRecord
from lm_eval_moecache.records.selection import Selection
from lm_eval_moecache.records.sizes import parse_capacity
from lm_eval_moecache.testing import streams

HUGE = 1e30
Script = Mapping[tuple[int, int], Sequence[int]]


class FixedPrefetch(PrefetchAlgorithm):
    """Proposes a script's keys for (pass, layer)."""

    source: ClassVar[str] = "test"

    def __init__(
        self, geometry: Geometry, script: Script, after_layer: bool = False, depth: int = 0
    ) -> None:
        super().__init__(geometry)
        self.script, self.after_layer, self.depth = script, after_layer, depth

    def propose(self, event: Event) -> Sequence[int]:
        return self.script.get((event.pass_index, event.layer), ())


class OldestFirst(StatefulEviction):
    """Evicts in the order of loading, and logs what it is told: a word, then keys or a layer."""

    source: ClassVar[str] = "test"

    def __init__(self, geometry: Geometry, *, seed: int = 0) -> None:
        super().__init__(geometry, seed=seed)
        self.order: dict[int, None] = {}
        self.log: list[tuple[Any, ...]] = []

    def told(self, *words: str) -> list[tuple[Any, ...]]:
        return [entry for entry in self.log if entry[0] in words]

    def on_insert(self, key: int, prefetched: bool) -> None:
        assert key not in self.order, f"{key} came twice"
        self.order[key] = None
        self.log.append(("insert", key))

    def on_predicted(self, key: int) -> None:
        assert key in self.order, f"{key} is not resident"
        self.log.append(("predicted", key))

    def on_executed(self, layer: int, keys: Sequence[int]) -> None:
        self.log.append(("executed", layer, [*keys]))

    def on_evict(self, key: int) -> None:
        del self.order[key]
        self.log.append(("evict", key))

    def victim(self, pinned: Container[int], layer: int) -> int | None:
        return next((key for key in self.order if key not in pinned), None)


def make_geometry(
    num_layers: int = 3, num_experts: int = 4, top_k: int = 2, **changes: Any
) -> Geometry:
    """Experts of 100 bytes and 200 bytes of dense weights a layer, but for `changes`."""
    return replace(streams.make_geometry(num_layers, num_experts, top_k), **changes)


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


def make_setting(
    script: Script | None = None,
    capacity: object = 4,
    geometry: Geometry | None = None,
    hardware: Hardware | None = None,
    *,
    phases: str = "all",
    draft: Draft | None = None,
    reads_per_expert: int = 1,
    **axes: Callable[[Geometry], Any],
) -> Setting:
    """Return a setting on demand, or of the prefetches of a script, with the oldest evicted first.

    Each of `axes` is made by a function of the geometry instead.
    """
    none = find_algorithm("prefetch", "none")
    makers: dict[str, Callable[[Geometry], Any]] = {
        "routing": find_algorithm("routing", "standard"),
        "prefetch": none if script is None else partial(FixedPrefetch, script=script),
        "eviction": OldestFirst,
        "miss": find_algorithm("miss", "fetch"),
    }
    built = {
        axis: SimpleNamespace(
            build=lambda geometry, seed, make=make: make(geometry),
            name=f"scripted {axis}",
            algorithm=make if isinstance(make, type) else FixedPrefetch,
        )
        for axis, make in (makers | axes).items()
    }
    policy: Any = SimpleNamespace(phases=phases, **built)
    return Setting(
        policy=policy,
        capacity=parse_capacity(
            f"{capacity}experts" if isinstance(capacity, int) else capacity,
            geometry or make_geometry(),
        ),
        hardware=hardware or make_hardware(),
        draft=draft,
        reads_per_expert=reads_per_expert,
    )


def make_engine(
    script: Script | None = None,
    capacity: object = 4,
    geometry: Geometry | None = None,
    hardware: Hardware | None = None,
    **more: Any,
) -> Engine:
    """Return an engine of `make_setting`."""
    geometry = geometry or make_geometry()
    return Engine(geometry, make_setting(script, capacity, geometry, hardware, **more))


def fill(engine: Engine, keys: Sequence[int]) -> None:
    """Empty the caches, and fill them with these keys at no cost."""
    for key in [key for pool in engine.pools for key in pool.resident]:
        evict(engine.memory.run, key)
    engine._settle(FILL, keys=np.array(keys, np.int64))


def expect(record: object, figures: str) -> None:
    """Compare figures of a record, written as `end_s=18 stall_s=10+1 late=1`."""
    pairs = (pair.split("=") for pair in figures.split())
    expected = {name: sum(map(float, value.split("+"))) for name, value in pairs}
    told = {name: getattr(record, name) for name in expected}
    assert told == expected, f"{told}, not {expected}"


def experts_of(engine: Engine, layer: int, keys: Sequence[int], tokens: int = 1) -> Any:
    """Return experts [tokens, top_k] of a layer that need these keys; the rest is dropped."""
    experts = np.full((tokens, engine.geometry.top_k), DROPPED)
    assert len(keys) <= experts.size, "more keys than the tokens have experts"
    experts.flat[: len(keys)] = np.array(keys, np.int64) - layer * engine.geometry.num_experts
    return experts


def decode(
    engine: Engine,
    *keys_by_layer: Sequence[int],
    says: str = "",
    phase: str = DECODE,
    tokens: int = 1,
) -> PassRecord:
    """Run a pass layer by layer and check the accounts after each, and what its record `says`."""
    engine.begin_pass(phase, tokens)
    for layer, keys in enumerate(keys_by_layer):
        run_layer(engine, experts_of(engine, layer, keys, tokens), layer)
        engine.check_integrity()
    record = engine.end_pass()
    engine.check_integrity()
    expect(record, says)
    return record


def run_layer(
    engine: Engine, experts: Any, layer: int = 0, weights: Any = UNSEEN_SCORES
) -> Selection | None:
    """Serve a layer of the pass in progress for experts [tokens, top_k]; return their change."""
    chosen = np.asarray(experts, dtype=np.int64)
    event = Event(layer, engine.alone.phase, [0], engine.geometry.num_experts, chosen, weights)
    return engine.alone.choose(streams.batch_of(event))


def prefill(
    engine: Engine,
    experts: Any,
    says: str = "",
    phase: str = PREFILL,
    weights: Any = UNSEEN_SCORES,
) -> Selection | None:
    """Run the first layer of a pass of these experts [tokens, top_k], checked as by `decode`.

    Return the changed selection, if any.
    """
    engine.begin_pass(phase, len(experts))
    selection = run_layer(engine, experts, weights=weights)
    record = engine.end_pass()
    engine.check_integrity()
    expect(record, says)
    return selection

"""Conservation laws over random runs, and a slow obvious oracle of the path without prefetch."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lm_eval_moecache.algorithms.eviction.base import EvictionAlgorithm
from lm_eval_moecache.algorithms.miss.base import MissAlgorithm, Resolution
from lm_eval_moecache.algorithms.policy import Choice
from lm_eval_moecache.algorithms.prefetch.base import PrefetchAlgorithm
from lm_eval_moecache.algorithms.registry import algorithm_names, find_algorithm, parameters_of
from lm_eval_moecache.engine.engine import Engine, Setting
from lm_eval_moecache.records.event import DECODE, PREFILL, Event, Fetch
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.ledger import PassRecord
from lm_eval_moecache.records.sizes import parse_capacity
from tests.engine.scripted import (
    Always,
    OldestFirst,
    ScriptedPolicy,
    make_engine,
    make_geometry,
    make_hardware,
    on_wave,
    prefill_event,
)

# Of those that look at logits, which the events here have not, the contracts hold the books.
ONLINE_EVICTIONS = [
    name
    for name in algorithm_names("eviction")
    if not ((found := find_algorithm("eviction", name)).is_offline or found.uses_logits)
]


class RandomPrefetch(PrefetchAlgorithm):
    """Proposes random keys of random layers, some of them resident or pending."""

    source: ClassVar[str] = "test"

    def __init__(self, geometry: Geometry, *, seed: int = 0) -> None:
        super().__init__(geometry, seed=seed)
        self._rng = np.random.default_rng(seed)

    def propose(self, event: Event) -> Sequence[int]:
        num_keys = self.geometry.num_layers * self.geometry.num_experts
        return self._rng.permutation(num_keys)[: self._rng.integers(0, 4)].tolist()


class RandomLevels(MissAlgorithm):
    """Demands random levels of absent and of resident experts."""

    source: ClassVar[str] = "test"
    uses_ladder: ClassVar[bool] = True
    upgrade = True

    def __init__(self, geometry: Geometry, seed: int) -> None:
        super().__init__(geometry)
        self._rng = np.random.default_rng(seed)

    def resolve(
        self, event: Event, absent: Sequence[int], resident: Mapping[int, int]
    ) -> Resolution | None:
        wanted = zip(event.keys, self.prefetch_levels(event, 0, event.keys), strict=True)
        return Resolution([Fetch(k, level) for k, level in wanted if level < resident.get(k, 9)])

    def prefetch_levels(self, event: Event, layer: int, keys: Sequence[int]) -> Sequence[int]:
        levels: list[int] = self._rng.integers(0, 3, len(keys)).tolist()
        return levels


class Watched(EvictionAlgorithm):
    """Passes everything on to an eviction algorithm and checks what happens on the way."""

    source: ClassVar[str] = "test"

    def __init__(self, inner: EvictionAlgorithm) -> None:
        super().__init__(inner.geometry, seed=inner.seed)
        self.inner = inner
        self.uses_weights = inner.uses_weights  # type: ignore[misc]
        # Where levels change, an expert leaves to come back at a better one.
        self.upgrades = len(inner.geometry.precision) > 1
        self.resident: set[int] = set()
        self.serving: set[int] = set()
        """Keys of the event in progress; empty between events."""

    def on_pass(self, pass_index: int) -> None:
        self.inner.on_pass(pass_index)

    def on_insert(self, key: int, prefetched: bool) -> None:
        assert key not in self.resident
        self.resident.add(key)
        self.inner.on_insert(key, prefetched)

    def on_event(self, event: Event) -> None:
        self.inner.on_event(event)

    def on_predicted(self, key: int) -> None:
        assert key in self.resident
        self.inner.on_predicted(key)

    def on_evict(self, key: int) -> None:
        self.resident.remove(key)
        if key in self.serving and not self.upgrades:
            others = self.resident - self.serving
            assert not others, f"{key} of the current event left although {others} could"
        self.inner.on_evict(key)

    def victim(self, pinned: Container[int], layer: int) -> int | None:
        chosen = self.inner.victim(pinned, layer)
        free = {key for key in self.resident if key not in pinned}
        assert chosen in free if free else chosen is None, f"{chosen} of {free}"
        return chosen


@dataclass
class Run:
    """An engine with its watched pools, driven by random events."""

    engine: Engine
    pools: list[Watched]

    def serve(self, phase: str, experts_by_layer: list[np.ndarray]) -> PassRecord:
        engine, geometry = self.engine, self.engine.geometry
        record = engine.begin_pass(phase, len(experts_by_layer[0]))
        for layer, experts in enumerate(experts_by_layer):
            before = engine.clock.now
            engine.enter(layer, len(experts))
            event = prefill_event(record, geometry, layer, experts)
            weights = np.linspace(1, 0.1, experts.size, dtype=np.float32)
            event = event._replace(weights=weights.reshape(experts.shape))
            pool = self.pools[layer if len(self.pools) > 1 else 0]
            pool.serving = set(event.keys)
            executed: list[int] = []

            def execute(keys: Sequence[int], pool: Watched = pool, done: Any = executed) -> None:
                assert keys
                assert set(keys) <= pool.resident, "executed before it was there"
                done.extend(keys)

            on_wave(engine, execute)
            plan = engine.run(event)
            assert sorted(executed) == sorted(event.keys), "each expert is executed once"
            if plan.levels is not None:
                assert set(plan.levels) == set(event.keys)
                is_exact = phase == PREFILL and engine.setting.policy.phases == DECODE
                assert not (is_exact and any(plan.levels.values()))
            pool.serving = set()
            assert engine.clock.now >= before
            engine.check_integrity()
        engine.end_pass()
        return record


LADDER = {"expert_bytes": ((100, 50, 25),) * 3, "precision": ("int8", "int4", "int2")}


def make_run(
    seed: int, eviction: str, capacity: str, prefetch: bool, ladder: bool, phases: str
) -> Run:
    geometry = make_geometry(num_layers=3, num_experts=6, top_k=2, **(LADDER if ladder else {}))
    pools: list[Watched] = []

    def make_eviction(geometry: Geometry) -> Watched:
        algorithm = find_algorithm("eviction", eviction)
        parameters = {k: p.default for k, p in parameters_of(algorithm).items()}
        choice = Choice(axis="eviction", name=eviction, algorithm=algorithm, parameters=parameters)
        pools.append(Watched(choice.build(geometry, seed)))
        return pools[-1]

    policy = ScriptedPolicy(phases, eviction=Always(make_eviction))
    if ladder:
        policy.miss = Always(lambda geometry: RandomLevels(geometry, seed))
    if prefetch:
        policy.prefetch = Always(lambda geometry: RandomPrefetch(geometry, seed=seed))
    setting = Setting(
        policy=policy,
        capacity=parse_capacity(capacity, geometry),
        hardware=make_hardware(kernel_overhead_s=0.01),
    )
    return Run(Engine(geometry, setting), pools)


def random_experts(rng: np.random.Generator, geometry: Geometry, num_tokens: int) -> np.ndarray:
    """Return [tokens, top_k] experts, different within a token."""
    rows = [rng.permutation(geometry.num_experts)[: geometry.top_k] for _ in range(num_tokens)]
    return np.stack(rows)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    eviction=st.sampled_from(ONLINE_EVICTIONS),
    capacity=st.sampled_from(["1", "2", "5", "9", "130B", "275B", "100%", "1/layer", "3/layer"]),
    prefetch=st.booleans(),
    ladder=st.booleans(),
    phases=st.sampled_from(["all", DECODE]),
)
def test_nothing_is_lost_or_made_up(
    seed: int, eviction: str, capacity: str, prefetch: bool, ladder: bool, phases: str
) -> None:
    run = make_run(seed, eviction, capacity, prefetch, ladder, phases)
    engine, rng = run.engine, np.random.default_rng(seed)
    for step in range(8):
        count = 4 if step % 4 == 0 else 1
        experts = [random_experts(rng, engine.geometry, count) for _ in range(3)]
        run.serve(PREFILL if count > 1 else DECODE, experts)
    passes = engine.ledger.passes
    for p in passes:
        assert p.hits + p.late + p.misses == p.requests
        assert 0 <= p.collisions <= p.misses
        assert 0 <= p.prefetch_hits <= p.hits
        assert p.predicted_right <= min(p.predicted, p.predictable)
        assert 0 <= p.token_misses <= p.token_requests
        assert 0 <= p.stall_s <= p.duration_s + 1e-9
        assert 0 <= p.low_precision <= p.executed
    assert all(a.end_s == b.start_s for a, b in pairwise(passes))
    assert sum(p.bytes_moved for p in passes) == engine.link.bytes_moved
    assert sum(p.link_busy_s for p in passes) <= engine.link.busy_until + 1e-9
    loads = sum(pool.loads for pool in engine.pools)
    evictions = sum(pool.evictions for pool in engine.pools)
    held = sum(len(pool.resident) + len(pool.arriving) for pool in engine.pools)
    assert loads - evictions - sum(pool.replaced for pool in engine.pools) == held
    assert ladder or loads * 100 == engine.link.bytes_moved
    assert sum(p.evictions for p in passes) == evictions
    for pool, watched in zip(engine.pools, run.pools, strict=True):
        assert pool.peak_bytes <= pool.capacity_bytes
        assert set(pool.resident) == watched.resident
        assert pool.unused_prefetches <= set(pool.resident)
    if not (prefetch or ladder):
        assert sum(p.misses for p in passes) == loads
        assert sum(p.late for p in passes) == 0


@dataclass
class Counted:
    hits: int = 0
    misses: int = 0
    collisions: int = 0
    evictions: int = 0
    now: float = 0.0


def obvious(events: list[list[list[int]]], slots: int) -> list[Counted]:
    """Serve passes of layers of keys from plain lists, oldest load first out; times of `scripted`.

    A dense part takes 2 s, an expert 1 s, a transfer 5 s.
    """
    resident: list[int] = []
    now = 0.0
    found = []
    for layers in events:
        count = Counted()
        gone: list[int] = []
        for keys in layers:
            now += 2
            count.hits += len([key for key in keys if key in resident])
            missing = [key for key in keys if key not in resident]
            count.misses += len(missing)
            count.collisions += len([key for key in missing if key in gone])
            waiting = list(keys)
            for key in missing:
                if len(resident) == slots:
                    free = [old for old in resident if old not in waiting]
                    if not free:
                        ready = [k for k in waiting if k in resident]
                        now += 1 * len(ready)
                        waiting = [k for k in waiting if k not in ready]
                        free = list(resident)
                    resident.remove(free[0])
                    gone.append(free[0])
                    count.evictions += 1
                now += 5
                resident.append(key)
            now += 1 * len(waiting)
        count.now = now
        found.append(count)
    return found


keys_of_a_layer = st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True)


@settings(max_examples=100, deadline=None)
@given(
    passes=st.lists(st.lists(keys_of_a_layer, min_size=3, max_size=3), min_size=1, max_size=6),
    slots=st.integers(1, 12),
)
def test_without_prefetch_counts_and_times_are_those_of_the_obvious_way(
    passes: list[list[list[int]]], slots: int
) -> None:
    by_key = [[[4 * i + e for e in experts] for i, experts in enumerate(p)] for p in passes]
    engine = make_engine(capacity=slots)
    for layers, expected in zip(by_key, obvious(by_key, slots), strict=True):
        record = engine.begin_pass(PREFILL, 1)
        for layer, keys in enumerate(layers):
            engine.enter(layer, 1)
            engine.run(Event(record.index, layer, PREFILL, 1, list(keys)))
        engine.end_pass()
        engine.check_integrity()
        found = Counted(
            record.hits, record.misses, record.collisions, record.evictions, record.end_s
        )
        assert found == expected
    assert isinstance(engine.pools[0].eviction, OldestFirst)

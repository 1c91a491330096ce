"""An independent checker of the engine on random models, ladders, algorithms and links, which
observes it through public seams only and trusts none of its numbers.

Shares no code with the engine's cache, link or clock: it tracks residents from the calls to the
eviction algorithm, computes bytes and seconds itself, and compares after every event.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np

from lm_eval_moecache.algorithms.miss.base import MissAlgorithm, Resolution
from lm_eval_moecache.algorithms.policy import Policy, load_policy
from lm_eval_moecache.algorithms.prefetch.base import PrefetchAlgorithm
from lm_eval_moecache.algorithms.registry import AXES, algorithm_names, find_algorithm
from lm_eval_moecache.engine.engine import VirtualEngine
from lm_eval_moecache.engine.setting import Setting
from lm_eval_moecache.records.event import DECODE, PREFILL, Event, Fetch
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.hardware import Hardware
from lm_eval_moecache.records.sizes import parse_capacity
from lm_eval_moecache.testing.streams import make_event
from tests.engine.scripted import Always

PASSES = 240


class Violation(AssertionError):
    """The engine did something that cannot be right."""


def must(holds: object, text: str) -> None:
    if not holds:
        raise Violation(text)


@dataclass
class Watch:
    """Wraps the eviction algorithm of one pool, logging and checking every call to it."""

    inner: Any
    resident: dict[int, int] = field(default_factory=dict)
    """Key -> number of the event in which it was inserted."""
    used: dict[int, int] = field(default_factory=dict)
    inserted: list[int] = field(default_factory=list)
    seen: set[int] = field(default_factory=set)
    """Keys that were resident at some time during the current event."""
    serving: Container[int] = ()
    """Keys of the current event, which leave last where all are loaded unchanged."""
    number: int = 0
    order: str = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def begin(self, number: int, keys: Container[int]) -> None:
        self.number, self.inserted, self.seen = number, [], set(self.resident)
        self.serving = keys

    def on_insert(self, key: int, prefetched: bool) -> None:
        must(key not in self.resident, f"{key} came although it was there")
        self.resident[key] = self.used[key] = self.number
        self.inserted.append(key)
        self.seen.add(key)
        self.inner.on_insert(key, prefetched)

    def on_predicted(self, key: int) -> None:
        must(key in self.resident, f"{key} is wished for here although it is not there")
        self.inner.on_predicted(key)

    def on_evict(self, key: int) -> None:
        must(key in self.resident, f"{key} left although it was not there")
        del self.resident[key], self.used[key]
        others = (
            [] if key not in self.serving else [k for k in self.resident if k not in self.serving]
        )
        must(not others, f"{key} of the current event left although {others} could")
        self.inner.on_evict(key)

    def victim(self, pinned: Container[int], layer: int) -> int | None:
        free = [key for key in self.resident if key not in pinned]
        chosen: int | None = self.inner.victim(pinned, layer)
        if not free:
            must(chosen is None, f"{chosen} chosen, though all that is resident is pinned")
            return chosen
        must(chosen in self.resident, f"{chosen} chosen, which is not resident")
        assert chosen is not None
        must(chosen not in pinned, f"{chosen} chosen, which is pinned")
        if self.order == "fifo":
            must(chosen == free[0], f"fifo chose {chosen}, {free[0]} came first")
        if self.order == "lru":
            oldest = min(self.used[key] for key in free)
            must(self.used[chosen] == oldest, f"lru chose {chosen}, others waited longer")
        return chosen


class RandomPrefetch(PrefetchAlgorithm):
    """Proposes random keys of random layers, some of them resident or pending."""

    source = "test"

    def __init__(self, geometry: Geometry, seed: int) -> None:
        super().__init__(geometry, seed=seed)
        self._rng = np.random.default_rng(seed)

    def propose(self, event: Event) -> Sequence[int]:
        num_keys = self.geometry.num_layers * self.geometry.num_experts
        return self._rng.permutation(num_keys)[: self._rng.integers(0, 4)].tolist()


class RandomLevels(MissAlgorithm):
    """Demands absent and resident experts at random levels."""

    source = "test"
    uses_ladder = upgrade = True

    def __init__(self, geometry: Geometry, seed: int) -> None:
        super().__init__(geometry)
        self._rng = np.random.default_rng(seed)

    def resolve(
        self, event: Event, absent: Sequence[int], resident: Mapping[int, int]
    ) -> Resolution | None:
        demands = zip(event.keys, self.prefetch_levels(event, 0, event.keys), strict=True)
        return Resolution([Fetch(k, level) for k, level in demands if level < resident.get(k, 9)])

    def prefetch_levels(self, event: Event, layer: int, keys: Sequence[int]) -> Sequence[int]:
        levels: list[int] = self._rng.integers(0, len(self.geometry.precision), len(keys)).tolist()
        return levels


@dataclass
class Case:
    """One random run, determined by its seed."""

    seed: int
    rng: np.random.Generator
    geometry: Geometry
    policy: Policy
    capacity: str
    hardware: Hardware
    is_wild: bool
    """Whether prefetches and, on a ladder, levels are random."""

    def __str__(self) -> str:
        names = " ".join(f"{axis}={getattr(self.policy, axis).name}" for axis in AXES)
        return f"seed={self.seed} {names} phases={self.policy.phases} capacity={self.capacity}"


def draw(seed: int) -> Case:
    """Draw a case; redraw incompatible algorithms and those that need an artifact."""
    rng = np.random.default_rng(seed)
    while True:
        try:
            case = _drawn(seed, rng)
            for axis in AXES:
                getattr(case.policy, axis).build(case.geometry, seed)
            parse_capacity(case.capacity, case.geometry)
        except ValueError:
            continue
        return case


def _drawn(seed: int, rng: np.random.Generator) -> Case:
    num_layers, num_experts = int(rng.integers(1, 7)), int(rng.integers(2, 25))
    top_k = int(rng.integers(1, min(5, num_experts) + 1))
    num_levels = int(rng.choice([1, 1, 1, 2, 3]))
    sizes = rng.integers(64, 4096, num_layers)
    ladder = [tuple(int(size) >> level for level in range(num_levels)) for size in sizes]
    geometry = Geometry(
        model="drawn",
        num_layers=num_layers,
        num_experts=num_experts,
        top_k=top_k,
        expert_bytes=tuple(ladder),
        dense_bytes=tuple(int(n) for n in rng.integers(0, 5000, num_layers)),
        precision=("int8", "int4", "int2")[:num_levels],
    )
    overrides = {axis: str(rng.choice(names)) for axis, names in _online().items()}
    kind = rng.random()
    if kind < 0.5:  # accounts are exact without prefetching and lossy algorithms
        overrides |= {"routing": "standard", "prefetch": "none", "miss": "fetch"}
    if rng.random() < 0.3:
        overrides["phases"] = "decode"
    hardware = Hardware(
        name="drawn",
        peak_flops=float(10 ** rng.uniform(3, 15)),
        memory_bytes_per_s=float(10 ** rng.uniform(3, 13)),
        link_bytes_per_s=float(10 ** rng.uniform(2, 12)),
        link_latency_s=float(rng.choice([0.0, 10 ** rng.uniform(-7, 0)])),
        kernel_overhead_s=float(rng.choice([0.0, 1e-6, 1e-3])),
        memory_bytes=1e12,
        host_flops=float(10 ** rng.uniform(3, 13)),
        host_memory_bytes_per_s=float(10 ** rng.uniform(3, 12)),
    )
    forms = [f"{rng.integers(1, 120)}%", f"{rng.integers(1, num_experts + 1)}/layer"]
    forms += [str(rng.integers(1, num_layers * num_experts + 1)), f"{rng.integers(64, 50000)}B"]
    capacity = str(rng.choice(forms))
    policy = load_policy("on_demand", overrides)
    return Case(seed, rng, geometry, policy, capacity, hardware, is_wild=kind < 0.2)


@cache
def _online() -> dict[str, list[str]]:
    """Return the algorithms that run without a future or a draft."""

    def runs(axis: str, name: str) -> bool:
        kind = find_algorithm(axis, name)
        return not (getattr(kind, "is_offline", False) or getattr(kind, "needs_draft", False))

    return {axis: [n for n in algorithm_names(axis) if runs(axis, n)] for axis in AXES}


class Shadow:
    """Drives one case and checks it; `events` counts the events served."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.watches: list[Watch] = []
        policy, geometry = case.policy, case.geometry
        composed: Any = SimpleNamespace(
            **{name: getattr(policy, name) for name in ("phases", *AXES)}
        )
        composed.eviction = Always(self._watched)
        if case.is_wild:
            composed.prefetch = Always(lambda geometry: RandomPrefetch(geometry, case.seed))
            if len(geometry.precision) > 1:
                composed.miss = Always(lambda geometry: RandomLevels(geometry, case.seed))
        capacity = parse_capacity(case.capacity, geometry)
        self.limits = capacity.bytes_by_partition
        setting = Setting(
            policy=composed, capacity=capacity, hardware=case.hardware, seed=case.seed
        )
        self.engine = VirtualEngine(geometry, setting)
        names = (policy.routing.name, policy.prefetch.name, policy.miss.name)
        self.is_plain = names == ("standard", "none", "fetch") and not case.is_wild
        self.events = 0
        self.executed: list[int] = []
        self.engine.on_wave = self._wave

    def _watched(self, geometry: Geometry) -> Watch:
        choice = self.case.policy.eviction
        self.watches.append(Watch(choice.build(geometry, self.case.seed), order=choice.name))
        return self.watches[-1]

    def _wave(self, keys: Sequence[int]) -> None:
        self.executed += keys

    def run(self, passes: int = PASSES) -> int:
        """Serve the passes of a case; return the number of events. Raises Violation."""
        rng, unrecorded = self.case.rng, 0
        for index in range(passes):
            if index % 6:
                self._pass(DECODE, int(rng.choice([1, 1, 1, 1, 2, 5])))
            else:
                self._pass(PREFILL, int(rng.integers(1, 9)))
            if rng.random() < 0.03:
                before = self._evictions()
                self.engine.reset_cache()
                unrecorded += self._evictions() - before
                must(not any(w.resident for w in self.watches), "a reset cache holds experts")
        records, link = self.engine.ledger.passes, self.engine.link
        must(sum(r.link_busy_s for r in records) <= link.busy_until * (1 + 1e-9), "a busier link")
        recorded = sum(r.evictions for r in records)
        must(recorded + unrecorded == self._evictions(), "evictions are not the pools'")
        return self.events

    def _evictions(self) -> int:
        return sum(pool.evictions for pool in self.engine.pools)

    def _pass(self, phase: str, num_tokens: int) -> None:
        engine, geometry = self.engine, self.case.geometry
        moved, begin = engine.link.bytes_moved, engine.clock.now
        record = engine.begin_pass(phase, num_tokens)
        shape = (geometry.num_layers, num_tokens, geometry.num_experts)
        logits = self.case.rng.normal(size=shape).astype(np.float32) * 3
        for layer, event in enumerate(self._made(record.index, phase, logits)):
            engine.enter(layer, num_tokens)
            self._event(event, record)
            self.events += 1
        engine.end_pass()
        after = engine.clock.now
        must(record.start_s == begin and record.end_s == after, "a pass' times are not the clock's")
        moved = engine.link.bytes_moved - moved
        must(record.bytes_moved == moved, "a pass' bytes are not the link's")
        self._check_counts(record, phase, num_tokens)

    def _made(self, index: int, phase: str, logits: Any) -> Iterator[Event]:
        geometry, depth = self.case.geometry, self.engine.depth
        for layer in range(geometry.num_layers):
            ahead = range(layer + 1, min(layer + 1 + depth, geometry.num_layers))
            predicted = {at: logits[at] * 0.7 + logits[at].mean() for at in ahead}
            yield make_event(geometry, index, layer, logits[layer], phase, predicted)

    def _event(self, event: Event, record: Any) -> None:
        engine = self.engine
        place = event.layer if len(self.watches) > 1 else 0
        watch, pool = self.watches[place], engine.pools[place]
        policy, uses_host = self.case.policy, self.case.policy.miss.algorithm.uses_host
        stays = policy.is_lossless and not uses_host and len(self.case.geometry.precision) == 1
        watch.begin(self.events, event.keys if stays else ())
        self.executed.clear()
        started = engine.clock.now
        counts = (record.requests, record.hits, record.misses, record.late, record.stall_s)
        before, resident = engine.link.bytes_moved, set(watch.resident)
        plan = engine.run(event)
        watch.serving = ()
        choice = plan.selection
        must(engine.clock.now >= started, "the clock went back")
        must(math.isfinite(engine.clock.now), "the clock is not finite")
        executed = self._executed(event, choice)
        if not uses_host:
            must(executed <= watch.seen, f"{executed - watch.seen} ran without being there")
            must(sorted(self.executed) == sorted(executed), "an expert ran twice, or never")
        if plan.levels is not None:
            must(plan.levels.keys() == executed, "levels of others than were executed")
            is_exact = event.phase == PREFILL and policy.phases == DECODE
            must(not (is_exact and any(plan.levels.values())), "an exact pass at a lower precision")
        must(pool.resident.keys() == watch.resident.keys(), "the residents are not those told")
        for key in executed & watch.resident.keys():
            watch.used[key] = self.events
        if self.is_plain:
            self._plain(event, record, counts, watch, pool, before, resident)

    def _plain(
        self, event: Event, record: Any, counts: Any, watch: Watch, pool: Any, before: int,
        resident: set[int],
    ) -> None:  # fmt: skip
        """Check every number, all of which are known without prefetching and lossy algorithms."""
        needed = set(event.keys)
        num_hits = len(needed & resident)
        requests, hits, misses, late, stall_s = counts
        must(record.requests - requests == len(needed), "requests are not the event's experts")
        must(record.hits - hits == num_hits, f"hits are not the {num_hits} that were there")
        must(record.misses - misses == len(needed) - num_hits, "misses are not those that were not")
        must(record.late == late, "late without prefetching")
        must(sorted(watch.inserted) == sorted(needed - resident), "loads are not the misses")
        size = self._size(event.keys[0], 0)
        moved = (len(needed) - num_hits) * size
        must(self.engine.link.bytes_moved - before == moved, "bytes are not those of the misses")
        hardware = self.case.hardware
        transfer_s = hardware.link_latency_s + size / hardware.link_bytes_per_s
        waited = (len(needed) - num_hits) * transfer_s
        added_s = record.stall_s - stall_s
        must(math.isclose(added_s, waited, rel_tol=1e-6, abs_tol=1e-9 * self.engine.clock.now),
             f"waited {added_s} s for transfers of {waited} s")  # fmt: skip

    def _executed(self, event: Event, choice: Any) -> set[int]:
        base = event.layer * self.case.geometry.num_experts
        if choice is None:
            return set(event.keys)
        must(not self.case.policy.is_lossless, "a lossless policy changed a selection")
        experts = np.asarray(choice.experts)
        keep = np.ones(experts.shape, dtype=bool) if choice.keep is None else choice.keep
        keep = np.asarray(keep) & (experts >= 0)
        must(experts.shape == (event.num_tokens, self.case.geometry.top_k), "a selection's shape")
        must((experts[keep] < self.case.geometry.num_experts).all(), "an expert that is none")
        for row, kept_row in zip(experts, keep, strict=True):
            chosen = row[kept_row].tolist()
            must(len(set(chosen)) == len(chosen), f"one expert twice for a token: {chosen}")
        return {base + int(e) for e in experts[keep]}

    def _check_counts(self, record: Any, phase: str, num_tokens: int) -> None:
        top_k, layers = self.case.geometry.top_k, self.case.geometry.num_layers
        must(record.hits + record.late + record.misses == record.requests, "hits, late and misses")
        must(record.token_requests == num_tokens * top_k * layers, "assignments of a pass")
        for name in ("token_misses", "dropped"):
            must(0 <= getattr(record, name) <= record.token_requests, name)
        for name in ("substituted", "unfaithful", "low_precision"):
            must(0 <= getattr(record, name) <= record.executed, name)
        must(0 <= record.collisions <= record.misses, "collisions")
        must(0 <= record.prefetch_hits <= record.hits, "prefetch hits")
        right = record.predicted_right
        must(right <= min(record.predicted, record.predictable), "predicted right")
        must(0 <= record.stall_s <= record.duration_s * (1 + 1e-9) + 1e-12, "stall beyond the pass")
        policy = self.case.policy
        if policy.is_lossless or (policy.phases == "decode" and phase == PREFILL):
            lost = (record.dropped, record.substituted, record.unfaithful)
            must(lost == (0, 0, 0), f"a lossless pass lost {lost}")
        for watch, pool, limit in zip(self.watches, self.engine.pools, self.limits, strict=True):
            must(pool.resident.keys() == watch.resident.keys(), "the residents are not those told")
            levels = [*pool.resident.items(), *pool.arriving.items()]
            must(pool.unused_prefetches <= watch.resident.keys(), "an unused prefetch is not there")
            held_bytes = sum(self._size(key, level) for key, level in levels)
            must(held_bytes <= limit, f"{held_bytes} bytes in a cache of {limit}")
            must(pool.peak_bytes <= limit, f"once {pool.peak_bytes} bytes in a cache of {limit}")
        self.engine.check_integrity()

    def _size(self, key: int, level: int) -> int:
        return self.case.geometry.expert_bytes[key // self.case.geometry.num_experts][level]


def run_case(seed: int, passes: int = PASSES) -> int:
    """Run the case of a seed; return its events. Violation names the case."""
    case = draw(seed)
    try:
        return Shadow(case).run(passes)
    except Violation as error:
        raise Violation(f"{case}: {error}") from error
    except Exception as error:
        raise Violation(f"{case}: {type(error).__name__}: {error}") from error

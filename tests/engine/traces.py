"""Small routing traces for tests: generated rows, and trace files of them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lm_eval_moecache.algorithms.policy import load_policy
from lm_eval_moecache.algorithms.registry import algorithm_names, find_algorithm
from lm_eval_moecache.engine.engine import Engine
from lm_eval_moecache.engine.replay import replay
from lm_eval_moecache.engine.setting import Setting
from lm_eval_moecache.records.arrays import softmax
from lm_eval_moecache.records.event import DECODE, PHASES, PREFILL, Event
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.hardware import Hardware
from lm_eval_moecache.records.ledger import RequestRecord
from lm_eval_moecache.records.real_model import RealModel
from lm_eval_moecache.records.sizes import parse_capacity
from lm_eval_moecache.testing.streams import make_event
from lm_eval_moecache.trace.future import Future
from lm_eval_moecache.trace.header import Header
from lm_eval_moecache.trace.recorder import TraceWriter
from lm_eval_moecache.trace.trace import Columns, Predicted, Trace, build_trace
from tests.engine.scripted import make_geometry


def geometry_of(sizes: Sequence[int], num_experts: int, top_k: int) -> Geometry:
    """Return a geometry with an expert's bytes in each layer, and no dense weights."""
    expert_bytes, dense_bytes = tuple((int(size),) for size in sizes), (0,) * len(sizes)
    changes = {"expert_bytes": expert_bytes, "dense_bytes": dense_bytes}
    return make_geometry(len(sizes), num_experts, top_k, **changes)


GEOMETRY = replace(
    geometry_of((1000, 1500, 1000), 8, 2), model="generated", dense_bytes=(300, 300, 700)
)
HARDWARE = Hardware(
    name="test",
    peak_flops=1e9,
    memory_bytes_per_s=1e8,
    link_bytes_per_s=1e7,
    link_latency_s=1e-5,
    kernel_overhead_s=1e-7,
    memory_bytes=1e9,
    host_flops=1e9,
    host_memory_bytes_per_s=5e7,
)


def setting(policy: str, capacity: str, seed: int = 0, **overrides: object) -> Setting:
    axes = {key.replace("__", "."): value for key, value in overrides.items()}
    return setting_for(GEOMETRY, capacity, axes, policy, seed=seed)


def setting_for(
    trace: Trace | Geometry,
    capacity: object,
    axes: Mapping[str, object] | None = None,
    policy: str = "on_demand",
    emulate: RealModel | None = None,
    **rest: Any,
) -> Setting:
    """Return the setting of a replay of this trace, or of a model of this geometry."""
    geometry: Geometry = getattr(trace, "geometry", trace)
    size = f"{capacity}experts" if isinstance(capacity, int) else capacity
    return Setting(
        policy=load_policy(policy, axes),
        capacity=parse_capacity(size, emulate.emulated_by(geometry) if emulate else geometry),
        emulate=emulate,
        **{"hardware": HARDWARE, **rest},
    )


ON_DEMAND_EVICTIONS = [
    name
    for name in algorithm_names("eviction")
    if "fetch" in find_algorithm("eviction", name).pairs_with.get("miss", ["fetch"])
]
"""The evictions that pair with `miss=fetch`."""


def events(seed: int, num_requests: int = 3, num_decodes: int = 5) -> Iterator[tuple[Event, int]]:
    """Yield the events of some generated requests, each with the number of its request."""
    rng = np.random.default_rng(seed)
    steps = product(range(num_requests), range(num_decodes + 1))
    for pass_index, (request, step) in enumerate(steps):
        phase, num_tokens = (DECODE, 1) if step else (PREFILL, 4)
        for layer in range(GEOMETRY.num_layers):
            ahead = range(layer, min(layer + 2, GEOMETRY.num_layers))
            scores = {at: rng.normal(size=(num_tokens, 8)).astype(np.float16) for at in ahead}
            logits = scores.pop(layer)
            yield make_event(GEOMETRY, pass_index, layer, logits, phase, scores), request


def begin(folder: Path, seed: int = 0) -> TraceWriter:
    return TraceWriter(folder, "run", Header(geometry=GEOMETRY, seed=seed, predicted_depth=1))


def requests(
    writer: TraceWriter, count: int = 3, num_passes: int = 6, seed: int = 0
) -> Iterator[int]:
    """Record generated requests; yield each one's number once its last pass is recorded."""
    for event, request in events(seed, count, num_passes - 1):
        place, is_last = event.pass_index % num_passes, event.layer == GEOMETRY.num_layers - 1
        if event.layer == 0:
            tokens = (3 + place if place else 0) + np.arange(len(event.experts))
            owners = np.full(len(event.experts), request)
            writer.begin_pass(event.pass_index, event.phase, owners, tokens)
        predicted = list(event.predicted.values())
        writer.add(event.layer, event.experts, event.weights, event.logits, predicted)
        if is_last and place == num_passes - 1:
            yield request


def record(folder: Path, seed: int = 0, listed: Sequence[RequestRecord] | None = None) -> Path:
    """Write the generated events to a trace, whose requests a reader infers unless `listed`."""
    writer = begin(folder, seed)
    for _ in requests(writer, seed=seed):
        continue
    path = writer.close(listed)
    assert path is not None
    return path


def half_a_recording(folder: Path, *, keep_until: int) -> TraceWriter:
    """Record requests and keep those numbered below `keep_until`; the others stay unfinished."""
    writer = begin(folder)
    for number in requests(writer):
        if number < keep_until:
            writer.keep()
    return writer


def draw_trace(
    seed: int,
    sizes: Sequence[int] = (1000, 1500, 1000, 1000),
    num_experts: int = 6,
    top_k: int = 2,
    num_passes: int = 15,
) -> Trace:
    """Draw requests of a 1 to 4 token prompt and some decode steps, with every field of a trace.

    `sizes` are an expert's bytes in each layer.
    """
    rng = np.random.default_rng(seed)
    rows: list[tuple[int, ...]] = []
    request, token, count = -1, 0, 0
    for index in range(num_passes):
        begins = index == 0 or rng.random() < 0.3
        request, token = request + begins, 0 if begins else token + count
        count = int(rng.integers(1, 5)) if begins else 1
        step = [(request, index, int(not begins), token + place) for place in range(count)]
        rows += [(*each, layer) for layer in range(len(sizes)) for each in step]
    dense = tuple(int(size) for size in rng.choice([300, 900], len(sizes)))
    geometry = replace(geometry_of(sizes, num_experts, top_k), dense_bytes=dense)
    return with_predictions(rng, draw_routing(rng, geometry, rows), 2)


def draw_routing(
    rng: np.random.Generator, g: Geometry, rows: Sequence[Sequence[int]], **more: Any
) -> Trace:
    """Draw a trace's logits, by which some experts are more popular, from rows as `from_rows`."""
    favourites = rng.normal(0, 1, (g.num_layers, g.num_experts))
    layers = np.array([row[4] for row in rows])
    logits = (favourites[layers] + rng.normal(0, 1, (len(rows), g.num_experts))).astype(np.float16)
    experts = np.argsort(-logits, axis=1, kind="stable")[:, : g.top_k]
    weights = np.take_along_axis(softmax(logits.astype(np.float32)), experts, 1)
    weights = np.minimum.accumulate(weights, axis=1)
    return from_rows(g, rows, experts, weights, logits=logits, **more)


def with_predictions(
    rng: np.random.Generator, trace: Trace, depth: int, predictor: str = ""
) -> Trace:
    g, columns, ahead = trace.geometry, trace.columns, [0]
    for layer, phase in zip(columns.layer.tolist(), columns.phase.tolist(), strict=True):
        wraps = bool(predictor) and layer == g.num_layers - 1 and PHASES[phase] == DECODE
        ahead.append((min(g.num_layers - 1 - layer, depth) + wraps) * g.num_experts)
    offsets = np.cumsum(ahead)
    values = rng.normal(0, 1, offsets[-1]).astype(np.float16)
    predicted = Predicted(depth=depth, values=values, offsets=offsets, by=predictor)
    return replace(trace, predicted=predicted)


def from_rows(
    geometry: Geometry,
    rows: Sequence[Sequence[int]],
    experts: Any,
    weights: Any = None,
    **more: Any,
) -> Trace:
    """Make a trace from rows of (request, pass, phase, token, layer) and their experts."""
    table = np.ascontiguousarray(np.asarray(rows, dtype=np.int32).T)
    names = ("request", "pass_index", "phase", "token", "layer")
    columns = Columns(
        **dict(zip(names, table, strict=True)),
        experts=np.asarray(experts, dtype=np.int32),
        weights=weights,
    )
    return build_trace("generated", geometry, columns, **more)


def decode_trace(experts: Any, num_experts: int, phases: Sequence[str] = ()) -> Trace:
    """Make a trace of single tokens from expert ids [passes, layers, top_k], experts of one size.

    Every pass is a decode step unless `phases` are given.
    """
    num_passes, num_layers, top_k = np.shape(experts)
    kinds = [PHASES.index(phase) for phase in phases or [DECODE] * num_passes]
    rows = [(0, p, kinds[p], p, layer) for p in range(num_passes) for layer in range(num_layers)]
    flat = np.reshape(experts, (-1, top_k))
    return from_rows(geometry_of((1,) * num_layers, num_experts, top_k), rows, flat)


def misses(
    trace: Trace,
    eviction: str,
    capacity: object,
    *,
    decode: bool = False,
    free_prefill: bool = False,
    cache_reset: str = "never",
    axes: Mapping[str, object] | None = None,
    **rest: Any,
) -> int:
    """Replay a trace on demand and count its misses, or those of its decode steps."""
    run = setting_for(trace, capacity, {"eviction": eviction, **(axes or {})}, **rest)
    future = Future(trace, free_prefill=free_prefill)
    engine = replay(trace, run, future=future, cache_reset=cache_reset)
    engine.check_integrity()
    return sum(p.misses for p in engine.ledger.passes if not decode or p.phase != PREFILL)


def published(name: str) -> Path:
    """Return a published trace; skip the test where the shared data is not available."""
    folder = os.environ.get("MOECACHE_SHARED_DATA")
    if folder is None:
        pytest.skip("MOECACHE_SHARED_DATA is not set: the published traces are not here")
    path = Path(folder) / "traces" / name
    if not path.is_file():
        pytest.skip(f"{name} is not among the shared data")
    return path


def figures(engine: Engine) -> dict[str, Any]:
    """Everything a report is made from, and the final state of the caches and the link."""
    engine.check_integrity()
    run, slots = engine.memory.run, engine.memory.slots
    rules = engine.rules.routing, engine.rules.miss
    names = "unused", "since", "due", "level", "queued_level"
    counted = "loads", "evictions", "warmed", "lifetime", "peak"
    return {
        "passes": engine.ledger.passes,
        "requests": [[p.index for p in r.passes] for r in engine.ledger.requests],
        "now": engine.now,
        "held": [(pool.resident, pool.arriving) for pool in engine.pools],
        "slots": {name: slots[name].tolist() for name in names},
        "counted": [[pool[name] for name in counted] for pool in engine.pools],
        "link": (run.busy_s, run.moved, run.transfers),
        "seen": [rule.seen.tolist() for rule in rules if hasattr(rule, "seen")],
    }

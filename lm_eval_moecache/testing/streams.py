"""Synthetic routing that resembles a model's: topics, tokens, layers, gates, artifacts.

Shapes: T tokens, L layers, E experts, K experts per token, D hidden size.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from lm_eval_moecache.algorithms.learned.buddies import (
    PAIRS,
    SIMILARITY,
    TOP_LOGITS,
    WEIGHTED,
    Coactivation,
)
from lm_eval_moecache.algorithms.learned.data_aware import shapes as data_aware_shapes
from lm_eval_moecache.algorithms.learned.predictor import shapes
from lm_eval_moecache.algorithms.learned.sensitivity import LAYERS, THRESHOLDS
from lm_eval_moecache.algorithms.policy import Choice, Policy, load_policy
from lm_eval_moecache.algorithms.registry import AXES
from lm_eval_moecache.engine.engine import Engine
from lm_eval_moecache.engine.setting import Setting
from lm_eval_moecache.records.arrays import FloatArray, each_token, softmax
from lm_eval_moecache.records.artifact import (
    BUDDIES,
    DATA_AWARE,
    PREDICTOR,
    SENSITIVITY,
    Artifact,
    artifact_of,
    write_artifact,
)
from lm_eval_moecache.records.batch import Batch
from lm_eval_moecache.records.event import DECODE, PREFILL, Event
from lm_eval_moecache.records.geometry import Draft, Geometry
from lm_eval_moecache.records.hardware import Hardware
from lm_eval_moecache.records.selection import Selection
from lm_eval_moecache.records.sizes import parse_capacity
from lm_eval_moecache.trace.future import Future

DEPTH = 2
"""Number of next layers that a stream's events predict."""
Pass = Sequence[Event]
Output = npt.NDArray[np.float64]


def make_geometry(num_layers: int = 3, num_experts: int = 8, top_k: int = 3) -> Geometry:
    """Return a small geometry with experts of 100 bytes and dense parts of 200."""
    return Geometry(
        model="stream",
        num_layers=num_layers,
        num_experts=num_experts,
        top_k=top_k,
        expert_bytes=((100,),) * num_layers,
        dense_bytes=(200,) * num_layers,
    )


def laddered(geometry: Geometry) -> Geometry:
    """Return the geometry with each expert also stored at two lower precisions."""
    levels = tuple((sizes[0], sizes[0] // 2, sizes[0] // 4) for sizes in geometry.expert_bytes)
    return dataclasses.replace(geometry, expert_bytes=levels, precision=("int8", "int4", "int2"))


def make_hardware() -> Hardware:
    """Return a profile whose link moves about two experts while one layer runs."""
    return Hardware(
        name="stream",
        peak_flops=1e6,
        memory_bytes_per_s=400.0,
        link_bytes_per_s=250.0,
        link_latency_s=0.01,
        kernel_overhead_s=0.001,
        memory_bytes=1e6,
        host_flops=1e5,
        host_memory_bytes_per_s=160.0,
    )


@lru_cache(maxsize=64)
def make_stream(
    geometry: Geometry, seed: int = 0, num_requests: int = 3, num_decodes: int = 3
) -> tuple[Pass, ...]:
    """Return requests of one prefill and some decode steps, with predictions by the next gates."""
    rng = np.random.default_rng(seed)
    hidden = 6
    gates_LED = rng.normal(size=(geometry.num_layers, geometry.num_experts, hidden))
    passes: list[Pass] = []
    for _ in range(num_requests):
        topic_D = rng.normal(size=hidden)
        for phase in (PREFILL, *[DECODE] * num_decodes):
            tokens = int(rng.integers(2, 6)) if phase == PREFILL else 1
            state_TD = topic_D + 0.7 * rng.normal(size=(tokens, hidden))
            events = []
            for layer in range(geometry.num_layers):
                reach = range(layer, min(layer + DEPTH + 1, geometry.num_layers))
                logits = [(state_TD @ gates_LED[at].T).astype(np.float32) for at in reach]
                predicted = dict(zip(reach[1:], logits[1:], strict=True))
                if layer == geometry.num_layers - 1 and phase == DECODE:
                    # Only a trained predictor reads this: the next token's first layer.
                    predicted[0] = (state_TD @ gates_LED[0].T).astype(np.float32)
                events.append(make_event(geometry, len(passes), layer, logits[0], phase, predicted))
                state_TD = state_TD + 0.2 * rng.normal(size=state_TD.shape)
            passes.append(events)
    return tuple(passes)


def make_event(
    geometry: Geometry,
    pass_index: int,
    layer: int,
    logits: Any,
    phase: str = DECODE,
    predicted: Mapping[int, Any] | None = None,
) -> Event:
    """Return the event of a plain softmax-then-top-k router for logits [T, E]."""
    logits_TE = np.asarray(logits, dtype=np.float32)
    experts_TK = np.argsort(-logits_TE, axis=-1, kind="stable")[:, : geometry.top_k]
    return Event(
        passes=[pass_index],
        layer=layer,
        phase=phase,
        num_experts=geometry.num_experts,
        experts=experts_TK,
        weights=np.take_along_axis(softmax(logits_TE), experts_TK, -1),
        logits=logits_TE,
        predicted={at: np.asarray(p, dtype=np.float32) for at, p in (predicted or {}).items()},
    )


def fresh(event: Event, depth: int = DEPTH, wraps: bool = False) -> Event:
    """Copy an event, because the engine changes it, with predictions up to `depth` layers ahead.

    `wraps`: also keep a trained predictor's prediction for the next token's first layer.
    """
    reach = range(0 if wraps else event.layer + 1, event.layer + depth + 1)
    predicted = {at: p for at, p in event.predicted.items() if at in reach}
    return event._replace(predicted=predicted)


class StreamFuture(Future):
    """The future of a stream, as a replay would have it."""

    def __init__(self, geometry: Geometry, passes: Sequence[Pass]) -> None:
        needs = [event.keys for events in passes for event in events]
        keys, bounds = np.concatenate(needs), np.cumsum([0, *map(len, needs)])
        trace: Any = SimpleNamespace(geometry=geometry, keys=keys, key_bounds=bounds)
        super().__init__(trace)


@dataclass
class Run:
    """An engine after a stream, and the executed experts' weights at each event [T, E]."""

    engine: Engine
    outputs: list[Output]

    @property
    def figures(self) -> list[object]:
        """Every observable outcome, for exact comparison: ledger, clock and weights."""
        records = [dataclasses.astuple(record) for record in self.engine.ledger.passes]
        return [*records, self.engine.now, *[o.tolist() for o in self.outputs]]

    @property
    def misses(self) -> int:
        """Misses over all passes, late arrivals included."""
        return sum(record.misses + record.late for record in self.engine.ledger.passes)


def policy_of(overrides: Mapping[str, Any], base: str = "on_demand") -> Policy:
    """Return the composition `base` with these keys replaced."""
    return load_policy(base, overrides)


def run(
    policy: Policy, geometry: Geometry, capacity: object = "30%", seed: int = 0, **stream: int
) -> Run:
    """Serve a stream under a policy and check the conservation laws after every event.

    The store has several levels if the miss algorithm uses a ladder.
    """
    if policy.miss.algorithm.uses_ladder:
        geometry = laddered(geometry)
    passes = make_stream(geometry, **stream)
    setting = Setting(
        policy=equip(policy, geometry),
        capacity=parse_capacity(capacity, geometry, per_layer=policy.per_layer),
        hardware=make_hardware(),
        seed=seed,
        draft=Draft(geometry=geometry) if policy.prefetch.algorithm.needs_draft else None,
    )
    engine = Engine(geometry, setting, StreamFuture(geometry, passes))
    outputs = []
    depth = max(engine.rules.routing.depth, engine.rules.prefetch.depth)
    wraps = engine.rules.prefetch.uses_predictor
    for events in passes:
        if setting.draft is not None and events[0].phase != PREFILL:
            draft(engine, events)
        engine.begin_pass(events[0].phase, len(events[0].experts), pass_predictions(events))
        for event in events:
            given = fresh(event, depth, wraps)
            outputs.append(weigh(event, choose(engine, given)))
            engine.check_integrity()
        engine.end_pass()
        engine.check_integrity()
    return Run(engine, outputs)


def choose(engine: Engine, event: Event) -> Selection | None:
    """Serve an event as the next layer of the pass in progress; return what changes it."""
    return engine.alone.choose(batch_of(event))


def batch_of(event: Event, rows: int = 1) -> Batch:
    """Return an event as a batch, of a single row or of as many as it has tokens."""
    ahead: dict[str, Any] = {}
    if event.predicted:
        values = np.stack([*event.predicted.values()], axis=1)
        ahead = {"targets": [[*event.predicted]], "predicted": values.reshape(-1, values.shape[-1])}
    return Batch(
        event.phase,
        1,
        event.experts,
        bounds=np.array([0, len(event.experts)]) if rows == 1 else None,
        weights=event.weights,
        logits=event.logits,
        num_rows=rows,
        first_layer=event.layer,
        **ahead,
    )


def pass_predictions(events: Pass) -> dict[int, FloatArray]:
    """Return layer -> noisy logits [T, E] of a pass, as if predicted from its tokens."""
    rng = np.random.default_rng(events[0].pass_index)
    return {
        event.layer: (event.logits + 0.5 * rng.normal(size=event.logits.shape)).astype(np.float32)
        for event in events
    }


def draft(engine: Engine, events: Sequence[Event]) -> None:
    """Draft one token, with noisy logits of the coming pass as predictions."""
    stage, rng = engine.begin_draft(), np.random.default_rng(events[0].pass_index)
    for event in events:
        stage.dense(event.layer, 1)
        if stage.wants(event.layer):
            noise = 0.3 * rng.normal(size=event.logits[-1:].shape)
            stage.predict(event.layer, (event.logits[-1:] + noise).astype(np.float32))
        stage.experts(event.layer, engine.geometry.top_k, 1)
        engine.check_integrity()


def weigh(event: Event, selection: Selection | None) -> Output:
    """Return each expert's weight in a selection under a softmax-over-all router [T, E]."""
    chosen = selection or Selection(event.experts)
    scores, each = softmax(event.logits).astype(np.float64), each_token(event.experts)
    weights = scores[each, chosen.experts if chosen.weigh_as is None else chosen.weigh_as]
    if chosen.weights is not None:
        weights = np.where(np.isnan(chosen.weights), weights, chosen.weights)
    kept = weights if chosen.keep is None else np.where(chosen.keep, weights, 0.0)
    factors = weights.sum(axis=-1) / np.maximum(kept.sum(axis=-1), 1e-20)
    output = np.zeros(scores.shape)
    shares = np.where(chosen.renormalize, factors, 1.0)
    np.add.at(output, (each, chosen.experts), kept * shares[:, None])
    return output


def all_events(passes: Sequence[Pass]) -> Iterator[Event]:
    """Yield a copy of every event, in execution order."""
    for events in passes:
        yield from (fresh(event) for event in events)


# --- artifacts for models that ship none, to test algorithms with a `profile` ---

Made = tuple[dict[str, Any], dict[str, Any]]
"""An artifact's arrays and its `made_from`."""


def buddies(geometry: Geometry, seed: int = 0) -> Made:
    """Count the choices of random routers with correlated experts."""
    rng = np.random.default_rng(seed)
    counts, top_logits = Coactivation(geometry), []
    for layer in range(geometry.num_layers):
        gate = rng.normal(size=(4, geometry.num_experts))
        logits = (rng.normal(size=(300, 4)) @ gate).astype(np.float32)
        experts = np.argsort(-logits, axis=-1, kind="stable")[:, : geometry.top_k]
        counts.add(layer, experts, logits)
        top_logits.append(np.take_along_axis(logits, experts, axis=-1)[:64])
    outputs = rng.normal(size=(geometry.num_layers, geometry.num_experts, 6))
    outputs /= np.sqrt((outputs**2).sum(axis=-1, keepdims=True))
    arrays = {
        "activations": counts.activations,
        PAIRS: counts.pairs,
        WEIGHTED: counts.weighted_pairs,
        TOP_LOGITS: np.stack(top_logits),
        SIMILARITY: np.einsum("lad,lbd->lab", outputs, outputs).astype(np.float32),
    }
    return arrays, {"alpha": [0.95] * geometry.num_layers, "k_max": 16, "smoothing": 1.0}


def predictor(geometry: Geometry, seed: int = 0, hidden: int = 6, loss: str = "kl") -> Made:
    """Draw the weights of a predictor.

    Streams bring their own predictions, so only its cost shows: an odd seed or another loss gives
    float32 weights instead of float16.
    """
    shape_of = shapes(geometry.num_layers, geometry.num_experts, hidden)
    return _drawn(shape_of, seed, is_wide=seed % 2 or loss != "kl"), {"loss": loss}


def data_aware(geometry: Geometry, seed: int = 0, hidden: int = 6) -> Made:
    """Draw the weights of a data-aware predictor; odd seeds give float32 instead of float16."""
    shape_of = data_aware_shapes(geometry.num_layers, geometry.num_experts, hidden, 4)
    return _drawn(shape_of, seed, is_wide=seed % 2), {}


def _drawn(shape_of: Mapping[str, Any], seed: int, is_wide: object) -> dict[str, Any]:
    rng, dtype = np.random.default_rng(seed), np.float32 if is_wide else np.float16
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in shape_of.items()}


def sensitivity(geometry: Geometry, seed: int = 0) -> Made:
    """Draw each layer's sensitivity, with thresholds that even random routers get below."""
    layers = np.random.default_rng(seed).uniform(0.2, 3, geometry.num_layers)
    return {LAYERS: layers, THRESHOLDS: np.linspace(0.01, 0.6, 101)}, {}


MAKERS: Mapping[str, Callable[..., Made]] = {
    BUDDIES: buddies,
    PREDICTOR: predictor,
    DATA_AWARE: data_aware,
    SENSITIVITY: sensitivity,
}


@cache
def artifact_folder() -> tempfile.TemporaryDirectory[str]:
    """Return this process' folder of artifacts, removed at exit."""
    return tempfile.TemporaryDirectory(prefix="moecache-artifacts-")


def artifact_for(kind: str, geometry: Geometry, seed: int = 0, **given: Any) -> Artifact:
    """Return an artifact of this kind that fits the geometry; `given` goes to its maker."""
    arrays, made_from = MAKERS[kind](geometry, seed, **given)
    return artifact_of(kind, geometry, "0" * 64, made_from, arrays)


@cache
def profile_for(kind: str, geometry: Geometry, seed: int = 0, **given: Any) -> str:
    """Write an artifact that fits this geometry; return its path."""
    folder = Path(artifact_folder().name)
    path = folder / f"{kind}-{len(list(folder.iterdir()))}.safetensors"
    write_artifact(path, artifact_for(kind, geometry, seed, **given))
    return str(path)


def profile_parameter(algorithm: type[Any], geometry: Geometry, **given: Any) -> dict[str, Any]:
    """Return `{"profile": path}` for an algorithm that needs one and has none shipped."""
    kind = getattr(algorithm, "artifact_kind", None)
    if kind is None or geometry.model == "tiny":
        return {}
    return {"profile": profile_for(kind, geometry, **given)}


def equip(policy: Policy, geometry: Geometry) -> Policy:
    """Return the policy with a fitting profile for each algorithm that needs one and names none."""
    changes: dict[str, Any] = {}
    for axis in AXES:
        choice: Choice = getattr(policy, axis)
        if getattr(choice.algorithm, "artifact_kind", None) and not choice.parameters["profile"]:
            loss = {key: choice.parameters[key] for key in choice.parameters if key == "loss"}
            profile = profile_parameter(choice.algorithm, geometry, **loss)
            changes[axis] = dataclasses.replace(choice, parameters={**choice.parameters, **profile})
    return dataclasses.replace(policy, **changes) if changes else policy

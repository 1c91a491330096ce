"""Lossless compositions replayed on one routing at a capacity, and which of them differ."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from lm_eval_moecache.engine.regime import regime_of
from lm_eval_moecache.harness.arguments import Config, read_config
from lm_eval_moecache.records.event import DECODE, PREFILL
from lm_eval_moecache.records.hardware import Hardware
from lm_eval_moecache.records.ledger import PassRecord
from lm_eval_moecache.records.real_model import RealModel
from lm_eval_moecache.records.sizes import parse_capacity
from lm_eval_moecache.report.metrics import totals
from lm_eval_moecache.report.statistics import Floats, mean_interval
from lm_eval_moecache.sweep.replay_grid import Replays
from lm_eval_moecache.trace.trace import Trace
from lm_eval_moecache.trace.use import use_of
from moecache_plan.data import data
from moecache_plan.nearest import context_seconds, cycle_ratio, step_time, traced_bytes

BLOCKS = 8
"""Stretches of consecutive decode steps by which differences are separated from chance."""
_LEAST_STEPS = 4
"""Decode steps in a block below which nothing is said about differences."""
_PATIENCE_S = 2.0
_NEARLY_ALL = 0.95
"""Share of a trace's experts from which on its misses say nothing but which came first."""
RECALL = 0.85
"""Recall, and precision, of a predictor as good as real models' next-layer gates (80.7-88.6%)."""
PREDICTOR, HOST, PROFILE, FUTURE = "predictor", "host", "profile", "the future"
FASTEST, TIED, SLOWER = "fastest", "tied", "slower"


class Contender(NamedTuple):
    """A lossless composition, what it does, and what it needs."""

    model_args: str
    words: str
    needs: Sequence[str] = ()
    """`PREDICTOR` (an oracle stands for it), `HOST` (computes experts), `PROFILE`, `FUTURE`."""

    @property
    def args(self) -> dict[str, str]:
        """Its `model_args` as a mapping."""
        return dict(item.split("=") for item in self.model_args.split(","))


LRU = "lru"
CONTENDERS: Mapping[str, Contender] = {
    name: Contender(**fields) for name, fields in data("contenders").items()
}


def configs_of(
    capacity: str, hardware: Hardware, model: RealModel | None, recall: float = RECALL
) -> dict[str, Config]:
    """Return each contender's configuration; a model is one that layers are charged as.

    Those that need a host are left out where the device has no figures for its compute.
    """
    has_host = bool(hardware.host_flops and hardware.host_memory_bytes_per_s)
    configs = {}
    for name, contender in CONTENDERS.items():
        if HOST in contender.needs and not has_host:
            continue
        args: dict[str, Any] = {"capacity": capacity, **contender.args}
        if PREDICTOR in contender.needs:
            args |= {"prefetch": "oracle", "prefetch.recall": recall, "prefetch.precision": recall}
        # A seed of None is the trace's own.
        changes = {"hardware": hardware, "emulate": model, "seed": None}
        configs[name] = read_config(args, replayed=True).with_changes(**changes)
    return configs


def find(
    file: str, model: RealModel | None, configs: Mapping[str, Config], context: int = 0
) -> dict[str, Any]:
    """Replay a trace under each contender's configuration; return the ranking as JSON data.

    Where a model is charged, the capacity is the model's, the trace has a cache of as many cycles
    (`in_regime`: not nearly all of its experts), and a layer takes what the replayed ones take,
    reads of experts and waits in proportion to top-k; a step takes the model's number of such
    layers, and attends to `context` tokens. Raises ValueError for a trace without sizes or decode
    steps.
    """
    replays = Replays(file, list(configs.values()), None, True)
    trace = replays.trace
    assert isinstance(trace, Trace), "a trace that is streamed"
    if model is None and not trace.has_sizes:
        raise ValueError(
            f"trace {trace.name} does not say how large an expert is. Allowed: "
            f"`moecache choose MODEL --trace {file}`."
        )
    geometry = trace.geometry
    first = replays.setting(configs[LRU])
    charged, capacity = first.charged(geometry), first.capacity
    step: Callable[[float], float] = float
    context_s, in_regime = 0.0, True
    if model is not None:
        charged = model.geometry()
        capacity = parse_capacity(configs[LRU].capacity, charged)
        step = step_time(model, first.hardware, geometry, context)
        context_s = context_seconds(model, first.hardware, context)
        share = capacity.total_bytes / charged.total_expert_bytes
        in_regime = share >= 1 or share < _NEARLY_ALL * cycle_ratio(model, geometry)
        size = traced_bytes(model, geometry, share)
        text = f"{size}B"
        if capacity.per_layer:
            per_layer = first.charged(geometry).total_expert_bytes // geometry.num_experts
            text = f"{max(1, size // per_layer)}/layer"
        configs = {name: each.with_changes(capacity=text) for name, each in configs.items()}

    def step_s(record: PassRecord) -> float:
        """Return what one stream waits for a token; each stream attends to a context of its own."""
        others_s = (streams_of(record) - 1) * context_s
        return (step(record.duration_s) + others_s) / (1 + record.accepted)

    steps = _replayed(replays, configs)
    rows = _ranked(steps, step_s)
    return {
        "model": geometry.model if model is None else model.name,
        "precision": None if model is None else model.stored.name,
        "trace": file,
        "routing": geometry.model,
        "routing_sizes": [geometry.num_layers, geometry.num_experts, geometry.top_k],
        "sizes": [charged.num_layers, charged.num_experts, charged.top_k],
        "decode_steps": len(steps[LRU]),
        "streams": float(np.mean([streams_of(record) for record in steps[LRU]])),
        "capacity": capacity.text,
        "capacity_cycles": regime_of(charged, capacity.total_bytes, first.hardware).cycles,
        "in_regime": in_regime,
        "fastest": next(row["policy"] for row in rows if row["verdict"] == FASTEST),
        "rows": rows,
        "left_out": [name for name in CONTENDERS if name not in configs],
    }


def _replayed(replays: Replays, configs: Mapping[str, Config]) -> dict[str, list[PassRecord]]:
    """Return the decode steps under each configuration; progress is shown on a terminal."""
    # A profile is counted in one half and serves the other: two replays.
    num_replays = sum(1 + (PROFILE in CONTENDERS[name].needs) for name in configs)
    trace, steps = replays.trace, {}
    assert isinstance(trace, Trace), "a trace that is streamed"
    shown: dict[str, Any] = {"delay": _PATIENCE_S, "disable": not sys.stderr.isatty()}
    total = num_replays * trace.num_passes
    with tqdm(total=total, desc=trace.name, unit="pass", **shown) as bar:
        for name, config in configs.items():
            steps[name] = _decode_steps(replays, config, name, bar.update)
            if not steps[name]:
                raise ValueError(f"trace {trace.name} decodes no token: there is no speed to rank.")
        bar.refresh()
    return steps


def _ranked(
    steps: Mapping[str, list[PassRecord]], step_s: Callable[[PassRecord], float]
) -> list[dict[str, Any]]:
    """Return a row a contender, the fastest first, and by how much each differs from it."""
    rows: list[dict[str, Any]] = []
    blocks: dict[str, Floats] = {}
    for name, records in steps.items():
        times = np.array([step_s(record) for record in records])
        streams = float(np.mean([streams_of(record) for record in records]))
        if len(records) >= _LEAST_STEPS * BLOCKS:
            blocks[name] = np.array([part.mean() for part in np.array_split(times, BLOCKS)])
        sums = totals(records)
        rows.append(
            {
                "policy": name,
                "model_args": CONTENDERS[name].args,
                "needs": list(CONTENDERS[name].needs),
                "tpot_ms": 1000 * float(times.mean()),
                "decode_tok_per_s": streams / float(times.mean()),
                "decode_miss_rate": sums.missed / sums.requests,
            }
        )
    rows.sort(key=lambda row: row["tpot_ms"])
    lru_ms = next(row["tpot_ms"] for row in rows if row["policy"] == LRU)
    fastest = next(row["policy"] for row in rows if FUTURE not in row["needs"])
    for row in rows:
        row["speedup_over_lru"] = lru_ms / row["tpot_ms"]
        row |= _against(blocks, row, fastest)
    return rows


def streams_of(record: PassRecord) -> int:
    """Return how many requests a decode step gives tokens to."""
    return record.num_tokens if record.phase == DECODE else 1


def _decode_steps(
    replays: Replays, config: Config, name: str, on_progress: Any
) -> list[PassRecord]:
    """Return the decode steps of a replay.

    Where experts are placed, either half of the trace runs under the placement by the other's use:
    nothing else carries over from step to step where nothing is loaded.
    """
    trace = replays.trace
    assert isinstance(trace, Trace), "a trace that is streamed"
    half = trace.num_passes // 2
    placed = ((use_of(trace, half), slice(half)), (use_of(trace, 0, half), slice(half, None)))
    steps: list[PassRecord] = []
    for profile, part in placed if PROFILE in CONTENDERS[name].needs else [(None, slice(None))]:
        setting = replays.setting(config.with_changes(warm=profile))
        engine = replays.replay(setting, on_progress=on_progress)
        steps += [p for p in engine.ledger.passes[part] if p.phase != PREFILL]
    return steps


def _against(blocks: Mapping[str, Floats], row: Mapping[str, Any], fastest: str) -> dict[str, Any]:
    """Return by which share a policy's steps are longer than the fastest one's: a 95% interval.

    It is Student's, of the differences between blocks of consecutive steps (batch means). None
    where the trace is too short for blocks, and for the bound, which is no choice.
    """
    name = row["policy"]
    if name == fastest:
        return {"slower_by": None, "verdict": FASTEST}
    if FUTURE in row["needs"] or not blocks:
        return {"slower_by": None, "verdict": None}
    own, best = blocks[name], blocks[fastest]
    low, high = (float(end / best.mean()) for end in mean_interval(own - best))
    return {"slower_by": [low, high], "verdict": SLOWER if low > 0 else TIED}

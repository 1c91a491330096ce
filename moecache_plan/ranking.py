"""Lossless compositions replayed on one routing at a capacity, and which of them differ."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from lm_eval_moecache.engine.regime import regime_of
from lm_eval_moecache.engine.stand_in import context_seconds, step_time, traced_bytes
from lm_eval_moecache.harness.arguments import Config
from lm_eval_moecache.records.event import DECODE, PREFILL
from lm_eval_moecache.records.ledger import PassRecord
from lm_eval_moecache.records.real_model import RealModel
from lm_eval_moecache.records.sizes import parse_capacity
from lm_eval_moecache.report.metrics import totals
from lm_eval_moecache.report.statistics import Floats, mean_interval
from lm_eval_moecache.sweep.replay_grid import Replays
from lm_eval_moecache.trace.trace import Trace
from lm_eval_moecache.trace.use import use_of

BLOCKS = 8
"""Stretches of consecutive decode steps by which differences are separated from chance."""
_LEAST_STEPS = 4
"""Decode steps in a block below which nothing is said about differences."""
_PATIENCE_S = 2.0
PREDICTOR, HOST, PROFILE, FUTURE = "predictor", "host", "profile", "the future"
FASTEST, TIED, SLOWER = "fastest", "tied", "slower"


class Contender(NamedTuple):
    """A lossless composition, what it does, and what it needs."""

    model_args: str
    words: str
    needs: tuple[str, ...] = ()
    """`predictor` (an oracle stands for it), `host` (computes experts), `profile` (of use)."""

    @property
    def args(self) -> dict[str, str]:
        """Its `model_args` as a mapping."""
        return dict(item.split("=") for item in self.model_args.split(","))


_BALANCED = "miss=host,miss.rule=balanced"
LRU = "lru"
CONTENDERS: Mapping[str, Contender] = {
    LRU: Contender("policy=on_demand", "loads on demand, evicts by recency"),
    "lfu": Contender("policy=on_demand,eviction=lfu", "on demand, evicts by frequency"),
    "lfru": Contender(
        "policy=on_demand,eviction=lfru", "on demand, evicts by frequency and recency"
    ),
    "hazard": Contender(
        "policy=on_demand,eviction=hazard",
        "on demand, evicts the expert whose next use it forecasts to be furthest away",
    ),
    "specmd": Contender(
        "policy=specmd",
        "the default of lm_eval runs: prefetches, evicts by Least-Stale",
        (PREDICTOR,),
    ),
    "mixtral_offloading": Contender(
        "policy=mixtral_offloading",
        "prefetches the next layer's experts, evicts by recency",
        (PREDICTOR,),
    ),
    "prefetch+hazard": Contender(
        "policy=mixtral_offloading,eviction=hazard",
        "prefetches the next layer's experts, evicts as hazard does",
        (PREDICTOR,),
    ),
    "ktransformers": Contender(
        "policy=ktransformers",
        "the most used experts stay resident, the host computes the others",
        (HOST, PROFILE),
    ),
    "host": Contender(
        f"policy=on_demand,{_BALANCED}",
        "absent experts are computed by the host if that ends the event sooner, else loaded; "
        "evicts by recency",
        (HOST,),
    ),
    "host+hazard": Contender(
        f"policy=on_demand,eviction=hazard,{_BALANCED}",
        "as host, but evicts as hazard does",
        (HOST,),
    ),
    "bound": Contender(
        "policy=on_demand,eviction=belady",
        "the fewest misses without prefetching (Belady); policies that prefetch or compute "
        "on the host may be faster",
        (FUTURE,),
    ),
}


def find(
    file: str, model: RealModel | None, configs: Mapping[str, Config], context: int = 0
) -> dict[str, Any]:
    """Replay a trace under each contender's configuration; return the ranking as JSON data.

    Where a model is charged, the capacity is the model's, the trace has a cache of as many cycles,
    and a step takes what `plan` says: the model's layers, top-k and context (0: none).
    Raises ValueError for a trace without sizes or decode steps.
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
    if model is not None:
        charged = model.geometry()
        capacity = parse_capacity(configs[LRU].capacity, charged)
        step = step_time(model, first.hardware, geometry, context)
        size = traced_bytes(model, geometry, capacity.total_bytes / charged.total_expert_bytes)
        text = f"{size}B"
        if capacity.per_layer:
            per_layer = first.charged(geometry).total_expert_bytes // geometry.num_experts
            text = f"{max(1, size // per_layer)}/layer"
        configs = {name: each.with_changes(capacity=text) for name, each in configs.items()}

    context_s = 0.0 if model is None else context_seconds(model, first.hardware, context)

    def step_s(record: PassRecord) -> float:
        """Return what one stream waits for a token; each stream attends to a context of its own."""
        others_s = (streams_of(record) - 1) * context_s
        return (step(record.duration_s) + others_s) / (1 + record.accepted)

    rows: list[dict[str, Any]] = []
    blocks: dict[str, Floats] = {}
    # A profile is counted in one half and serves the other: two replays.
    num_replays = sum(1 + (PROFILE in CONTENDERS[name].needs) for name in configs)
    shown: dict[str, Any] = {"delay": _PATIENCE_S, "disable": not sys.stderr.isatty()}
    total = num_replays * trace.num_passes
    with tqdm(total=total, desc=trace.name, unit="pass", **shown) as bar:
        for name, config in configs.items():
            steps = _decode_steps(replays, config, name, bar.update)
            if not steps:
                raise ValueError(f"trace {trace.name} decodes no token: there is no speed to rank.")
            times = np.array([step_s(record) for record in steps])
            streams = float(np.mean([streams_of(record) for record in steps]))
            if len(steps) >= _LEAST_STEPS * BLOCKS:
                blocks[name] = np.array([part.mean() for part in np.array_split(times, BLOCKS)])
            sums = totals(steps)
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
        bar.refresh()
    rows.sort(key=lambda row: row["tpot_ms"])
    lru_ms = next(row["tpot_ms"] for row in rows if row["policy"] == LRU)
    fastest = next(row["policy"] for row in rows if FUTURE not in row["needs"])
    for row in rows:
        row["speedup_over_lru"] = lru_ms / row["tpot_ms"]
        row |= _against(blocks, row, fastest)
    return {
        "model": geometry.model if model is None else model.name,
        "precision": None if model is None else model.stored.name,
        "trace": file,
        "routing": geometry.model,
        "routing_top_k": geometry.top_k,
        "top_k": charged.top_k,
        "decode_steps": len(steps),
        "streams": streams,
        "capacity": capacity.text,
        "capacity_cycles": regime_of(charged, capacity.total_bytes, first.hardware).cycles,
        "fastest": fastest,
        "rows": rows,
        "left_out": [name for name in CONTENDERS if name not in configs],
    }


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

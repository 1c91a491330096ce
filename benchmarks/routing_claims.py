"""Replays what S1, S2, S3, S4 and S8 of SpecMD ask for, on real routing: results/real_routing.

Usage: python benchmarks/routing_claims.py [--tiny TRACE] [--out results/real_routing], then
`routing_claims_report.py`. Cells that are in `claims.json.gz` already are kept.

The three traces of `traces/` have neither weights nor gates: predictors are oracles of stated
recall and precision, and score eviction is left out. What needs both is asked of the shipped model,
charged as OLMoE-1B-7B. Its trace (3 MB) is made by

    moecache eval --model moecache --tasks tiny_gsm8k,tiny_bbh --limit 20
        --model_args pretrained=tiny,policy=specmd,capacity=25%,trace=DIR,trace_keep=all

A cell is kept as sums over units, which the intervals draw from: sixteen passes of a trace, or one
request of the shipped model's.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from lm_eval_moecache.algorithms.policy import load_policy
from lm_eval_moecache.engine.engine import Engine
from lm_eval_moecache.engine.regime import regime_of
from lm_eval_moecache.engine.replay import replay
from lm_eval_moecache.engine.setting import Setting
from lm_eval_moecache.records.emulation import load_real_model
from lm_eval_moecache.records.event import DECODE, PREFILL, Event
from lm_eval_moecache.records.hardware import load_hardware
from lm_eval_moecache.records.ledger import PassRecord, total
from lm_eval_moecache.records.sizes import parse_capacity
from lm_eval_moecache.trace.detail import Proposed, identity
from lm_eval_moecache.trace.future import Future
from lm_eval_moecache.trace.importers import load_trace
from lm_eval_moecache.trace.trace import Trace

TRACES = Path(__file__).resolve().parents[1] / "traces"
MACHINES = {"inside": "specmd-a100", "outside": "a100-5GBps"}
"""SpecMD's own stack of 30 ms a layer, and one that is as fast as its kernels."""
SHARES = ("1%", "5%", "25%", "50%")
BLOCK = 16
EVICTIONS: dict[str, dict[str, Any]] = {
    "lru": {"eviction": "lru"},
    "lfu": {"eviction": "lfu"},
    "fld": {"eviction": "fld"},
    "shallow_first": {"eviction": "shallow_first"},
    "frequency_layer": {"eviction": "frequency_layer"},
    "least_stale": {"eviction": "least_stale"},
    "least_stale none": {"eviction": "least_stale", "eviction.protect": "none"},
    "hazard": {"eviction": "hazard"},
}
SCORES = {
    f"score {history}": {"eviction": "score", "eviction.history": history}
    for history in ("sum", "mean", "decayed")
}
NONE = {"none": {"prefetch": "none"}}
ORACLES: dict[str, dict[str, Any]] = {
    # The recall of a gate's top-k is its precision, too; half as many again find more and less.
    "top-k": {"prefetch": "oracle", "prefetch.recall": 0.85, "prefetch.precision": 0.85},
    "score": {"prefetch": "oracle", "prefetch.recall": 0.95, "prefetch.precision": 0.63},
}
GATES: dict[str, dict[str, Any]] = {
    "top-k": {"prefetch": "next_gate"},
    "score": {"prefetch": "score"},
}
WIDER: dict[str, dict[str, Any]] = {
    **{
        f"top-k x{over:g}": {"prefetch": "next_gate", "prefetch.overfetch": over}
        for over in (1.5, 2)
    },
    **{f"score p{p}": {"prefetch": "score", "prefetch.percentile": p} for p in (70, 75, 85, 90)},
}


def cells(is_tiny: bool) -> Iterator[tuple[dict[str, str], dict[str, Any]]]:
    """Yield each cell's names and what they mean for a policy."""
    evictions = {**EVICTIONS, **(SCORES if is_tiny else {})}
    stale = {"least_stale": EVICTIONS["least_stale"]}
    grids = [(NONE, evictions), (GATES if is_tiny else ORACLES, evictions)]
    grids += [(WIDER, stale)] if is_tiny else []
    for machine, share in product(MACHINES, SHARES[:3] if is_tiny else SHARES):
        at = {"machine": machine, "capacity": share}
        for prefetchers, own in grids:
            for (prefetch, how), (eviction, who) in product(prefetchers.items(), own.items()):
                yield {**at, "prefetch": prefetch, "eviction": eviction}, {**how, **who}


def foretold(trace: Trace, future: Future) -> Trace:
    """Let the oracles speak once: what they propose does not depend on the cell."""
    num_layers, known = trace.geometry.num_layers, {}
    for how in ORACLES.values():
        choice = load_policy("on_demand", how).prefetch
        oracle = choice.build(trace.geometry, 0)
        oracle.prepare(future)
        keys: list[Sequence[int]] = []
        for index in range(len(trace.key_bounds) - 1):
            keys.append(oracle.propose(Event(*divmod(index, num_layers), DECODE, 1, ())))
        bounds = np.cumsum([0, *map(len, keys)]).astype(np.int64)
        flat = np.concatenate([np.asarray(own, dtype=np.int32) for own in keys])
        known[identity(choice, 0, "")] = Proposed(keys=flat, bounds=bounds)
    return replace(trace, proposed=known)


def measure(
    trace: Trace, future: Future, cell: dict[str, str], overrides: dict[str, Any]
) -> dict[str, Any]:
    is_tiny = cell["trace"] == "tiny"
    geometry, hardware = trace.geometry, load_hardware(MACHINES[cell["machine"]])
    emulate = load_real_model("OLMoE-1B-7B") if is_tiny else None
    charged = geometry if emulate is None else emulate.emulated_by(geometry)
    capacity = parse_capacity(cell["capacity"], charged)
    policy = load_policy("on_demand", overrides)
    setting = Setting(policy=policy, capacity=capacity, hardware=hardware, emulate=emulate)
    engine = replay(trace, setting, future=future)
    regime = regime_of(charged, capacity.total_bytes, hardware)
    return {
        "cell": cell,
        "cycles": round(regime.cycles, 3),
        "transfer_per_layer": round(regime.transfer_per_layer, 4),
        "units": [sums(unit) for unit in units(engine, is_tiny)],
    }


def units(engine: Engine, by_request: bool) -> Iterable[Sequence[PassRecord]]:
    """Divide the passes into what the intervals draw: requests, or blocks of passes in a row."""
    if by_request:
        return [request.passes for request in engine.ledger.requests]
    passes = engine.ledger.passes
    return [passes[start : start + BLOCK] for start in range(0, len(passes), BLOCK)]


def sums(passes: Sequence[PassRecord]) -> dict[str, float]:
    """Add up what the claims are about."""
    counted = total(passes)
    decoded = [record for record in passes if record.phase == DECODE]
    return {
        "requests": counted.requests,
        "absent": counted.misses + counted.late,
        "collisions": counted.collisions,
        "proposed": counted.predicted,
        "right": counted.predicted_right,
        "predictable": counted.predictable,
        "stall_s": round(sum(record.stall_s for record in decoded), 9),
        "decode_s": round(sum(record.duration_s for record in decoded), 9),
        "decoded": len(decoded),
        "prefill_s": round(sum(r.duration_s for r in passes if r.phase == PREFILL), 9),
    }


def load(file: Path) -> list[dict[str, Any]]:
    return json.loads(gzip.decompress(file.read_bytes())) if file.is_file() else []


def save(file: Path, runs: list[dict[str, Any]]) -> None:
    text = "[\n" + ",\n".join(json.dumps(run, sort_keys=True) for run in runs) + "\n]\n"
    file.write_bytes(gzip.compress(text.encode(), mtime=0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", type=Path, help="the shipped model's trace")
    parser.add_argument("--out", type=Path, default=Path("results/real_routing"))
    arguments = parser.parse_args()
    file = arguments.out / "claims.json.gz"
    runs = load(file)
    done = {json.dumps(run["cell"], sort_keys=True) for run in runs}
    paths = {path.stem: path for path in sorted(TRACES.glob("*.parquet"))}
    if arguments.tiny is not None:
        paths["tiny"] = arguments.tiny
    for name, path in paths.items():
        trace = load_trace(str(path), predicted=name == "tiny")
        future = Future(trace)
        if name != "tiny":
            trace = foretold(trace, future)
        for names, overrides in cells(name == "tiny"):
            cell = {"trace": name, **names}
            if json.dumps(cell, sort_keys=True) not in done:
                runs.append(measure(trace, future, cell, overrides))
                if len(runs) % 20 == 0:
                    save(file, runs)
                    sys.stderr.write(f"{name}: {len(runs)} cells\n")
    save(file, runs)


if __name__ == "__main__":
    main()

"""Prints how many expert requests a replay serves per second of one core, beside libCacheSim.

Usage: python benchmarks/replay.py [--requests 100000,1000000] [--experts 64,512] [--rounds 5]
[--out results/real_routing/replay_speed.txt]. Each round takes all in turn, ours and libCacheSim's
on the same trace; a figure is the median of the rounds. Time is CPU time of this process; a busy
machine slows all down, so compare within one table. The trace is generated: a decode trace of 16
layers, top-8, whose experts are drawn with a skew and stay likely for a while; a quarter is
resident. What libCacheSim does is less: single requests of one pool, with no clock, link or
prefetches.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from grid import setting_of
from pytablewriter import MarkdownTableWriter

from lm_eval_moecache.engine.replay import replay
from lm_eval_moecache.records.event import PHASES
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.trace.columns import Columns
from lm_eval_moecache.trace.future import Future
from lm_eval_moecache.trace.trace import Predicted, Trace, build_trace

libcachesim: Any = None
with suppress(ImportError):
    libcachesim = import_module("libcachesim")

NUM_LAYERS, TOP_K = 16, 8
# name, policy, overrides, asked requests per second
CASES: tuple[tuple[str, str, dict[str, str], int], ...] = (
    ("LRU, on demand", "on_demand", {}, 12_000_000),
    ("LFU, on demand", "on_demand", {"eviction": "lfu"}, 12_000_000),
    ("FIFO, on demand", "on_demand", {"eviction": "fifo"}, 12_000_000),
    ("Belady, on demand", "on_demand", {"eviction": "belady"}, 8_000_000),
    ("Least-Stale, on demand", "on_demand", {"eviction": "least_stale"}, 8_000_000),
    ("hazard, on demand", "on_demand", {"eviction": "hazard"}, 3_000_000),
    (
        "Least-Stale, next-gate prefetch",
        "mixtral_offloading",
        {"eviction": "least_stale"},
        3_000_000,
    ),
    ("Least-Stale, score prefetch (specmd)", "specmd", {}, 3_000_000),
)


def make_trace(num_requests: int, num_experts: int, predictions: bool) -> Trace:
    """Draw a decode trace; predictions are the drawn scores with noise."""
    rng = np.random.default_rng(0)
    num_tokens = num_requests // (NUM_LAYERS * TOP_K)
    favourites = rng.normal(0, 1.5, (NUM_LAYERS, num_experts)).astype(np.float32)
    scores = rng.normal(0, 1, (num_tokens, NUM_LAYERS, num_experts)).astype(np.float32)
    for token in range(1, num_tokens):
        scores[token] = 0.8 * scores[token - 1] + 0.6 * scores[token]
    scores += favourites
    experts = np.argpartition(-scores, TOP_K, axis=-1)[..., :TOP_K]
    weights = np.take_along_axis(scores, experts, -1)
    order = np.argsort(-weights, axis=-1)
    passes = np.repeat(np.arange(num_tokens, dtype=np.int32), NUM_LAYERS)
    layer = np.tile(np.arange(NUM_LAYERS, dtype=np.int32), num_tokens)
    predicted = None
    if predictions:
        ahead = np.where(layer < NUM_LAYERS - 1, num_experts, 0)
        noisy = scores + rng.normal(0, 0.3, scores.shape).astype(np.float32)
        predicted = Predicted(
            depth=1,
            values=noisy[:, 1:].ravel().astype(np.float16),
            offsets=np.concatenate([[0], np.cumsum(ahead)]),
        )
    return build_trace(
        "generated",
        Geometry(
            model="generated",
            num_layers=NUM_LAYERS,
            num_experts=num_experts,
            top_k=TOP_K,
            expert_bytes=((12_582_912,),) * NUM_LAYERS,
            dense_bytes=(33_554_432,) * NUM_LAYERS,
        ),
        Columns(
            request=np.zeros_like(passes),
            pass_index=passes,
            phase=np.full_like(passes, PHASES.index("decode")),
            token=passes,
            layer=layer,
            experts=np.take_along_axis(experts, order, -1).reshape(-1, TOP_K).astype(np.int32),
            weights=np.take_along_axis(weights, order, -1).reshape(-1, TOP_K),
        ),
        predicted=predicted,
    )


def measure(
    trace: Trace, policy: str, overrides: dict[str, str], capacity: str, future: Future
) -> tuple[float, str]:
    """Return requests per second of CPU time, and why the rule was not compiled."""
    setting = setting_of(trace.geometry, capacity, overrides, policy=policy)
    start = time.process_time()
    engine = replay(trace, setting, future=future)
    return len(trace.keys) / (time.process_time() - start), engine.uncompiled


def bulk(trace: Trace, slots: int) -> float:
    """Return requests per second of libCacheSim's LRU, which reads the trace in bulk."""
    kind = [("time", "<u4"), ("id", "<u8"), ("size", "<u4"), ("next", "<i8")]
    rows = np.zeros(len(trace.keys), np.dtype(kind))
    rows["id"], rows["size"], rows["next"] = trace.keys + 1, 1, -1
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.oracleGeneral"
        rows.tofile(file)
        reader = libcachesim.TraceReader(str(file), libcachesim.TraceType.ORACLE_GENERAL_TRACE)
        start = time.process_time()
        libcachesim.LRU(cache_size=slots).process_trace(reader)
        return len(rows) / (time.process_time() - start)


def one_by_one(trace: Trace, slots: int) -> float:
    """Return requests per second of libCacheSim's LRU, asked from Python for each."""
    count = min(len(trace.keys), 200_000)
    keys = trace.keys[:count].tolist()
    requests = [libcachesim.Request(obj_id=key + 1, obj_size=1) for key in keys]
    cache = libcachesim.LRU(cache_size=slots)
    start = time.process_time()
    for request in requests:
        cache.get(request)
    return count / (time.process_time() - start)


def rows_of(requests: int, experts: int, rounds: int) -> Iterator[list[str]]:
    """Measure all cases on one trace, in turn; yield the rows of the table."""
    trace = make_trace(requests, experts, True)
    future, slots = Future(trace), NUM_LAYERS * experts // 4
    rates: dict[str, list[float]] = {}
    reasons = dict.fromkeys(("libCacheSim LRU, bulk", "libCacheSim LRU, a call each"), "C")
    for _ in range(rounds):
        if libcachesim is not None:
            for (name, _), of in zip(reasons.items(), (bulk, one_by_one), strict=False):
                rates.setdefault(name, []).append(of(trace, slots))
        for name, policy, overrides, _ in CASES:
            rate, reason = measure(trace, policy, overrides, "25%", future)
            rates.setdefault(name, []).append(rate)
            reasons[name] = f"no: {reason}" if reason else "yes"
    bars = {name: asked for name, _, _, asked in CASES}
    theirs = statistics.median(rates.get("libCacheSim LRU, bulk", [0.0]))
    for name, own in rates.items():
        median = statistics.median(own)
        ratio = f"{median / theirs:.2f}" if theirs else ""
        spread = f"{min(own) / 1e6:.2f} to {max(own) / 1e6:.2f}"
        asked = f"{bars[name] / 1e6:.0f}" if name in bars else ""
        shape = f"{requests:,}", str(experts)
        yield [*shape, name, f"{median / 1e6:.2f}", spread, ratio, asked, reasons[name]]


def numbers(text: str) -> list[int]:
    return [int(float(part)) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=numbers, default=[100_000, 1_000_000])
    parser.add_argument("--experts", type=numbers, default=[64, 512])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    # Not what compiling takes, once after an installation: enough is replayed first.
    warm_up = make_trace(2_000_000, 64, False)
    measure(warm_up, "on_demand", {}, "25%", Future(warm_up))
    writer = MarkdownTableWriter()
    writer.headers = ["requests", "experts", "case", "M/s", "range", "of bulk", "bar", "compiled"]
    writer.value_matrix = [
        row
        for requests in options.requests
        for experts in options.experts
        for row in rows_of(requests, experts, options.rounds)
    ]
    writer.margin = 1
    table = str(writer.dumps())
    print(table)
    if options.out:
        options.out.write_text(f"{__doc__}\n{table}".strip() + "\n")


if __name__ == "__main__":
    main()

"""Prints how many expert requests a replay serves per second of one core, against libCacheSim.

Usage: python benchmarks/replay.py [--requests 100000,1000000] [--experts 64,512] [--rounds 5]
[--out results/real_routing/replay_speed.txt]. Each round takes all in turn, ours and libCacheSim's
on the same trace; a figure is the median of the rounds. Time is CPU time of this process; a busy
machine slows all down, so compare within one table. The trace is generated: a decode trace of 16
layers, top-8, whose experts are drawn with a skew and stay likely for a while; a quarter is
resident. What libCacheSim does is less: single requests of one pool, with no clock, link or
prefetches.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from grid import arguments, decode_trace, setting_of

from lm_eval_moecache.engine.replay import replay
from lm_eval_moecache.report.tables.text import padded
from lm_eval_moecache.trace.future import Future
from lm_eval_moecache.trace.trace import Predicted, Trace

libcachesim: Any = None
with suppress(ImportError):
    libcachesim = import_module("libcachesim")

NUM_LAYERS, TOP_K = 16, 8
STALE = {"eviction": "least_stale"}
# name, policy, overrides, target in million requests per second
CASES: tuple[tuple[str, str, dict[str, str], int], ...] = (
    ("LRU, on demand", "on_demand", {}, 12),
    ("LFU, on demand", "on_demand", {"eviction": "lfu"}, 12),
    ("FIFO, on demand", "on_demand", {"eviction": "fifo"}, 12),
    ("Belady, on demand", "on_demand", {"eviction": "belady"}, 8),
    ("Least-Stale, on demand", "on_demand", STALE, 8),
    ("hazard, on demand", "on_demand", {"eviction": "hazard"}, 3),
    ("Least-Stale, next-gate prefetch", "mixtral_offloading", STALE, 3),
    ("Least-Stale, score prefetch (specmd)", "specmd", {}, 3),
)


def make_trace(num_requests: int, num_experts: int) -> Trace:
    """Draw a random decode trace; its predictions are the drawn scores with noise."""
    rng = np.random.default_rng(0)
    num_tokens = num_requests // (NUM_LAYERS * TOP_K)
    favourites = rng.normal(0, 1.5, (NUM_LAYERS, num_experts)).astype(np.float32)
    scores = rng.normal(0, 1, (num_tokens, NUM_LAYERS, num_experts)).astype(np.float32)
    for token in range(1, num_tokens):
        scores[token] = 0.8 * scores[token - 1] + 0.6 * scores[token]
    scores += favourites
    experts = np.argsort(-scores, axis=-1)[..., :TOP_K]
    weights = np.take_along_axis(scores, experts, -1)
    noisy = scores + rng.normal(0, 0.3, scores.shape).astype(np.float32)
    ahead = np.tile([*[num_experts] * (NUM_LAYERS - 1), 0], num_tokens)
    predicted = Predicted(
        depth=1,
        values=noisy[:, 1:].ravel().astype(np.float16),
        offsets=np.concatenate([[0], np.cumsum(ahead)]),
    )
    sizes = {"expert_bytes": 12_582_912, "dense_bytes": 33_554_432}
    return decode_trace(experts, weights, num_experts, **sizes, predicted=predicted)


def measure(trace: Trace, future: Future, policy: str, overrides: Any) -> float:
    """Return requests per second of CPU time."""
    setting = setting_of(trace.geometry, "25%", overrides, policy=policy)
    start = time.process_time()
    replay(trace, setting, future=future, cache_reset="never")
    return len(trace.keys) / (time.process_time() - start)


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
    """Return requests per second of libCacheSim's LRU, called from Python for each request."""
    keys = trace.keys[:200_000].tolist()
    requests = [libcachesim.Request(obj_id=key + 1, obj_size=1) for key in keys]
    cache = libcachesim.LRU(cache_size=slots)
    start = time.process_time()
    for request in requests:
        cache.get(request)
    return len(keys) / (time.process_time() - start)


def rows_of(num_requests: int, num_experts: int, rounds: int) -> Iterator[list[str]]:
    """Measure all cases on one trace in turn and yield the rows of the table."""
    trace = make_trace(num_requests, num_experts)
    future, slots = Future(trace), NUM_LAYERS * num_experts // 4
    cases = {name: partial(measure, trace, future, *case) for name, *case, _ in CASES}
    rivals: dict[str, Callable[[], float]] = {}
    if libcachesim is not None:
        rivals["libCacheSim LRU, bulk"] = partial(bulk, trace, slots)
        rivals["libCacheSim LRU, a call each"] = partial(one_by_one, trace, slots)
    runners, bars = rivals | cases, {name: str(bar) for name, *_, bar in CASES}
    timings = [{name: runner() for name, runner in runners.items()} for _ in range(rounds)]
    rates = {name: [timing[name] / 1e6 for timing in timings] for name in runners}
    for name, speeds in rates.items():
        ratio = f"{median(speeds) / median(next(iter(rates.values()))):.2f}" if rivals else ""
        spread = f"{min(speeds):.2f} to {max(speeds):.2f}"
        shape = f"{num_requests:,}", str(num_experts)
        yield [*shape, name, f"{median(speeds):.2f}", spread, ratio, bars.get(name, "")]


def main() -> None:
    options = arguments(__doc__, requests="100000,1000000", experts="64,512", rounds=5, out=None)
    # Code is kept elsewhere, to be compiled here; numba reads this when it is imported.
    os.environ["NUMBA_CACHE_DIR"] = tempfile.mkdtemp()
    warm_up = make_trace(2_000_000, 64)
    start = time.process_time()
    measure(warm_up, Future(warm_up), "on_demand", {})
    seconds = time.process_time() - start
    print(f"first use on a machine, importing numba and 2,000,000 requests: {seconds:.1f} s")
    axes = (map(int, text.split(",")) for text in (options.requests, options.experts))
    rows = [row for shape in product(*axes) for row in rows_of(*shape, options.rounds)]
    heads = ["requests", "experts", "case", "M/s", "range", "of bulk", "bar"]
    text = padded(heads, rows)
    print(text)
    if options.out:
        Path(options.out).write_text(f"{__doc__}\n{text}".strip() + "\n")


if __name__ == "__main__":
    main()

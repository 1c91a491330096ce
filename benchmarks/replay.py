"""Prints how many expert requests a replay serves per second of one core.

Usage: python benchmarks/replay.py [--requests 400000]. Time is CPU time of this process, so other
jobs on the machine change it little. The trace is generated: a decode trace of 16 layers x 64
experts, top-8, whose experts are drawn with a skew and stay likely for a while.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from lm_eval_moecache.algorithms.policy import load_policy
from lm_eval_moecache.engine.engine import Setting
from lm_eval_moecache.engine.replay import replay
from lm_eval_moecache.records.event import PHASES
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.hardware import load_hardware
from lm_eval_moecache.records.sizes import parse_capacity
from lm_eval_moecache.trace.columns import Columns
from lm_eval_moecache.trace.future import Future
from lm_eval_moecache.trace.trace import Predicted, Trace, build_trace

NUM_LAYERS, TOP_K = 16, 8
# name, policy, overrides, asked requests per second
CASES = (
    ("LRU, on demand", "on_demand", {}, 12_000_000),
    ("Belady, on demand", "on_demand", {"eviction": "belady"}, 8_000_000),
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
    trace: Trace, policy: str, overrides: dict[str, str], capacity: str
) -> tuple[int, float]:
    """Return requests per second of CPU time, and the hit rate."""
    setting = Setting(
        policy=load_policy(policy, overrides),
        capacity=parse_capacity(capacity, trace.geometry),
        hardware=load_hardware("a100-5GBps"),
    )
    future = Future(trace)
    # Not what compiling takes, once after an installation.
    replay(trace, setting, future=future)
    start = time.process_time()
    engine = replay(trace, setting, future=future)
    elapsed_s = time.process_time() - start
    requests = sum(p.requests for p in engine.ledger.passes)
    return int(requests / elapsed_s), sum(p.hits for p in engine.ledger.passes) / requests


def theirs(trace: Trace, slots: int) -> float | None:
    """Return requests per second of libCacheSim's LRU, read in bulk; None where it is not here."""
    try:
        import libcachesim
    except ImportError:
        return None
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=400_000)
    requests = parser.parse_args().requests
    out = sys.stdout.write
    out(f"{'case':40s} {'requests/s':>11s} {'10x trace':>11s} {'10x cache':>11s} {'hit':>6s}\n")
    own = make_trace(requests, 64, False)
    rate = theirs(own, NUM_LAYERS * 64 // 4)
    out(f"{'libCacheSim, LRU, bulk':40s} {'not here' if rate is None else int(rate):>11}\n")
    for name, policy, overrides, asked in CASES:
        needs = policy != "on_demand"
        base, hit = measure(make_trace(requests, 64, needs), policy, overrides, "25%")
        longer, _ = measure(make_trace(10 * requests, 64, needs), policy, overrides, "25%")
        larger, _ = measure(make_trace(requests, 640, needs), policy, overrides, "25%")
        verdict = "ok" if min(base, longer) >= asked else f"below {asked}"
        out(f"{name:40s} {base:11,d} {longer:11,d} {larger:11,d} {hit:6.3f}  {verdict}\n")


if __name__ == "__main__":
    main()

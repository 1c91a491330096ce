"""Measures traces of a generated run: bytes a token by what is kept, and the memory of a replay.

    python benchmarks/trace.py [--tokens 2000] [--requests 0] [--kept sweep]

16 MoE layers of 64 experts, 8 a token, routing that repeats itself like real models' (half of a
token's experts are the last one's); gates that ask ahead are right about seven of eight; weights
are rounded to bfloat16, as a router of that dtype gives them. `routing`, `lossless` and `all` are
what `trace_keep=` says, `sweep` is what a sweep of cells with one prefetcher records. `--requests
5000000` writes a trace of so many expert requests, keeping `--kept`, and replays it in a process of
its own, by itself and as a cell of a sweep: the peak resident memory is printed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lm_eval_moecache.algorithms.policy import load_policy
from lm_eval_moecache.engine.replay import replay
from lm_eval_moecache.engine.setting import Setting
from lm_eval_moecache.records.arrays import FloatArray, softmax
from lm_eval_moecache.records.event import DECODE, PREFILL, Event, unique_in_order
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.hardware import load_hardware
from lm_eval_moecache.records.ledger import PassRecord, RequestRecord
from lm_eval_moecache.records.sizes import parse_capacity
from lm_eval_moecache.trace.detail import identity
from lm_eval_moecache.trace.header import Header
from lm_eval_moecache.trace.stream import StreamedTrace, open_trace
from lm_eval_moecache.trace.writer import TraceWriter

LAYERS, EXPERTS, TOP_K = 16, 64, 8
GEOMETRY = Geometry(
    model="generated",
    num_layers=LAYERS,
    num_experts=EXPERTS,
    top_k=TOP_K,
    expert_bytes=((12_582_912,),) * LAYERS,
    dense_bytes=(16_777_216,) * LAYERS,
)
POLICY = load_policy("mixtral_offloading")
KINDS = ("routing", "sweep", "lossless", "all")
TEXT = 256
"""Tokens of a request: a quarter is read at once, the others are decoded."""


def logits_of(num_tokens: int) -> Iterator[FloatArray]:
    """Yield each token's [layers, experts] logits, float16, of which half is the last token's."""
    rng = np.random.default_rng(0)
    lasting = rng.normal(size=(LAYERS, EXPERTS))
    for _ in range(num_tokens):
        lasting = 0.85 * lasting + 0.53 * rng.normal(size=(LAYERS, EXPERTS))
        yield (1.5 * lasting).astype(np.float16).astype(np.float32)


def prefetchers(kept: str) -> dict[str, Any]:
    """Return the prefetchers whose proposals are kept, by what a trace calls them."""
    # torch comes with it: the process that replays is to be measured without.
    from lm_eval_moecache.harness.arguments import read_config
    from lm_eval_moecache.harness.recording import detail_of

    config = read_config({"policy": POLICY.name, "trace": ".", "trace_keep": "lossless"})
    every = [choice for choice, _ in detail_of(config).onlookers]
    chosen = {"sweep": [POLICY.prefetch], "lossless": every}.get(kept, [])
    return {identity(choice, 0, ""): choice.build(GEOMETRY, 0) for choice in chosen}


def write(folder: Path, num_tokens: int, kept: str) -> Path:
    """Record the run, keeping `routing`, `sweep`, `lossless` or `all`."""
    looking = prefetchers(kept)
    header = Header(
        geometry=GEOMETRY,
        seed=0,
        predicted_depth=1 if kept == "all" else 0,
        proposals=tuple(looking),
        has_logits=kept == "all",
    )
    writer = TraceWriter(folder, kept, header)
    prompt: list[FloatArray] = []
    requests: list[RequestRecord] = []
    pass_index = 0
    for place, logits in enumerate(logits_of(num_tokens)):
        prompt.append(logits)
        if place % TEXT < TEXT // 4 - 1:
            continue
        batch = np.stack(prompt, axis=1)
        prompt = []
        first = place % TEXT + 1 - batch.shape[1]
        tokens = np.arange(first, first + batch.shape[1])
        owners = np.full(len(tokens), place // TEXT)
        writer.begin_pass(pass_index, PREFILL if first == 0 else DECODE, owners, tokens)
        write_pass(writer, pass_index, batch, kept, list(looking.values()))
        if first == 0:
            prompt_tokens, number = len(tokens), len(requests)
            requests.append(RequestRecord(number, "generated", "generate_until", prompt_tokens))
        requests[-1].passes.append(PassRecord(pass_index, DECODE, len(tokens), 0.0))
        requests[-1].output_tokens = len(requests[-1].passes)
        pass_index += 1
    path = writer.close(requests)
    assert path is not None, "no token was written"
    return path


def write_pass(
    writer: TraceWriter, index: int, batch: FloatArray, kept: str, looking: list[Any]
) -> None:
    """Write one pass: `batch` is [layers, tokens, experts]."""
    num_tokens = batch.shape[1]
    chosen = np.argsort(-batch, axis=-1, kind="stable")[:, :, :TOP_K]
    noise = 0.3 * np.random.default_rng(index).normal(size=batch.shape)
    asked = (batch + noise).astype(np.float16).astype(np.float32)
    for layer in range(LAYERS):
        experts = chosen[layer]
        ahead = {layer + 1: asked[layer + 1]} if layer + 1 < LAYERS else {}
        keys = unique_in_order(layer, EXPERTS, experts)
        event = Event(index, layer, DECODE, num_tokens, keys, experts, predicted=ahead)
        scores = np.take_along_axis(softmax(batch[layer]), experts, -1)
        bits = scores.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
        writer.add(
            layer,
            experts,
            bits.view(np.float32) if kept in ("lossless", "all") else None,
            batch[layer] if kept == "all" else None,
            list(ahead.values()) if kept == "all" else [],
            [list(each.propose(event)) for each in looking],
        )


def run(path: Path) -> None:
    """Replay with what was kept, and print what it took."""
    begin = time.perf_counter()
    trace = open_trace(path, predicted=True)
    read_s = time.perf_counter() - begin
    setting = Setting(
        policy=POLICY,
        capacity=parse_capacity("25%", GEOMETRY),
        hardware=load_hardware("a100-5GBps", None),
    )
    engine = replay(trace, setting)
    replay_s = time.perf_counter() - begin - read_s
    requests = sum(p.requests for p in engine.ledger.passes)
    way = "streamed" if isinstance(trace, StreamedTrace) else "read"
    print(f"replay     {requests} requests, {way} {read_s:.1f} s, replayed {replay_s:.1f} s")
    print(f"peak       {peak_gib():.2f} GiB resident")


def run_cell(path: Path) -> None:
    """Replay as a cell of a sweep whose shared run recorded this trace: lm-eval, torch and all."""
    from lm_eval_moecache.sweep.identity import Share
    from lm_eval_moecache.sweep.replaying import replayed
    from lm_eval_moecache.sweep.sharing import TRACES, SharedRun
    from lm_eval_moecache.sweep.spec import Cell
    from lm_eval_moecache.sweep.validation import check_cell

    arguments = {"policy": POLICY.name, "capacity": "25%"}
    tasks = ("tiny_arc",)
    cell = Cell(model="moecache", model_args=arguments, tasks=tasks, options={}, include_path=())
    planned = dataclasses.replace(check_cell(cell), share=Share(name="run", records=False))
    files = SharedRun(path.parent, "run")
    (path.parent / TRACES).mkdir()
    files.trace.hardlink_to(path)
    kept = {"run_id": "run", "kept": {"results": {}, "config": {}}}
    files.results.write_text(json.dumps(kept))
    begin = time.perf_counter()
    replayed(planned, path.parent)
    print(f"as a cell  {time.perf_counter() - begin:.1f} s, read and replayed")
    print(f"peak       {peak_gib():.2f} GiB resident")


def peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--requests", type=int, default=0)
    parser.add_argument("--kept", choices=KINDS, default="sweep")
    parser.add_argument("--replay", help=argparse.SUPPRESS)
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.replay:
        run(Path(options.replay))
        return
    if options.cell:
        run_cell(Path(options.cell))
        return
    with tempfile.TemporaryDirectory() as name:
        for kept in KINDS if options.tokens else ():
            size = write(Path(name), options.tokens, kept).stat().st_size
            print(f"{kept:10s} {size / options.tokens / 1000:.3f} kB a token", flush=True)
        if options.requests:
            # A prompt's tokens share experts: counted from the decoded ones alone.
            tokens = -(-options.requests // (LAYERS * TOP_K) * 4 // 3)
            path = write(Path(name), tokens, options.kept)
            print(f"trace      {tokens} tokens, {path.stat().st_size / 1e6:.1f} MB", flush=True)
            # A sweep's traces hold proposals and no predictions.
            for way in ("--replay", "--cell")[: 1 if options.kept == "all" else 2]:
                subprocess.run([sys.executable, __file__, way, str(path)], check=True)


if __name__ == "__main__":
    main()

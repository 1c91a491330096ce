"""Does the forecast meet llama.cpp on this machine? Two fitted constants, half of the cells unseen.

Writes GGUF files of random weights in OLMoE's and Qwen3-30B-A3B's shapes, cut to a few layers and
a small vocabulary, in three precisions; runs each by llama.cpp's server (`pip install xllamacpp`)
with one and two threads at two context lengths, and forecasts every cell from its bytes, its
weights, and the memory's rate, measured before and after each run as `moecache profile hardware`
measures it. The share of that rate and the time of a multiply-add are fitted on every other cell. A
run takes the fastest of three answers, a cell the median of `--rounds` runs.

    python benchmarks/llama_cpp.py [--rounds 1] [--folder DIR]
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lm_eval_moecache.records.hardware import load_hardware
from lm_eval_moecache.records.runtimes import load_runtime
from moecache_plan.forecast import token_work
from moecache_plan.machines import as_machine
from moecache_plan.models import load_model
from moecache_plan.placement import place, read_placement

SHAPES = {
    # Layers, experts, top-k, width, expert width, heads, KV heads, width of a head.
    "olmoe": (3, 64, 8, 2048, 1024, 16, 16, 128),
    "qwen3moe": (2, 128, 8, 2048, 768, 32, 4, 128),
}
VOCABULARY = 16_384
PRECISIONS = ("Q4_0", "Q8_0", "F16")
CONTEXTS = (32, 640)
THREADS = (1, 2)
TOKENS = 16
REPEATS = 3
RATE_BYTES = 2**28
BAR = 0.10
"""Largest median error over the cells that played no part in the fit."""


class Cell(NamedTuple):
    """One setting: what is run, by how many threads, after how many tokens of context."""

    shape: str
    precision: str
    threads: int
    context: int


def write_model(shape: str, precision: str, path: Path) -> None:
    """Write a GGUF file of random weights; experts repeat one matrix, which is read as slowly."""
    import gguf

    layers, experts, top_k, width, inner, heads, kv_heads, head = SHAPES[shape]
    kind = gguf.GGMLQuantizationType[precision]
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, shape)
    writer.add_context_length(4096)
    writer.add_embedding_length(width)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(inner)
    writer.add_expert_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    writer.add_expert_count(experts)
    writer.add_expert_used_count(top_k)
    writer.add_vocab_size(VOCABULARY)
    # The server wants a tokenizer, though prompts are given in tokens.
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = special + [f"word{index}" for index in range(len(special), VOCABULARY)]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(words)
    writer.add_token_scores([0.0] * VOCABULARY)
    writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * (VOCABULARY - len(special))])

    def matrix(name: str, rows: int, columns: int, copies: int = 0) -> None:
        values = random.standard_normal((rows, columns), dtype=np.float32) / math.sqrt(columns)
        data = gguf.quants.quantize(values, kind)
        if copies:
            data = np.broadcast_to(data, (copies, *data.shape)).copy()
        writer.add_tensor(f"{name}.weight", data, raw_dtype=kind)

    def norm(name: str, size: int) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(size, dtype=np.float32))

    matrix("token_embd", VOCABULARY, width)
    matrix("output", VOCABULARY, width)
    norm("output_norm", width)
    for layer in range(layers):
        block = f"blk.{layer}"
        norm(f"{block}.attn_norm", width)
        norm(f"{block}.ffn_norm", width)
        # OLMoE normalizes whole queries and keys, Qwen3 each head.
        norm(f"{block}.attn_q_norm", head if shape == "qwen3moe" else width)
        norm(f"{block}.attn_k_norm", head if shape == "qwen3moe" else kv_heads * head)
        matrix(f"{block}.attn_q", heads * head, width)
        matrix(f"{block}.attn_k", kv_heads * head, width)
        matrix(f"{block}.attn_v", kv_heads * head, width)
        matrix(f"{block}.attn_output", width, heads * head)
        gate = random.standard_normal((experts, width), dtype=np.float32)
        writer.add_tensor(f"{block}.ffn_gate_inp.weight", gate)
        matrix(f"{block}.ffn_gate_exps", inner, width, experts)
        matrix(f"{block}.ffn_up_exps", inner, width, experts)
        matrix(f"{block}.ffn_down_exps", width, inner, experts)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# --- one process a run ---


def serve(path: str, threads: int) -> None:
    """Print the memory rate of so many threads, and the decoding seconds at each context."""
    import xllamacpp

    rates = [read_rate()]
    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx, params.n_parallel, params.n_gpu_layers = 1024, 1, 0
    params.cpuparams.n_threads = threads
    params.cpuparams_batch.n_threads = os.cpu_count() or 1
    params.fit_params, params.verbosity = False, -1
    server = xllamacpp.Server(params)
    random = np.random.default_rng(1)
    seconds = {}
    for context in CONTEXTS:
        prompt = random.integers(300, VOCABULARY, context).tolist()
        request = {"prompt": prompt, "n_predict": TOKENS, "ignore_eos": True, "cache_prompt": True}
        times = []
        for _ in range(REPEATS):
            answer: Any = server.handle_completions({**request, "temperature": 1.0, "seed": 1})
            times.append(answer["timings"]["predicted_per_token_ms"] / 1000)
        seconds[context] = min(times)
    rates.append(read_rate())
    print(json.dumps({"rate": max(rates), "seconds": seconds}), flush=True)
    os._exit(0)  # the server's threads need not be waited for


def read_rate() -> float:
    """Return bytes/s of products of one row with matrices that no cache holds.

    As `moecache profile hardware` measures the host's memory, without torch's imports.
    """
    weights = np.ones((RATE_BYTES // 2**22, 1024, 1024), dtype=np.float32)
    row, passes = np.ones((1, 1024), dtype=np.float32), []
    for _ in range(4):
        start = time.perf_counter()
        for matrix in weights:
            row @ matrix
        passes.append(time.perf_counter() - start)
    return float(weights.nbytes / min(passes[1:]))


class Run(NamedTuple):
    """One measurement of a cell: the memory's rate at that time, and seconds a token."""

    rate: float
    seconds: float


def run(path: Path, threads: int) -> dict[int, Run]:
    """Return a run at each context, by a server in a process of its own."""
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    command = [sys.executable, __file__, "--serve", str(path), str(threads)]
    environment = {**os.environ, **dict.fromkeys(names, str(threads))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise RuntimeError(f"llama.cpp's server failed: {done.stderr[-2000:]}")
    found = json.loads(lines[-1])
    return {int(at): Run(found["rate"], seconds) for at, seconds in found["seconds"].items()}


# --- forecasts ---


def work_of(path: Path, cell: Cell, rate: float) -> tuple[float, float]:
    """Return the seconds that a token's reads would take at this rate, and its multiply-adds.

    The latter by thread: one or two threads multiply about as long as they read, where the many of
    a host with a card only wait for its memory.
    """
    context = cell.context + TOKENS // 2
    model, runtime = load_model(str(path)), load_runtime("llama.cpp")
    box = as_machine(load_hardware("none")).with_host_rate(rate)
    placed = place(model, box, runtime, read_placement("cpu"), context)
    layers, _, top_k, width, inner, heads, kv_heads, head = SHAPES[cell.shape]
    attention = 2 * width * head * (heads + kv_heads) + 2 * context * heads * head
    weights = layers * (attention + 3 * top_k * width * inner) + VOCABULARY * width
    return token_work(model, box, runtime, placed, context).host, weights / cell.threads


def fit(works: list[tuple[float, float]], seconds: list[float]) -> tuple[float, float]:
    """Return (1 / share of the rate, seconds a multiply-add), least squares of relative errors."""
    from scipy.optimize import nnls

    relative = np.array(works) / np.array(seconds)[:, None]
    scale = relative.max(axis=0)
    found = nnls(relative / scale, np.ones(len(seconds)))[0] / scale
    return float(found[0]), float(found[1])


def host_rate() -> float:
    """Return bytes/s of the host's memory by `moecache profile hardware`."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "host.yaml"
        words = ("profile", "hardware", "--device", "cpu", "--size", "256MiB", "--matmul", "256")
        command = [sys.executable, "-m", "lm_eval_moecache", *words, "--out", str(out)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr)
        rate = load_hardware(str(out)).host_memory_bytes_per_s
    assert rate is not None
    return rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--folder", help="where the files are written, 2.6 GB at a time")
    parser.add_argument("--serve", nargs=2, metavar=("FILE", "THREADS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve[0], int(options.serve[1]))
    print(f"load before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")
    host = host_rate()
    print(f"moecache profile hardware: host memory {host / 1e9:.1f} GB/s")
    runs: dict[Cell, list[Run]] = {}
    works: dict[Cell, tuple[float, float]] = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for shape, precision in itertools.product(SHAPES, PRECISIONS):
            path = Path(folder) / f"{shape}-{precision}.gguf"
            write_model(shape, precision, path)
            for _, threads in itertools.product(range(options.rounds), THREADS):
                for context, found in run(path, threads).items():
                    cell = Cell(shape, precision, threads, context)
                    works[cell] = work_of(path, cell, 1.0)
                    runs.setdefault(cell, []).append(found)
            path.unlink()
    report(works, runs)
    print(f"load after: {os.getloadavg()[0]:.1f}")
    print("mmap starved of RAM: not measured, which takes a control group of one's own")


def report(works: Mapping[Cell, tuple[float, float]], runs: Mapping[Cell, list[Run]]) -> None:
    """Print every cell as forecast, those of the fit marked, and the median error of the others."""
    rates = {
        threads: statistics.median(
            run.rate for cell in runs if cell.threads == threads for run in runs[cell]
        )
        for threads in THREADS
    }
    seconds = {cell: statistics.median(run.seconds for run in runs[cell]) for cell in runs}
    work = {cell: (works[cell][0] / rates[cell.threads], works[cell][1]) for cell in runs}
    # Every other cell, so that each precision, shape, context and thread count is on both sides.
    fitted = [cell for cell in runs if parity(cell) == 0]
    slowdown, multiply = fit([work[cell] for cell in fitted], [seconds[cell] for cell in fitted])
    for threads, rate in rates.items():
        print(f"{threads} threads read {rate / 1e9:.1f} GB/s")
    share = f"{100 / slowdown:.0f}% of that" if slowdown else "no time for reads"
    speed = f"{1e-9 / multiply:.1f} billion multiply-adds/s a thread" if multiply else "no others"
    print(f"fitted on {len(fitted)} cells: {share}, {speed}")
    print("shape     bits  threads  context  forecast  measured, tok/s  ratio")
    errors = []
    for cell in runs:
        told = slowdown * work[cell][0] + multiply * work[cell][1]
        ratio = seconds[cell] / told
        mark = "fitted" if cell in fitted else ""
        print(
            f"{cell.shape:9s} {cell.precision:5s} {cell.threads:7d} {cell.context:8d}"
            f"  {1 / told:8.1f}  {1 / seconds[cell]:15.1f}  {ratio:5.2f}  {mark}".rstrip()
        )
        if not mark:
            errors.append(abs(ratio - 1))
    found = statistics.median(errors)
    print(f"median error of {len(errors)} cells that were not fitted: {100 * found:.1f}%")
    print("pass" if found <= BAR else f"misses the bar of {100 * BAR:.0f}%")


def parity(cell: Cell) -> int:
    """Return 0 or 1, so that neighbours in any one setting differ."""
    return (
        list(SHAPES).index(cell.shape)
        + PRECISIONS.index(cell.precision)
        + THREADS.index(cell.threads)
        + CONTEXTS.index(cell.context)
    ) % 2


if __name__ == "__main__":
    main()

"""Encoding and decoding experts of OLMoE-1B-7B's shape: the libraries one by one beside ours.

    python benchmarks/encoding.py [--precision int8,int4,int3,int2] [--experts 8] [--threads N]

Per codec, in turn, medians: the library on one whole matrix after another beside our pieces (one
thread each, CPU time), and a layer of `--experts` one by one beside all threads (wall time). Ends
with 1 where a code or a weight differs by a bit.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lm_eval_moecache.model.precision.base import Codec
from lm_eval_moecache.model.precision.half_quadratic import HalfQuadratic
from lm_eval_moecache.model.precision.ladder import codec
from lm_eval_moecache.model.precision.stored import encode, workers

SHAPES = ((2048, 2048), (2048, 1024))
"""gate_up_proj and down_proj of an expert."""


def library_encode(found: Codec, matrix: Tensor) -> tuple[Tensor, ...]:
    if found.name == "int8":
        from bitsandbytes.functional import int8_vectorwise_quant

        return int8_vectorwise_quant(matrix.half())[:2]  # type: ignore[no-any-return]
    if not isinstance(found, HalfQuadratic):
        return found.encode(matrix)
    from hqq.core.quantize import Quantizer

    packed, meta = Quantizer.quantize(
        matrix,
        nbits=found.bits,
        group_size=found.group_size,
        axis=1,
        round_zero=found.bits == 4,
        device="cpu",
    )
    return packed, meta["scale"].half(), meta["zero"].half()


def library_decode(found: Codec, tensors: Sequence[Tensor], shape: tuple[int, int]) -> Tensor:
    if isinstance(found, HalfQuadratic):
        return found._decode_by_library(tensors, shape, torch.bfloat16)
    if found.name == "int8":
        from bitsandbytes.functional import int8_vectorwise_dequant

        return int8_vectorwise_dequant(*tensors).to(torch.bfloat16)  # type: ignore[no-any-return]
    return found.decode(tensors, shape, torch.bfloat16)


def in_turn(
    ways: Sequence[Callable[[], Any]], clock: Callable[[], int], rounds: int
) -> list[float]:
    """Return the median of each way's milliseconds, each round one after another."""
    taken: list[list[float]] = [[] for _ in ways]
    for _ in range(rounds):
        for times, way in zip(taken, ways, strict=True):
            start = clock()
            way()
            times.append((clock() - start) / 1e6)
    return [statistics.median(times) for times in taken]


def one_expert(found: Codec, matrices: Sequence[Tensor]) -> bool:
    """Print what one thread takes for one expert, and return whether all bits are equal."""
    torch.set_num_threads(1)
    stored = [found.encode(m) for m in matrices]
    theirs = [library_encode(found, m) for m in matrices]
    equal = all(
        torch.equal(a, b)
        for x, y in zip(stored, theirs, strict=True)
        for a, b in zip(x, y, strict=True)
    )

    def decode(how: Callable[..., Tensor]) -> list[Tensor]:
        return [how(t, m.shape) for t, m in zip(stored, matrices, strict=True)]

    def by_library(tensors: Sequence[Tensor], shape: Any) -> Tensor:
        return library_decode(found, tensors, tuple(shape))

    def by_us(tensors: Sequence[Tensor], shape: Any) -> Tensor:
        return found.decode(tensors, shape, torch.bfloat16)

    equal &= all(map(torch.equal, decode(by_library), decode(by_us)))
    encoded = in_turn(
        [
            lambda: [library_encode(found, m) for m in matrices],
            lambda: [found.encode(m) for m in matrices],
        ],
        time.thread_time_ns,
        3,
    )
    decoded = in_turn([lambda: decode(by_library), lambda: decode(by_us)], time.thread_time_ns, 11)
    for what, (before, after) in (("encode", encoded), ("decode", decoded)):
        print(
            f"{found.name}: {what} an expert, CPU ms: library {before:.1f}, ours {after:.1f}, "
            f"{before / after:.2f}x"
        )
    return equal


def one_layer(found: Codec, experts: int, threads: int) -> bool:
    """Print what a layer takes one by one (with all of torch's threads) and side by side."""
    module: Any = nn.Module()
    module.is_transposed, module.num_experts = False, experts
    stacked = (0.02 * torch.randn(experts, *SHAPES[0])).bfloat16()
    torch.set_num_threads(threads)
    (together,) = encode(module, stacked, [found])
    torch.set_num_threads(1)
    alone = [library_encode(found, m) for m in stacked]
    equal = all(map(torch.equal, together, map(torch.stack, zip(*alone, strict=True))))
    torch.set_num_threads(threads)
    before, after = in_turn(
        [
            lambda: [library_encode(found, m) for m in stacked],
            lambda: encode(module, stacked, [found]),
        ],
        time.perf_counter_ns,
        3,
    )
    print(
        f"{found.name}: {experts} matrices of {SHAPES[0][0]} x {SHAPES[0][1]}, {threads} threads, "
        f"ms: one by one {before:.0f}, {workers(SHAPES[0][0] * SHAPES[0][1])} side by side "
        f"{after:.0f}, {before / after:.2f}x"
    )
    return equal


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--precision", default="int8,int4,int3,int2")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    given = parser.parse_args()
    torch.manual_seed(0)
    matrices = [(0.02 * torch.randn(shape)).bfloat16() for shape in SHAPES]
    equal = True
    for name in given.precision.split(","):
        found = codec(name)
        same = one_expert(found, matrices) & one_layer(found, given.experts, given.threads)
        equal &= same
        print(f"{name}: {'all bits equal' if same else 'BITS DIFFER'}", flush=True)
    return not equal


if __name__ == "__main__":
    sys.exit(main())

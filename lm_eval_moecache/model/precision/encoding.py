"""Encodes the experts of a layer: all cores at work, memory bounded, the same codes as one by one.

Shapes: E experts; a matrix is [out, in].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice

import torch
from torch import Tensor, nn

from lm_eval_moecache.model.precision.base import Codec
from lm_eval_moecache.model.precision.stored import Encoded, expert_matrices

BYTES_PER_WEIGHT = 20
"""What any codec takes for a moment beside the matrix and its codes."""
MOST_BYTES = 2**30
"""What all matrices that are encoded at one time may take so."""

Noted = Callable[[], object]
Task = Callable[[], None]


def encode(
    experts: nn.Module, stacked: Tensor, codecs: Sequence[Codec], noted: Noted = lambda: None
) -> Encoded:
    """Encode one parameter [E, ...], and call `noted` after each expert at each level.

    Experts are encoded side by side, each by one thread: HQQ ends its search by an error of a
    matrix, so that experts in one tensor would stop each other's, and sums by several threads round
    differently. Into tensors that are there before: small ones that stay, between others that
    go, would keep the heap from shrinking.
    """
    found: Encoded = []
    for codec in codecs:
        turned = experts.is_transposed and not codec.as_it_lies
        matrices = [m.t() if turned else m for m in stacked.detach()]
        shape = tuple(matrices[0].shape)
        kept = tuple(
            torch.empty((len(matrices), *size), dtype=dtype, device=stacked.device)
            for size, dtype in codec.layout(shape)
        )
        on_cpu = (codec.encodes_on or stacked.device.type) == "cpu"
        at_once = workers(math.prod(shape)) if on_cpu else 1
        for _ in side_by_side(_tasks(codec, matrices, kept), at_once):
            noted()
        found.append(kept)
    return found


def workers(num_weights: int) -> int:
    """Return how many matrices of this size are encoded at a time: as many as torch has threads."""
    return max(1, min(torch.get_num_threads(), MOST_BYTES // (BYTES_PER_WEIGHT * num_weights)))


def side_by_side(tasks: Iterable[Task], at_once: int) -> Iterator[None]:
    """Run tasks in so many threads of one core each; yield as they end, in their order.

    What a task raises is raised here, once those that have begun are done; no other begins.
    """
    if at_once == 1:
        for task in tasks:
            yield task()
        return
    threads, rest = torch.get_num_threads(), iter(tasks)
    # torch keeps this number for each thread, and the last one given for threads to come.
    pool = ThreadPoolExecutor(at_once, "moecache-encode", torch.set_num_threads, (1,))
    try:
        running = [pool.submit(task) for task in islice(rest, 2 * at_once)]
        while running:
            ended: Future[None] = running.pop(0)
            yield ended.result()
            running += [pool.submit(task) for task in islice(rest, 1)]
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)


def _tasks(codec: Codec, matrices: Sequence[Tensor], kept: Sequence[Tensor]) -> Iterator[Task]:
    for expert, matrix in enumerate(matrices):

        def task(expert: int = expert, matrix: Tensor = matrix) -> None:
            for whole, part in zip(kept, codec.encode(matrix), strict=True):
                whole[expert].copy_(part)

        yield task


def store_experts(experts: nn.Module, codecs: Sequence[Codec]) -> dict[str, Encoded]:
    """Return a module's matrices, encoded; the module stays as it is."""
    return {name: encode(experts, m, codecs) for name, m in expert_matrices(experts).items()}

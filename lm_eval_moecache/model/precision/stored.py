"""Experts as they lie in the store: encoded at every level, all cores at work, memory bounded.

Shapes: E experts; a matrix is [out, in].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from lm_eval_moecache.model.precision.codecs import Codec

Encoded = list[tuple[Tensor, ...]]
"""Level -> the tensors [E, ...] that one parameter is stored as."""


def expert_matrices(experts: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of an experts module that hold one matrix for each expert."""
    named = experts.named_parameters(recurse=False)
    return {name: tensor.data for name, tensor in named if is_matrices(experts, tensor)}


def is_matrices(experts: nn.Module, tensor: Tensor) -> bool:
    return tensor.dim() == 3 and tensor.shape[0] == experts.num_experts


def matrix_shape(experts: nn.Module, stacked: Tensor) -> tuple[int, int]:
    """Return [out, in] of one expert's matrix, however the module has it lie."""
    _, first, second = stacked.shape
    return (second, first) if experts.is_transposed else (first, second)


def expert_bytes(experts: nn.Module, codecs: Sequence[Codec]) -> tuple[int, ...]:
    """Return the size of one expert at each level: matrices encoded, biases as they are."""
    matrices = expert_matrices(experts)
    plain = sum(p.nbytes for p in experts.parameters()) - sum(m.nbytes for m in matrices.values())
    num_experts = len(next(iter(matrices.values())))
    shapes = [matrix_shape(experts, stacked) for stacked in matrices.values()]
    return tuple(
        sum(codec.nbytes(shape) for shape in shapes) + plain // num_experts for codec in codecs
    )


def decode(experts: nn.Module, stacked: Tensor, tensors: Sequence[Tensor], codec: Codec) -> Tensor:
    """Return one expert's matrix as computations use it; `stacked` gives shape and dtype."""
    matrix = codec.decode(tensors, matrix_shape(experts, stacked), stacked.dtype)
    return matrix.t() if experts.is_transposed else matrix


def shape_without_memory(tensor: Tensor, device: Any = None) -> nn.Parameter:
    """Return a parameter of the tensor's shape and dtype that takes one number's memory.

    On the tensor's device, or on another one.
    """
    one = torch.zeros((), dtype=tensor.dtype, device=device or tensor.device)
    return nn.Parameter(one.expand(tensor.shape), requires_grad=False)


def takes_no_memory(tensor: Tensor) -> bool:
    """Whether a tensor is a shape that `shape_without_memory` has made."""
    return tensor.numel() > 1 and not any(tensor.stride())


BYTES_PER_WEIGHT = 20
"""What any codec takes for a moment beside the matrix and its codes."""
MOST_BYTES = 2**30
"""What all matrices that are encoded at one time may take so."""


def encode(
    experts: nn.Module,
    stacked: Tensor,
    codecs: Sequence[Codec],
    noted: Callable[[], object] = lambda: None,
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

        def task(expert: int, matrix: Tensor, codec: Codec = codec, kept: Any = kept) -> None:
            for whole, part in zip(kept, codec.encode(matrix), strict=True):
                whole[expert].copy_(part)

        tasks = (partial(task, expert, matrix) for expert, matrix in enumerate(matrices))
        for _ in side_by_side(tasks, at_once):
            noted()
        found.append(kept)
    return found


def workers(num_weights: int) -> int:
    """Return how many matrices of this size are encoded at a time: as many as torch has threads."""
    return max(1, min(torch.get_num_threads(), MOST_BYTES // (BYTES_PER_WEIGHT * num_weights)))


def side_by_side(tasks: Iterable[Callable[[], None]], at_once: int) -> Iterator[None]:
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


def store_experts(experts: nn.Module, codecs: Sequence[Codec]) -> dict[str, Encoded]:
    """Return a module's matrices, encoded; the module stays as it is."""
    return {name: encode(experts, m, codecs) for name, m in expert_matrices(experts).items()}

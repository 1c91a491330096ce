"""Every codec: its bits and errors, by many threads, and its refusals."""

from __future__ import annotations

import importlib.metadata
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lm_eval_moecache.model.precision import codecs
from lm_eval_moecache.model.precision.codecs import (
    encode,
    expert_bytes,
    side_by_side,
    workers,
)
from lm_eval_moecache.model.precision.ladder import ALIASES, codec, codec_names
from tests.model.wall.scripted import NAME, scripted

SHAPE = (48, 128)
# Bits per weight, by hand: the weight itself, and its share of the scales. A row has 128 weights.
BITS = {
    "fp32": 32,
    "bf16": 16,
    "fp16": 16,
    "int8": 8 + 32 / 128,
    "nf4": 4 + 32 / 64,
    "fp4": 4 + 32 / 64,
    "hqq8": 8 + 32 / 64,
    "hqq4": 4 + 32 / 64,
    "hqq2": 2 + 32 / 64,
    # 96 groups make 10 rows of 32-bit words, of which the last holds 6 groups.
    "hqq3": 10 * 64 * 32 / (48 * 128) + 32 / 64,
}


def normal(shape: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return (0.02 * torch.randn(shape, generator=generator)).bfloat16()


def error(level: str, matrix: torch.Tensor) -> float:
    """Return the root mean square error as a share of the weights' spread."""
    coder = codec(level)
    decoded = coder.decode(coder.encode(matrix), matrix.shape, matrix.dtype)
    return float((decoded.float() - matrix.float()).pow(2).mean().sqrt() / matrix.float().std())


@pytest.mark.parametrize("name", codec_names())
@pytest.mark.parametrize("shape", [SHAPE, (64, 64), (8, 256), (7, 13)])
def test_layout_tells_what_encode_returns_and_decoding_what_was_asked_for(
    name: str, shape: tuple[int, int]
) -> None:
    coder = codec(name)
    if shape == (7, 13) and "hqq" in ALIASES.get(name, name):
        pytest.skip("its groups do not divide this")
    if shape == SHAPE:
        bits = coder.nbytes(SHAPE) * 8 / (SHAPE[0] * SHAPE[1])
        assert bits == pytest.approx(BITS[ALIASES.get(name, name)])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        tensors = coder.encode(normal(shape).to(dtype))
        assert tuple((tuple(t.shape), t.dtype) for t in tensors) == coder.layout(shape)
        assert all(tensor.is_contiguous() for tensor in tensors)
        assert sum(tensor.nbytes for tensor in tensors) == coder.nbytes(shape)
        decoded = coder.decode(tensors, shape, dtype)
        assert (decoded.shape, decoded.dtype) == (shape, dtype)


def test_error_grows_as_bits_shrink() -> None:
    ladder = ("bf16", "fp16", "int8", "nf4", "hqq3", "hqq2")
    errors = [error(name, normal((64, 256))) for name in ladder]
    assert errors[0] == errors[1] == 0
    assert errors == sorted(errors) and errors[2] > 0
    # Uniform rounding to 2 ** bits levels over about six spreads: a wrong format is far outside.
    assert errors[2] < 0.02 and errors[3] < 0.12 and errors[4] < 0.25 and errors[5] < 0.6


@pytest.mark.parametrize("name", ["hqq2", "hqq4", "nf4"])
def test_smaller_groups_cost_bytes_and_lose_less(name: str) -> None:
    fine, coarse = f"{name}/g64", f"{name}/g256"
    matrix = normal((64, 256))
    assert codec(fine).nbytes(matrix.shape) > codec(coarse).nbytes(matrix.shape)
    assert error(fine, matrix) < error(coarse, matrix)


def test_a_matrix_that_groups_do_not_divide_says_what_would() -> None:
    with pytest.raises(ValueError, match=r"multiple of 256 .*\(3, 50\).*'int2/g8'"):
        codec("int2").layout((3, 50))


@pytest.mark.parametrize("name", ["int8", "int4", "hqq3"])
def test_an_absent_library_is_an_error_that_says_what_would_do(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def version(package: str) -> str:
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr("lm_eval_moecache.model.precision.codecs.version", version)
    with pytest.raises(ValueError, match=rf"precision='{name}' needs \w+, .*pip install"):
        codec(name).check("cpu")


@pytest.mark.parametrize("name", ["int8", "int4", "int2", "bf16"])
def test_a_device_that_cannot_is_an_error_that_says_what_would_do(name: str) -> None:
    with pytest.raises(ValueError, match=rf"precision='{name}' does not work on the device 'xpu'"):
        codec(name).check("xpu")


@pytest.mark.parametrize("name", ["hqq2", "hqq3", "hqq4", "hqq8"])
def test_hqq_encodes_on_the_cpu_whatever_the_device(name: str) -> None:
    """On CUDA it would optimise in half precision: the codes would differ by device."""
    matrix = torch.randn(64, 64)
    with scripted("drawn"):
        encoded = codec(name).encode(matrix.to(NAME))
        assert {part.device.type for part in encoded} == {NAME}
        on_cpu = [part.cpu() for part in encoded]
    assert all(map(torch.equal, on_cpu, codec(name).encode(matrix)))
    assert codec(name).encodes_on == "cpu"


WHOLE = (96, 64)


def drawn(kind: str, shape: tuple[int, ...] = WHOLE) -> Tensor:
    """Return weights of a kind; HQQ's search ends early on some and late on others."""
    generator = torch.Generator().manual_seed(len(kind))
    normal = 0.02 * torch.randn(shape, generator=generator)
    if kind == "heavy":
        normal *= 1 + 40 * (torch.rand(shape, generator=generator) > 0.999)
    elif kind == "few":
        normal = (normal * 50).round() / 50
    elif kind == "equal":
        normal[...] = 0.25
    elif kind == "zero":
        normal[:, : shape[-1] // 2] = 0
    return normal.bfloat16()


KINDS = ("normal", "heavy", "few", "equal", "zero")


@pytest.fixture
def threads() -> Iterator[None]:
    """Three threads for torch; the suite's number is restored afterwards."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(num_threads)


def experts_of(kinds: tuple[str, ...] = KINDS) -> tuple[nn.Module, Tensor]:
    module: Any = nn.Module()
    module.is_transposed, module.num_experts = False, len(kinds)
    return module, torch.stack([drawn(kind) for kind in kinds])


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", codec_names())
def test_a_layer_by_three_threads_is_each_expert_by_itself(
    name: str, transposed: bool, threads: None
) -> None:
    module, stacked = experts_of()
    if transposed:
        module.is_transposed, stacked = True, stacked.transpose(1, 2).contiguous()  # type: ignore[assignment]
    coder, ticks = codec(name), list[None]()
    (parts,) = encode(module, "w", stacked, [coder], lambda: ticks.append(None))
    torch.set_num_threads(1)
    one_by_one = [coder.encode(m.t() if transposed else m) for m in stacked]
    for whole, own in zip(parts.values(), zip(*one_by_one, strict=True), strict=True):
        assert torch.equal(whole, torch.stack(own))
    assert len(ticks) == len(KINDS)


def test_threads_work_side_by_side_on_one_core_each_and_torch_keeps_its_number(
    threads: None,
) -> None:
    meeting = threading.Barrier(3, timeout=30)
    thread_counts: list[int] = []

    def task() -> None:
        meeting.wait()  # Fails unless all three are here at a time.
        thread_counts.append(torch.get_num_threads())

    assert len(list(side_by_side([task] * 6, 3))) == 6
    assert thread_counts == [1] * 6 and torch.get_num_threads() == 3


def test_what_goes_wrong_in_a_thread_is_raised_and_nothing_more_begins(threads: None) -> None:
    begun: list[int] = []

    def task(index: int) -> None:
        begun.append(index)
        if index == 1:
            raise MemoryError("no memory")
        time.sleep(0.02)

    with pytest.raises(MemoryError, match="no memory"):
        list(side_by_side((partial(task, i) for i in range(100)), 3))
    assert len(begun) < 50 and torch.get_num_threads() == 3


def test_memory_bounds_how_many_are_encoded_at_a_time(threads: None) -> None:
    assert workers(2048 * 2048) == 3
    # OLMoE's larger matrix takes 84 MB for a moment, Mixtral's 2.3 GB: all threads work on one.
    assert workers(14336 * 2 * 4096) == 1
    assert workers(2**30 // codecs.BYTES_PER_WEIGHT // 2) == 2


def test_an_expert_counts_its_own_biases_and_no_other() -> None:
    """Two matrices of 48 x 128, biases of 48 and 128 elements, bf16: one eighth of the module."""
    module = nn.Module()
    module.num_experts, module.is_transposed = 8, False
    for name, shape in (("up", SHAPE), ("down", SHAPE[::-1])):
        module.register_parameter(f"{name}_proj", nn.Parameter(torch.zeros(8, *shape).bfloat16()))
        bias = nn.Parameter(torch.zeros(8, shape[0]).bfloat16())
        module.register_parameter(f"{name}_bias", bias)
    biases = 2 * (48 + 128)
    plain, int8 = expert_bytes(module, [codec("bf16"), codec("int8")])
    assert plain == 2 * 2 * 48 * 128 + biases
    # A byte a weight and a scale of four bytes a row; biases are stored as they are.
    assert int8 == 2 * 48 * 128 + 4 * (48 + 128) + biases

"""Encoding by many threads and in pieces gives the codes, and decoding the weights, of one by one.

The libraries themselves, given one whole matrix, are the oracles.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import pytest
import torch
from hqq.core.quantize import Quantizer
from torch import Tensor, nn

from lm_eval_moecache.model.precision import codecs, stored
from lm_eval_moecache.model.precision.codecs import HalfQuadratic, pieces
from lm_eval_moecache.model.precision.ladder import codec, codec_names
from lm_eval_moecache.model.precision.stored import encode, side_by_side, workers

HQQ = ("hqq2", "hqq3", "hqq4", "hqq8")
SHAPE = (96, 64)


def drawn(kind: str, shape: tuple[int, ...] = SHAPE) -> Tensor:
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
    """Three threads: torch's number is the suite's again afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces that do not divide the rows: at most 960 weights."""

    def small(count: int, width: int, most: int = 0) -> list[slice]:
        return pieces(count, width, most=960)

    monkeypatch.setattr(codecs, "pieces", small)


def by_library(found: HalfQuadratic, matrix: Tensor) -> tuple[Tensor, ...]:
    packed, meta = Quantizer.quantize(
        matrix,
        nbits=found.bits,
        group_size=found.group_size,
        axis=1,
        round_zero=found.bits == 4,
        device="cpu",
    )
    return packed, meta["scale"].half(), meta["zero"].half()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", HQQ)
def test_hqq_in_pieces_gives_the_librarys_codes(name: str, kind: str, small_pieces: None) -> None:
    found = cast(HalfQuadratic, codec(name))
    expected = by_library(found, drawn(kind))
    assert all(map(torch.equal, found.encode(drawn(kind)), expected))


@pytest.mark.parametrize("name", ["hqq2", "hqq4"])
def test_hqq_gives_the_librarys_codes_of_a_matrix_of_several_whole_pieces(name: str) -> None:
    matrix = drawn("heavy", (768, 512))
    found = cast(HalfQuadratic, codec(name))
    assert len(pieces(768 * 512 // 64, 64)) == 3
    assert all(map(torch.equal, found.encode(matrix), by_library(found, matrix)))


@pytest.mark.parametrize("kind", KINDS)
def test_int8_in_pieces_gives_the_librarys_codes(kind: str, small_pieces: None) -> None:
    from bitsandbytes.functional import int8_vectorwise_quant

    matrix = drawn(kind, (97, 64))
    weights, absmax, _ = int8_vectorwise_quant(matrix.half())
    assert all(map(torch.equal, codec("int8").encode(matrix), (weights, absmax)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [*HQQ, "hqq2/g16", "hqq3/g8", "int8"])
def test_weights_are_decoded_to_the_librarys_bits(
    name: str, kind: str, dtype: torch.dtype, small_pieces: None
) -> None:
    from bitsandbytes.functional import int8_vectorwise_dequant

    found, shape = codec(name), (97, 64) if name == "int8" else SHAPE
    tensors = found.encode(drawn(kind, shape))
    if isinstance(found, HalfQuadratic):
        expected = found._decode_by_library(tensors, shape, dtype)
    else:
        expected = int8_vectorwise_dequant(*tensors).to(dtype)
    assert torch.equal(found.decode(tensors, shape, dtype), expected)


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
    found, noted = codec(name), list[None]()
    ((*together,),) = encode(module, stacked, [found], lambda: noted.append(None))
    torch.set_num_threads(1)
    alone = [found.encode(m.t() if transposed else m) for m in stacked]
    for whole, parts in zip(together, zip(*alone, strict=True), strict=True):
        assert torch.equal(whole, torch.stack(parts))
    assert len(noted) == len(KINDS)


def test_threads_work_side_by_side_on_one_core_each_and_torch_keeps_its_number(
    threads: None,
) -> None:
    meeting = threading.Barrier(3, timeout=30)
    found: list[int] = []

    def task() -> None:
        meeting.wait()  # All three are here at a time, or this fails.
        found.append(torch.get_num_threads())

    assert len(list(side_by_side([task] * 6, 3))) == 6
    assert found == [1] * 6 and torch.get_num_threads() == 3
    after: list[int] = []
    later = threading.Thread(target=lambda: after.append(torch.get_num_threads()))
    later.start()
    later.join()
    assert after == [3]


def test_what_goes_wrong_in_a_thread_is_raised_and_nothing_more_begins(threads: None) -> None:
    begun: list[int] = []

    def task(index: int) -> None:
        begun.append(index)
        if index == 1:
            raise MemoryError("no memory")

    with pytest.raises(MemoryError, match="no memory"):
        list(side_by_side((partial(task, i) for i in range(100)), 3))
    assert len(begun) <= 7 and torch.get_num_threads() == 3


def test_memory_bounds_how_many_are_encoded_at_a_time(threads: None) -> None:
    assert workers(2048 * 2048) == 3
    # OLMoE's larger matrix takes 84 MB for a moment, Mixtral's 2.3 GB: all threads work on one.
    assert workers(14336 * 2 * 4096) == 1
    assert workers(2**30 // stored.BYTES_PER_WEIGHT // 2) == 2

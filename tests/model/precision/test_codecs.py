"""Every codec: what it stores, what it gives back, and what it refuses."""

from __future__ import annotations

import importlib.metadata
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from lm_eval_moecache.model.precision.codecs import CODECS
from lm_eval_moecache.model.precision.ladder import ALIASES, NAMES, codec, codec_names

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


def normal(shape: tuple[int, ...] = SHAPE, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (0.02 * torch.randn(shape, generator=generator)).bfloat16()


def error(level: str, matrix: torch.Tensor) -> float:
    """Return the root mean square error as a share of the weights' spread."""
    found = codec(level)
    decoded = found.decode(found.encode(matrix), matrix.shape, matrix.dtype)
    return float((decoded.float() - matrix.float()).pow(2).mean().sqrt() / matrix.float().std())


@pytest.mark.parametrize("name", codec_names())
@pytest.mark.parametrize("shape", [SHAPE, (64, 64), (8, 256)])
def test_layout_tells_what_encode_returns_and_decoding_what_was_asked_for(
    name: str, shape: tuple[int, int]
) -> None:
    found = codec(name)
    if shape == SHAPE:
        bits = found.nbytes(SHAPE) * 8 / (SHAPE[0] * SHAPE[1])
        assert bits == pytest.approx(BITS[ALIASES.get(name, name)])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        tensors = found.encode(normal(shape).to(dtype))
        assert tuple((tuple(t.shape), t.dtype) for t in tensors) == found.layout(shape)
        assert all(tensor.is_contiguous() for tensor in tensors)
        assert sum(tensor.nbytes for tensor in tensors) == found.nbytes(shape)
        decoded = found.decode(tensors, shape, dtype)
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


@pytest.mark.parametrize("name", ["int8", "nf4", "fp4"])
def test_odd_shapes_go_through_bitsandbytes(name: str) -> None:
    found, shape = codec(name), (7, 13)
    tensors = found.encode(normal(shape))
    assert sum(tensor.nbytes for tensor in tensors) == found.nbytes(shape)
    assert found.decode(tensors, shape, torch.bfloat16).shape == shape


def test_int8_is_within_half_a_step_of_each_row() -> None:
    matrix = normal()
    found = codec("int8")
    decoded = found.decode(found.encode(matrix), SHAPE, torch.float32)
    step = matrix.float().abs().amax(dim=1, keepdim=True) / 127
    # The library rounds its scales: a thousandth of a step beside the half.
    assert ((decoded - matrix.float()).abs() <= 0.501 * step).all()


@pytest.mark.parametrize(
    ("level", "says"),
    [
        ("int5", "Did you mean 'int"),
        ("int8/g64", "has no groups"),
        ("int2/g7", "g8, g16"),
        ("int2/16", "precision='int2/16' is not known"),
        ("", "Allowed: bf16"),
    ],
)
def test_a_wrong_name_says_what_is_allowed(level: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        codec(level)


def test_a_matrix_that_groups_do_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match=r"multiple of 256 .*\(3, 50\).*'int2/g8'"):
        codec("int2").layout((3, 50))


@pytest.mark.parametrize(
    ("name", "found", "will_do"),
    [
        *((name, found, False) for name in ("int8", "int4", "hqq3") for found in ("0.1.0", None)),
        # Compared as versions.
        ("int8", "0.46.1", True),
        ("int8", "0.46.1rc1", False),
        ("int8", "v0.47.0+cu128", True),
    ],
)
def test_an_old_or_absent_library_is_an_error_that_says_what_would_do(
    monkeypatch: pytest.MonkeyPatch, name: str, found: str | None, will_do: bool
) -> None:
    def version(package: str) -> str:
        if found is None:
            raise importlib.metadata.PackageNotFoundError(package)
        return found

    monkeypatch.setattr("lm_eval_moecache.model.precision.codecs.version", version)
    words = rf"precision='{name}' needs \w+>=0\.\d.*pip install -U"
    with nullcontext() if will_do else pytest.raises(ValueError, match=words):
        codec(name).check("cpu")


@pytest.mark.parametrize("name", ["int8", "int4", "int2", "bf16"])
def test_a_device_that_cannot_is_an_error_that_says_what_would_do(name: str) -> None:
    with pytest.raises(ValueError, match=rf"precision='{name}' does not work on the device 'xpu'"):
        codec(name).check("xpu")


def test_names_are_listed_without_torch_codecs() -> None:
    assert set(ALIASES.values()) <= set(codec_names())
    assert set(NAMES) == set(CODECS)


def test_hqq_encodes_on_the_cpu_whatever_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA it would optimise in half precision: the codes would differ by device."""
    from hqq.core import optimize

    asked: set[tuple[str, str]] = set()
    step = optimize.optimize_weights_proximal_legacy_step

    def noted(weights: torch.Tensor, *given: Any) -> object:
        asked.add((weights.device.type, type(weights).__name__))
        return step(weights, *given)

    class OnDevice(torch.Tensor):
        """Says that it is moved to the CPU before it is encoded."""

        moved = 0

        def cpu(self, *args: object, **kwargs: object) -> torch.Tensor:
            type(self).moved += 1
            return self.as_subclass(torch.Tensor)

    monkeypatch.setattr(optimize, "optimize_weights_proximal_legacy_step", noted)
    matrix = torch.randn(64, 64).as_subclass(OnDevice)
    for name in ("hqq2", "hqq3", "hqq4", "hqq8"):
        assert codec(name).encodes_on == "cpu"
        codec(name).encode(matrix)
    assert OnDevice.moved == 4 and asked == {("cpu", "Tensor")}

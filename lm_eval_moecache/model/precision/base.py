"""The codec interface: a weight matrix in, the tensors that stand for it in the store out."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import ClassVar

import torch
from packaging.version import Version
from torch import Tensor

Layout = tuple[tuple[tuple[int, ...], torch.dtype], ...]
"""(shape, dtype) of each tensor that one encoded matrix consists of."""


class Codec(ABC):
    """Encodes [out, in] matrices of float weights and decodes them again.

    `layout` is a function of the shape alone, so a store can set slots of fixed size aside before
    there are any weights. `name` is what users type, the group size included.
    """

    source: ClassVar[str]
    """The library and the format."""
    library: ClassVar[str | None] = None
    """Package that does the work; None for torch itself."""
    minimum: ClassVar[str] = "0"
    """The library's oldest release that will do."""
    group_sizes: ClassVar[tuple[int, ...]] = ()
    """Allowed sizes of the groups of weights that share a scale; empty where there are none."""
    encodes_on: ClassVar[str | None] = None
    """Type of the device that encodes whatever the matrix lies on; None for the matrix' own."""
    as_it_lies: ClassVar[bool] = False
    """Whether a matrix is stored as the model has it, also where that is [in, out]."""

    def __init__(self, name: str, group_size: int | None = None) -> None:
        self.name = name
        self.group_size = 64 if group_size is None else group_size

    @abstractmethod
    def layout(self, shape: Sequence[int]) -> Layout:
        """Return what a matrix of this shape is stored as; ValueError where it cannot be."""

    @abstractmethod
    def encode(self, matrix: Tensor) -> tuple[Tensor, ...]:
        """Return contiguous tensors of `layout(matrix.shape)`, on the matrix' device.

        Called by several threads at a time.
        """

    @abstractmethod
    def decode(self, tensors: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the [out, in] matrix that computations use, at the compute dtype."""

    def nbytes(self, shape: Sequence[int]) -> int:
        """Return the bytes that one matrix of this shape takes in the store and on the link."""
        return sum(math.prod(size) * dtype.itemsize for size, dtype in self.layout(shape))

    def check(self, device_type: str) -> None:
        """Raise ValueError, saying what would do, where this codec cannot work on the device.

        Encodes and decodes a small matrix there: what counts is what the installed library does.
        """
        self._check_version()
        probe = torch.linspace(-1, 1, 64 * 64).reshape(64, 64)
        try:
            matrix = probe.to(device_type, torch.bfloat16)
            decoded = self.decode(self.encode(matrix), matrix.shape, torch.bfloat16)
            works = bool(decoded.isfinite().all())
            problem = "" if works else "it returns weights that are not finite"
        except Exception as error:
            # Libraries raise whatever they like where a kernel or a device is missing.
            first_line = next(iter(str(error).splitlines()), "")
            works, problem = False, f"{type(error).__name__}: {first_line}"
        if not works:
            raise ValueError(
                f"precision={self.name!r} does not work on the device {device_type!r} with "
                f"{self._installed()} ({problem}). Allowed: a device that it supports, as "
                "device=cpu, or another precision, as bf16 or fp16."
            )

    def _check_version(self) -> None:
        if self.library is None:
            return
        try:
            found = version(self.library)
        except PackageNotFoundError:
            found = None
        if found is None or Version(found) < Version(self.minimum):
            raise ValueError(
                f"precision={self.name!r} needs {self.library}>={self.minimum}, but "
                f"{'none' if found is None else found} is installed. Allowed: "
                f"pip install -U {self.library}, or a precision without it, as bf16 or fp16."
            )

    def _installed(self) -> str:
        name = self.library or "torch"
        return f"{name} {version(name)}"


def num_weights(shape: Sequence[int], codec: Codec, multiple: int) -> int:
    """Return the number of weights of a matrix, which the codec takes only in such multiples."""
    count = math.prod(shape)
    if count % multiple:
        raise ValueError(
            f"precision={codec.name!r} stores weights in groups that need a multiple of {multiple} "
            f"weights, but an expert matrix of this model is {tuple(shape)}. Allowed: a smaller "
            f"group, as '{codec.name.partition('/')[0]}/g{min(codec.group_sizes)}', or a precision "
            "without groups, as int8 or bf16."
        )
    return count


PIECE = 1 << 17
"""Weights that are worked on at a time on a CPU: what is made between fits into a core's cache."""


def pieces(count: int, width: int, most: int = PIECE) -> list[slice]:
    """Divide `count` rows of `width` weights into pieces that are worked on one after another."""
    rows = max(1, most // width)
    return [slice(start, min(start + rows, count)) for start in range(0, count, rows)]

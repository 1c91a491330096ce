"""Where absent experts lie: in host memory, or in files that are read when needed."""

from __future__ import annotations

import json
import math
import mmap
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from lm_eval_moecache.model.wall.reading import Bytes, FileReader, Piece

Row = Mapping[str, Tensor]
"""Parameter name -> one expert's part of it."""
_DTYPES = {
    **{"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32},
    # What codecs store.
    **{"U8": torch.uint8, "I8": torch.int8, "I32": torch.int32},
}


class Tier(ABC):
    """Gives the weights of any expert, to any thread."""

    @abstractmethod
    def fill(self, layer: int, expert: int, target: Row) -> None:
        """Copy an expert's weights into host memory. Raises OSError where they cannot be read."""

    def source(self, layer: int, expert: int) -> Row | None:
        """Return an expert's weights where they lie in memory that a device can copy from."""
        return None


class RamTier(Tier):
    """Experts in host memory: layer -> parameter name -> [experts, ...]."""

    def __init__(self, parameters: Sequence[dict[str, Tensor]]) -> None:
        self._parameters = parameters

    def fill(self, layer: int, expert: int, target: Row) -> None:
        for name, tensor in target.items():
            tensor.copy_(self._parameters[layer][name][expert])

    def source(self, layer: int, expert: int) -> Row:
        return {name: stacked[expert] for name, stacked in self._parameters[layer].items()}

    def pin(self) -> None:
        """Lock the memory, so that a device can copy from it at full speed; one tensor at a time.

        Copies, because a map of a file and small tensors that share a page cannot be locked where
        they are. Registered at their exact sizes: torch's own pinned memory comes in powers of
        two, 77 GB for 58. Raises OSError where the system does not lock so much.
        """
        for row in self._parameters:
            for name in row:
                row[name] = locked_copy(row[name])


def locked_copy(tensor: Tensor) -> Tensor:
    """Return a copy in `locked_empty`."""
    locked = locked_empty(tuple(tensor.shape), tensor.dtype)
    locked.copy_(tensor)
    return locked


PORTABLE = 1
"""cudaHostRegisterPortable: locked for every device, whichever is the thread's own."""


def locked_empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return memory that is locked for a CUDA device: whole pages of its own, so many and no more.

    A page that two tensors shared could not be locked for both. It stays locked as long as it is
    held. Raises OSError where the system does not lock so much.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    # Anonymous memory begins with a page; private, as all that is this process' own.
    private = getattr(mmap, "MAP_PRIVATE", None)
    given = {} if private is None else {"flags": private | mmap.MAP_ANONYMOUS}
    buffer = mmap.mmap(-1, nbytes, **given)
    made = torch.frombuffer(buffer, dtype=torch.uint8, count=nbytes).view(dtype).reshape(shape)
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    storage = made.untyped_storage()
    code = int(runtime.cudaHostRegister(storage.data_ptr(), storage.nbytes(), PORTABLE))
    if code:
        raise OSError(
            f"{storage.nbytes()} bytes of host memory cannot be locked for the GPU (CUDA error "
            f"{code}). Allowed: more memory, a higher limit of locked memory, or store=disk."
        )
    weakref.finalize(storage, runtime.cudaHostUnregister, storage.data_ptr())
    return made


Span = tuple[str, int, int]
"""A file, where something begins in it, and its bytes."""


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor in a safetensors file, from `offset` on: a layer's parameter [experts, ...]."""

    file: str
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def files(self) -> set[str]:
        return {self.file}

    def spans(self, expert: int) -> Sequence[Span]:
        """Return where an expert's part lies, piece after piece."""
        size = self.nbytes // self.shape[0]
        return ((self.file, self.offset + expert * size, size),)


@dataclass(frozen=True, slots=True)
class Joined:
    """One layer's parameter whose experts lie in tensors of their own: row blocks, one by one."""

    experts: Sequence[Sequence[Stored]]
    """Expert -> the matrices [rows, ...] that follow one another in its part."""

    @property
    def files(self) -> set[str]:
        return {part.file for parts in self.experts for part in parts}

    def spans(self, expert: int) -> Sequence[Span]:
        found: list[Span] = []
        for part in self.experts[expert]:
            if found and found[-1][0] == part.file and sum(found[-1][1:]) == part.offset:
                file, start, size = found.pop()
                found.append((file, start, size + part.nbytes))
            else:
                found.append((part.file, part.offset, part.nbytes))
        return found


class OnDisk(Protocol):
    """One layer's parameter in files."""

    @property
    def files(self) -> set[str]: ...

    def spans(self, expert: int) -> Sequence[Span]:
        """Return where an expert's part lies, piece after piece."""


class DiskTier(Tier):
    """Experts in files. They are read, not mapped: a bad file is an error and no bus error."""

    def __init__(
        self,
        parameters: Sequence[Mapping[str, OnDisk]],
        beside: Sequence[Mapping[str, Tensor]] | None = None,
        past_cache: bool = False,
    ) -> None:
        """`beside`: layer -> small parameters [experts, ...] that stay in memory, as biases."""
        self._parameters, self._beside = parameters, beside
        files = {file for row in parameters for stored in row.values() for file in stored.files}
        self._reader = FileReader(files, past_cache)

    def fill(self, layer: int, expert: int, target: Row) -> None:
        pieces: list[Piece] = []
        for name, tensor in target.items():
            if self._beside is not None and name in self._beside[layer]:
                tensor.copy_(self._beside[layer][name][expert])
                continue
            rest: Bytes = tensor.reshape(-1).view(torch.uint8).numpy()
            for file, offset, size in self._parameters[layer][name].spans(expert):
                pieces.append((file, offset, rest[:size]))
                rest = rest[size:]
        try:
            self._reader.read(pieces)
        except OSError as error:
            raise OSError(f"MoE layer {layer}, expert {expert}: {error}") from error


def find_stored(file: Path | str, name: str) -> Stored:
    """Find a parameter in a safetensors file. Raises ValueError where the file is not sound."""
    found = tensors_in(file).get(name)
    if found is None:
        raise ValueError(f"store='disk': {file} is not a sound safetensors file with {name!r}.")
    return found


def tensors_in(file: Path | str) -> dict[str, Stored]:
    """Return a safetensors file's tensors, of types that are known here, and read none of them.

    Raises ValueError where the file is not sound.
    """
    try:
        whole = os.path.getsize(file)
        with open(file, "rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > whole:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        entries = [
            (name, entry["data_offsets"], tuple(entry["shape"]), entry["dtype"])
            for name, entry in header.items()
        ]
        last = max((end for _, (_, end), _, _ in entries), default=0)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"store='disk': {file} is not a sound safetensors file: {error!r}"
        ) from error
    if 8 + length + last > whole:
        raise ValueError(f"store='disk': {file} is truncated: it ends inside its last tensor.")
    return {
        name: Stored(str(file), 8 + length + start, shape, _DTYPES[dtype])
        for name, (start, _), shape, dtype in entries
        if dtype in _DTYPES
    }

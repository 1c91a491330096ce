"""Where absent experts lie: in host memory, or in files that are read when needed.

Large pieces of files are read past the page cache, several at a time.
"""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lm_eval_moecache.model.device import can_lock, locked_copy

Bytes = NDArray[np.uint8]
Piece = tuple[str, int, Bytes]
"""A file, where something begins in it, and where it shall go."""
IN_FLIGHT = 2
"""Reads at a time: while one is copied to its place, the disk works on the next."""
PART = 2 << 20
"""Bytes of one read."""
DIRECT_FROM = 1 << 20
"""Pieces of so many bytes are read past the page cache: smaller ones gain nothing by it."""
_BLOCK = 4096


class FileReader:
    """Some files, open until the reader is gone, whoever removes them meanwhile.

    With `past_cache` large pieces are read with O_DIRECT where the file system can: a page cache
    that the files do not fit into costs the processor more than it saves, and its pages are
    somebody's memory.
    """

    def __init__(self, files: Collection[str], past_cache: bool = False) -> None:
        self._files = {file: os.open(file, os.O_RDONLY) for file in sorted(files)}
        self._direct: dict[str, int] = {}
        for file in self._files if past_cache else ():
            try:
                self._direct[file] = os.open(file, os.O_RDONLY | os.O_DIRECT)
            except (OSError, AttributeError):  # a file system in memory; no Linux
                continue
        for descriptor in (*self._files.values(), *self._direct.values()):
            weakref.finalize(self, os.close, descriptor)
        self._pool = ThreadPoolExecutor(IN_FLIGHT, "moecache-read")
        self._own = threading.local()

    def read(self, pieces: Sequence[Piece]) -> None:
        """Fill the targets. Raises OSError where a file cannot be read, or ends before."""
        running: list[Future[None]] = []
        for file, offset, target in pieces:
            if file not in self._direct or len(target) < DIRECT_FROM:
                self._buffered(file, offset, target)
                continue
            for start in range(0, len(target), PART):
                part = target[start : start + PART]
                running.append(self._pool.submit(self._past_cache, file, offset + start, part))
        for error in [each.exception() for each in running]:
            if error is not None:
                raise error

    def _buffered(self, file: str, offset: int, target: Bytes) -> None:
        view = memoryview(target.data)
        while view:
            count = os.preadv(self._files[file], [view], offset)
            if not count:
                raise OSError(f"{file} ends at byte {offset}: the file is truncated.")
            view, offset = view[count:], offset + count

    def _past_cache(self, file: str, offset: int, target: Bytes) -> None:
        """Read whole blocks into a buffer of this thread, and copy what was asked for."""
        if not hasattr(self._own, "buffer"):
            # Of a map of its own, which begins at a page, as these reads need.
            self._own.buffer = np.frombuffer(mmap.mmap(-1, PART + 2 * _BLOCK), dtype=np.uint8)
        buffer: Bytes = self._own.buffer
        begin = offset // _BLOCK * _BLOCK
        size = -(-(offset + len(target)) // _BLOCK) * _BLOCK - begin
        found = 0
        while found < offset - begin + len(target):
            try:
                view = memoryview(buffer.data)[found:size]
                count = os.preadv(self._direct[file], [view], begin + found)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                # Larger blocks than ours, or a file system that opens so and does not read so.
                self._buffered(file, offset, target)
                return
            if not count:
                raise OSError(f"{file} ends at byte {begin + found}: the file is truncated.")
            found += count
        np.copyto(target, buffer[offset - begin : offset - begin + len(target)])


Row = Mapping[str, Tensor]
"""Parameter name -> one expert's part of it."""
Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Parameter name -> shape and type of one expert's part of it."""
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
# What codecs store.
_DTYPES |= {"U8": torch.uint8, "I8": torch.int8, "I32": torch.int32}


class Tier(ABC):
    """Gives the weights of any expert, to any thread."""

    @abstractmethod
    def fill(self, layer: int, expert: int, target: Row) -> None:
        """Copy an expert's weights into host memory. Raises OSError where they cannot be read."""

    def source(self, layer: int, expert: int) -> Row | None:
        """Return an expert's weights where they lie in memory that a device can copy from."""
        return None

    def row(self, layer: int, expert: int, shapes: Shapes) -> Row:
        """Return an expert's weights in host memory, where they lie or read from there."""
        found = self.source(layer, expert)
        if found is None:
            found = {name: torch.empty(size, dtype=dtype) for name, (size, dtype) in shapes.items()}
            self.fill(layer, expert, found)
        return found


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
        they are. Raises OSError where the system does not lock so much.
        """
        if not can_lock():
            return
        for row in self._parameters:
            for name in row:
                row[name] = locked_copy(row[name])


Span = tuple[str, int, int]
"""A file, where something begins in it, and its bytes."""


OnDisk = Sequence[Sequence[Span]]
"""One layer's parameter in files: expert -> where its part lies, piece after piece."""


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor in a safetensors file, from `offset` on."""

    file: str
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def span(self) -> Span:
        return self.file, self.offset, math.prod(self.shape) * self.dtype.itemsize

    @property
    def by_expert(self) -> OnDisk:
        """Divide a parameter [experts, ...] between its experts."""
        file, offset, nbytes = self.span
        size = nbytes // self.shape[0]
        return [[(file, offset + expert * size, size)] for expert in range(self.shape[0])]


def joined(parts: Sequence[Stored]) -> Sequence[Span]:
    """Return where an expert lies whose matrices [rows, ...] are these tensors, one by one."""
    found: list[Span] = []
    for file, offset, size in (part.span for part in parts):
        if found and found[-1][0] == file and sum(found[-1][1:]) == offset:
            size += found[-1][2]
            offset = found.pop()[1]
        found.append((file, offset, size))
    return found


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
        rows = (row.values() for row in parameters)
        files = {f for row in rows for experts in row for spans in experts for f, _, _ in spans}
        self._reader = FileReader(files, past_cache)

    def fill(self, layer: int, expert: int, target: Row) -> None:
        pieces: list[Piece] = []
        for name, tensor in target.items():
            if self._beside is not None and name in self._beside[layer]:
                tensor.copy_(self._beside[layer][name][expert])
                continue
            rest: Bytes = tensor.reshape(-1).view(torch.uint8).numpy()
            for file, offset, size in self._parameters[layer][name][expert]:
                pieces.append((file, offset, rest[:size]))
                rest = rest[size:]
        try:
            self._reader.read(pieces)
        except OSError as error:
            raise OSError(f"MoE layer {layer}, expert {expert}: {error}") from error


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

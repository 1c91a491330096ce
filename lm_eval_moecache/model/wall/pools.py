"""Where experts lie: absent ones in host memory or files, resident ones in slots; and the copies.

Large pieces of files are read past the page cache, several at a time. Experts at the model's own
precision have slots of one size in one tensor for each parameter; encoded ones are moved as they
are stored, and a slot is as large as its expert at its level (`engine.wall.slots.LeveledCache`
says which there are; their bytes never exceed the capacity).
"""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lm_eval_moecache.engine.wall.link import Transfer
from lm_eval_moecache.engine.wall.slots import slots_of
from lm_eval_moecache.model.device import (
    can_lock,
    can_time,
    copy_stream,
    locked_copy,
    locked_empty,
    on_stream,
)
from lm_eval_moecache.model.precision.codecs import Codec, Encoded, expert_matrices, matrix_shape
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.sizes import Capacity

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


def expert_parameters(experts: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of an experts module that have one entry for each expert."""
    return {
        name: parameter.data
        for name, parameter in experts.named_parameters(recurse=False)
        if parameter.dim() > 1 and parameter.shape[0] == experts.num_experts
    }


def part_of(name: str, index: int) -> str:
    """Name one of the tensors that a parameter is stored as."""
    return f"{name}.{index}"


def stored_parameters(
    experts: nn.Module, stored: Mapping[str, Encoded], level: int
) -> dict[str, Tensor]:
    """Return what a tier holds of a layer at a level: encoded matrices, the rest as it is."""
    found = {
        part_of(name, i): tensor
        for name, levels in stored.items()
        for i, tensor in enumerate(levels[level])
    }
    plain = expert_parameters(experts).items()
    return {**found, **{name: tensor for name, tensor in plain if name not in stored}}


def shapes_of(experts: nn.Module, codec: Codec) -> Shapes:
    """Return the tensors of one expert as a codec stores it."""
    matrices = expert_matrices(experts)
    found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for name, stacked in matrices.items():
        for i, layout in enumerate(codec.layout(matrix_shape(experts, stacked))):
            found[part_of(name, i)] = layout
    for name, tensor in expert_parameters(experts).items():
        if name not in matrices:
            found[name] = (tuple(tensor.shape[1:]), tensor.dtype)
    return found


class DeviceMover(ABC):
    """The mover of the wall clock (`engine.wall.link.Mover`), for slots of any kind.

    On a device with streams copies go on one of their own, from pinned memory, after what their
    fence marks; `finish` waits for them in the worker's thread. A device with one queue (MPS) gets
    them in its order, by calls that return when the bytes are there.
    """

    def __init__(self, num_experts: int, device: torch.device) -> None:
        self._num_experts = num_experts
        self._device = device
        self._stream = copy_stream(device)
        # Copies on a stream overlap with the bookkeeping of the one before.
        self.depth = 1 if self._stream is None else 2
        self._staging: list[dict[tuple[str, torch.Size], Tensor]] = [{} for _ in range(self.depth)]
        self._turn = 0
        self._timed = self._stream is not None and can_time(device)

    @abstractmethod
    def target_of(self, transfer: Transfer) -> Row:
        """Return the tensors of a transfer's slot, by name."""

    @abstractmethod
    def tier_of(self, level: int) -> Tier:
        """Return where experts are stored at a level."""

    def place(self, transfer: Transfer) -> None:
        """Do nothing: the slots are there."""
        return

    def fence(self) -> object:
        """Mark what has been launched so far: kernels that may still read slots given away."""
        if self._stream is None:
            return None
        launched = torch.Event(self._device)
        launched.record(torch.accelerator.current_stream(self._device))
        return launched

    def begin(self, transfer: Transfer) -> object:
        layer, expert = divmod(transfer.key, self._num_experts)
        target, tier = self.target_of(transfer), self.tier_of(transfer.level)
        if self._device.type == "cpu":
            tier.fill(layer, expert, target)
            return None
        source = tier.source(layer, expert)
        if source is None:
            source = self._stage(tier, layer, expert, target)
        if self._stream is None:
            for name, tensor in target.items():
                tensor.copy_(source[name])
            return None
        after = cast(torch.Event, transfer.after)
        with on_stream(self._stream):
            self._stream.wait_event(after)
            done = torch.Event(self._device, enable_timing=self._timed)
            started = after
            if self._timed:
                started = torch.Event(self._device, enable_timing=True)
                started.record(self._stream)
            for name, tensor in target.items():
                tensor.copy_(source[name], non_blocking=True)
            done.record(self._stream)
        return started, done

    def finish(self, token: object) -> float | None:
        if token is None:
            return None
        started, done = cast(tuple[torch.Event, torch.Event], token)
        if self._timed:
            done.synchronize()
            return float(started.elapsed_time(done)) / 1000
        started.synchronize()
        start_s = time.perf_counter()
        done.synchronize()
        return time.perf_counter() - start_s

    def synchronize(self) -> None:
        if self._stream is not None:
            torch.accelerator.current_stream(self._device).synchronize()
        elif self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)

    def _stage(self, tier: Tier, layer: int, expert: int, target: Row) -> Row:
        """Read an expert into pinned memory; a buffer comes round once its copy was finished."""
        self._turn = (self._turn + 1) % self.depth
        held = self._staging[self._turn]
        buffer: dict[str, Tensor] = {}
        for name, t in target.items():
            # Layers need not have experts of one size.
            if (name, t.shape) not in held:
                held[name, t.shape] = locked_empty(tuple(t.shape), t.dtype)
            buffer[name] = held[name, t.shape]
        tier.fill(layer, expert, buffer)
        return buffer


class SlotPools(DeviceMover):
    """One tensor [slots, ...] per parameter of each cache: the mover of the wall clock.

    A layer's experts are found at `of_layer(layer)[name][slot]`. What is in no slot is zero, so
    that arithmetic on an empty one is finite.
    """

    def __init__(
        self,
        shapes: Sequence[Mapping[str, Tensor]],
        geometry: Geometry,
        capacity: Capacity,
        tier: Tier,
        device: torch.device,
    ) -> None:
        super().__init__(geometry.num_experts, device)
        self._tier = tier
        self._pools: list[dict[str, Tensor]] = []
        self._layers: list[tuple[dict[str, Tensor], bool, int]] = []
        partitions = capacity.partitions(geometry.num_layers)
        for size, layers in zip(capacity.bytes_by_partition, partitions, strict=True):
            slots = slots_of(size, geometry, layers)
            pool = {
                name: torch.zeros((slots, *tensor.shape[1:]), dtype=tensor.dtype, device=device)
                for name, tensor in shapes[layers[0]].items()
            }
            holds_all = slots == len(layers) * geometry.num_experts
            self._pools.append(pool)
            self._layers += [(pool, holds_all, layer - layers[0]) for layer in layers]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for pool in self._pools for tensor in pool.values())

    def of_layer(self, layer: int) -> dict[str, Tensor]:
        """Return the slots that a layer's experts may lie in, [slots, ...] for each parameter."""
        return self._layers[layer][0]

    def whole_layer(self, layer: int) -> dict[str, Tensor] | None:
        """Return a layer's experts in one piece [experts, ...] where the cache holds all."""
        pool, holds_all, place = self._layers[layer]
        if not holds_all:
            return None
        first = place * self._num_experts
        return {name: t[first : first + self._num_experts] for name, t in pool.items()}

    def stored(self, layer: int, expert: int) -> Row:
        """Return one expert from where it is stored, in host memory: nothing is cached."""
        pool = self.of_layer(layer).items()
        return self._tier.row(layer, expert, {n: (tuple(t.shape[1:]), t.dtype) for n, t in pool})

    def target_of(self, transfer: Transfer) -> Row:
        pool = self.of_layer(transfer.key // self._num_experts)
        return {name: t[transfer.slot] for name, t in pool.items()}

    def tier_of(self, level: int) -> Tier:
        return self._tier


class LadderPools(DeviceMover):
    """One set of tensors for each slot: the mover of the wall clock for encoded experts."""

    def __init__(
        self,
        shapes: Sequence[Sequence[Shapes]],
        tiers: Sequence[Tier],
        num_experts: int,
        device: torch.device,
    ) -> None:
        """`shapes[layer][level]` are of one expert's tensors; `tiers[level]` hold them."""
        super().__init__(num_experts, device)
        self._shapes, self._tiers = shapes, tiers
        self._slots: dict[int, tuple[int, Row]] = {}

    @property
    def num_bytes(self) -> int:
        """What the slots take now."""
        return sum(t.nbytes for _, row in self._slots.values() for t in row.values())

    def place(self, transfer: Transfer) -> None:
        for slot in transfer.drops:
            self._slots.pop(slot, None)
        shapes = self._shapes[transfer.key // self._num_experts][transfer.level]
        _, held = self._slots.pop(transfer.slot, (0, {}))
        if {name: (tuple(t.shape), t.dtype) for name, t in held.items()} != shapes:
            # Freed first, so that it makes room for the other.
            held = {}
            held = self._make(shapes)
        self._slots[transfer.slot] = (transfer.level, held)

    def target_of(self, transfer: Transfer) -> Row:
        return self._slots[transfer.slot][1]

    def tier_of(self, level: int) -> Tier:
        return self._tiers[level]

    def at(self, slot: int) -> tuple[int, Row]:
        """Return what lies in a slot, after its level."""
        return self._slots[slot]

    def stored(self, layer: int, expert: int) -> Row:
        """Return one expert at the best level from where it is stored: nothing is cached."""
        return self._tiers[0].row(layer, expert, self._shapes[layer][0])

    def _make(self, shapes: Shapes) -> Row:
        """Take memory for a slot, from what was dropped before if it fits.

        Everything is taken and given back on the copies' stream, by the thread that decides, so
        that a fence marked after this comes after all that has read what lay there.
        """
        with on_stream(self._stream):
            return {
                name: torch.empty(shape, dtype=dtype, device=self._device)
                for name, (shape, dtype) in shapes.items()
            }

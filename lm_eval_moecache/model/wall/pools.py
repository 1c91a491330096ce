"""Expert storage: absent ones in host memory or files, resident ones in slots; and the copies.

Experts at the model's own precision have slots of one size in one tensor per parameter. Encoded
ones are moved as stored, and a slot is as large as its expert at its level
(`engine.wall.slots.LeveledCache` decides which exist; their bytes never exceed the capacity).
"""

from __future__ import annotations

import json
import math
import os
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
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
from lm_eval_moecache.model.precision.codecs import (
    Codec,
    decode,
    expert_matrices,
    expert_parameters,
    matrix_shape,
    part_of,
    plain_parameters,
)
from lm_eval_moecache.model.store import Matrices, OnSlots, Slots
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.sizes import Capacity

DECODED_BYTES = 64 * 2**20
"""Experts are decoded together up to this size, and at least one."""
Places = Mapping[int, int]
"""Expert of the layer -> its slot, or its row among decoded experts."""
Row = Mapping[str, Tensor]
"""Parameter name -> one expert's part of it."""
Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Parameter name -> shape and type of one expert's part of it."""
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
# What codecs store.
_DTYPES |= {"U8": torch.uint8, "I8": torch.int8, "I32": torch.int32}


class Tier(ABC):
    """Holds the weights of all experts, for any thread to read."""

    @abstractmethod
    def fill(self, layer: int, expert: int, target: Row) -> None:
        """Copy an expert's weights into host memory. Raises OSError where they cannot be read."""

    def source(self, layer: int, expert: int) -> Row | None:
        """Return an expert's weights in place; None unless a device can copy from there."""
        return None

    def row(self, layer: int, expert: int, shapes: Shapes) -> Row:
        """Return an expert's weights in host memory, in place if possible, else as a copy."""
        row = self.source(layer, expert)
        if row is None:
            row = {name: torch.empty(size, dtype=dtype) for name, (size, dtype) in shapes.items()}
            self.fill(layer, expert, row)
        return row


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

        Copies, because file mappings and small tensors that share a page cannot be locked in
        place. Raises OSError where the system will not lock that much.
        """
        if not can_lock():
            return
        for row in self._parameters:
            for name in row:
                row[name] = locked_copy(row[name])


Span = tuple[str, int, int]
"""(file, offset, bytes)"""
OnDisk = Sequence[Sequence[Span]]
"""One layer's parameter in files: expert -> the spans of its part, in order."""


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor in a safetensors file, from `offset` on."""

    file: str
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def span(self) -> Span:
        """The tensor's file, offset and bytes."""
        return self.file, self.offset, math.prod(self.shape) * self.dtype.itemsize

    @property
    def by_expert(self) -> OnDisk:
        """The spans of a parameter [experts, ...], expert by expert."""
        file, offset, nbytes = self.span
        size = nbytes // self.shape[0]
        return [[(file, offset + expert * size, size)] for expert in range(self.shape[0])]


def joined(parts: Sequence[Stored]) -> Sequence[Span]:
    """Return the spans of an expert whose matrices are these tensors, adjacent ones joined."""
    spans: list[Span] = []
    for file, offset, size in (part.span for part in parts):
        if spans and spans[-1][0] == file and sum(spans[-1][1:]) == offset:
            size += spans[-1][2]
            offset = spans.pop()[1]
        spans.append((file, offset, size))
    return spans


class DiskTier(Tier):
    """Experts in files, which it holds open for its lifetime, even if they are deleted meanwhile.

    They are read, not mapped, so that a bad file raises an error instead of SIGBUS.
    """

    def __init__(
        self,
        parameters: Sequence[Mapping[str, OnDisk]],
        small: Sequence[Mapping[str, Tensor]] | None = None,
    ) -> None:
        """`small`: layer -> small parameters [experts, ...] that stay in memory, like biases."""
        self._parameters, self._small = parameters, small
        rows = (row.values() for row in parameters)
        files = {f for row in rows for experts in row for spans in experts for f, _, _ in spans}
        self._files = {file: os.open(file, os.O_RDONLY) for file in sorted(files)}
        for descriptor in self._files.values():
            weakref.finalize(self, os.close, descriptor)

    def fill(self, layer: int, expert: int, target: Row) -> None:
        if hasattr(os, "posix_fadvise"):
            # All spans at once: the disk reads the next one while one is copied.
            for experts in self._parameters[layer].values():
                for file, offset, size in experts[expert]:
                    os.posix_fadvise(self._files[file], offset, size, os.POSIX_FADV_WILLNEED)
        for name, tensor in target.items():
            if self._small is not None and name in self._small[layer]:
                tensor.copy_(self._small[layer][name][expert])
                continue
            buffer = memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data)
            for file, offset, size in self._parameters[layer][name][expert]:
                try:
                    self._read(file, offset, buffer[:size])
                except OSError as error:
                    raise OSError(f"MoE layer {layer}, expert {expert}: {error}") from error
                buffer = buffer[size:]

    def _read(self, file: str, offset: int, target: memoryview) -> None:
        while target:
            count = os.preadv(self._files[file], [target], offset)
            if not count:
                raise OSError(f"{file} ends at byte {offset}: the file is truncated.")
            target, offset = target[count:], offset + count


def tensors_in(file: Path | str) -> dict[str, Stored]:
    """Return the tensors of supported dtypes in a sound safetensors file, without reading them."""
    with open(file, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    tensors = dict[str, Stored]()
    for name, entry in header.items():
        if entry["dtype"] in _DTYPES:
            start, shape = 8 + length + entry["data_offsets"][0], tuple(entry["shape"])
            tensors[name] = Stored(str(file), start, shape, _DTYPES[entry["dtype"]])
    return tensors


def shapes_of(experts: nn.Module, codec: Codec) -> Shapes:
    """Return the shapes and dtypes of one expert's tensors as a codec stores them."""
    return {
        part_of(name, i): layout
        for name, stacked in expert_matrices(experts).items()
        for i, layout in enumerate(codec.layout(matrix_shape(experts, stacked)))
    } | {n: (tuple(t.shape[1:]), t.dtype) for n, t in plain_parameters(experts).items()}


class DeviceMover(ABC):
    """The wall clock's mover (`engine.wall.link.Mover`), for slots of any kind.

    On a device with streams, copies run on a stream of their own, from pinned memory, after their
    fence; `finish` waits for them in the worker's thread. A device with one queue (MPS) takes them
    in order, by calls that return once the bytes have arrived.
    """

    def __init__(self, num_experts: int, tiers: Sequence[Tier], device: torch.device) -> None:
        """`tiers[level]` stores the experts of a level."""
        self._num_experts, self._tiers = num_experts, tiers
        self._device = device
        self._stream = copy_stream(device)
        # A copy on a stream overlaps with the bookkeeping of the one before.
        self.depth = 1 if self._stream is None else 2
        self._staging: list[dict[tuple[str, torch.Size], Tensor]] = [{} for _ in range(self.depth)]
        self._turn = 0
        self._timed = self._stream is not None and can_time(device)

    @abstractmethod
    def target_of(self, transfer: Transfer) -> Row:
        """Return the tensors of a transfer's slot, by name."""

    @abstractmethod
    def stored(self, layer: int, expert: int) -> Row:
        """Return one expert from its tier, in host memory, without caching it."""

    @abstractmethod
    def parts(
        self, module: nn.Module, layer: int, places: Places
    ) -> Iterator[tuple[Places, Matrices]]:
        """Group a layer's experts by the `Matrices` that hold them, on a CPU."""

    @abstractmethod
    def windows(self, layer: int, places: Places, most: int) -> Iterator[tuple[Places, Slots]]:
        """Group experts by pieces of at most `most` slots, for a kernel of transformers."""

    def whole(self, module: nn.Module, layer: int) -> OnSlots | None:
        """Return a stand-in for the whole layer where the cache holds it in one piece."""
        return None

    def elsewhere(self, module: nn.Module, layer: int, experts: Sequence[int]) -> Matrices:
        """Return the matrices of experts in host memory, in the order given, without a transfer."""
        return _slot_by_slot(module, [self.stored(layer, expert) for expert in experts])

    def place(self, transfer: Transfer) -> None:
        """Do nothing: the slots exist already."""
        return

    def fence(self) -> object:
        """Record an event after all launched kernels, which may still read reassigned slots."""
        if self._stream is None:
            return None
        launched = torch.Event(self._device)
        launched.record(torch.accelerator.current_stream(self._device))
        return launched

    def begin(self, transfer: Transfer) -> object:
        """Start a transfer (on a CPU or one queue, make it); return the token for `finish`."""
        layer, expert = divmod(transfer.key, self._num_experts)
        target, tier = self.target_of(transfer), self._tiers[transfer.level]
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
        fence = cast(torch.Event, transfer.after)
        with on_stream(self._stream):
            self._stream.wait_event(fence)
            done = torch.Event(self._device, enable_timing=self._timed)
            started = fence
            if self._timed:
                started = torch.Event(self._device, enable_timing=True)
                started.record(self._stream)
            for name, tensor in target.items():
                tensor.copy_(source[name], non_blocking=True)
            done.record(self._stream)
        return started, done

    def finish(self, token: object) -> float | None:
        """Wait for a transfer; return the seconds it moved, None where `begin` has made it."""
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
        """Wait until the device has executed all queued compute."""
        if self._stream is not None:
            torch.accelerator.current_stream(self._device).synchronize()
        elif self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)

    def _stage(self, tier: Tier, layer: int, expert: int, target: Row) -> Row:
        """Read an expert into pinned memory; a buffer is reused once its copy has finished."""
        self._turn = (self._turn + 1) % self.depth
        buffers = self._staging[self._turn]
        buffer: dict[str, Tensor] = {}
        for name, t in target.items():
            # Layers need not have experts of one size.
            if (name, t.shape) not in buffers:
                buffers[name, t.shape] = locked_empty(tuple(t.shape), t.dtype)
            buffer[name] = buffers[name, t.shape]
        tier.fill(layer, expert, buffer)
        return buffer


def _slot_by_slot(module: nn.Module, rows: Sequence[Row]) -> Matrices:
    return Matrices(module, {name: [row[name] for row in rows] for name in rows[0]})


class SlotPools(DeviceMover):
    """One tensor [slots, ...] per parameter of each cache, for experts that are not encoded.

    A layer's experts are found at `of_layer(layer)[name][slot]`. Empty slots start as zeros, so
    that arithmetic on them is finite.
    """

    def __init__(
        self,
        shapes: Sequence[Mapping[str, Tensor]],
        geometry: Geometry,
        capacity: Capacity,
        tier: Tier,
        device: torch.device,
    ) -> None:
        super().__init__(geometry.num_experts, [tier], device)
        self._pools: list[dict[str, Tensor]] = []
        self._matrices: dict[int, Matrices] = {}
        """Pool -> the matrices of its slots, made once for all its layers."""
        self._whole: dict[int, OnSlots | None] = {}
        self._layers: list[tuple[int, bool, int]] = []
        """Layer -> its pool, whether that holds all its layers' experts, its place there."""
        partitions = capacity.partitions(geometry.num_layers)
        for size, layers in zip(capacity.bytes_by_partition, partitions, strict=True):
            slots = slots_of(size, geometry, layers)
            holds_all = slots == len(layers) * geometry.num_experts
            self._layers += [(len(self._pools), holds_all, layer - layers[0]) for layer in layers]
            self._pools.append(
                {
                    name: torch.zeros((slots, *t.shape[1:]), dtype=t.dtype, device=device)
                    for name, t in shapes[layers[0]].items()
                }
            )

    def of_layer(self, layer: int) -> dict[str, Tensor]:
        """Return the slots that a layer's experts may take, [slots, ...] for each parameter."""
        return self._pools[self._layers[layer][0]]

    def whole(self, module: nn.Module, layer: int) -> OnSlots | None:
        if layer not in self._whole:
            pool, holds_all, place = self._layers[layer]
            layer_slots = slice(place * self._num_experts, (place + 1) * self._num_experts)
            pieces = {name: tensor[layer_slots] for name, tensor in self._pools[pool].items()}
            self._whole[layer] = OnSlots(module, pieces) if holds_all else None
        return self._whole[layer]

    def parts(
        self, module: nn.Module, layer: int, places: Places
    ) -> Iterator[tuple[Places, Matrices]]:
        pool = self._layers[layer][0]
        if pool not in self._matrices:
            self._matrices[pool] = Matrices(module, self._pools[pool])
        yield places, self._matrices[pool]

    def windows(self, layer: int, places: Places, most: int) -> Iterator[tuple[Places, Slots]]:
        """Yield slices of the pool itself: nothing is copied."""
        slots = self.of_layer(layer)
        for start in range(0, len(next(iter(slots.values()))), most):
            end = start + most
            slot_of = {e: slot - start for e, slot in places.items() if start <= slot < end}
            if slot_of:
                yield slot_of, {name: pool[start:end] for name, pool in slots.items()}

    def stored(self, layer: int, expert: int) -> Row:
        pool = self.of_layer(layer).items()
        shapes = {name: (tuple(t.shape[1:]), t.dtype) for name, t in pool}
        return self._tiers[0].row(layer, expert, shapes)

    def target_of(self, transfer: Transfer) -> Row:
        pool = self.of_layer(transfer.key // self._num_experts)
        return {name: t[transfer.slot] for name, t in pool.items()}


class LadderPools(DeviceMover):
    """One set of tensors per slot, for encoded experts.

    They are decoded on the device, for one call of the layer, a few at a time.
    """

    def __init__(
        self,
        experts: Sequence[nn.Module],
        codecs: Sequence[Codec],
        tiers: Sequence[Tier],
        device: torch.device,
    ) -> None:
        """`experts` are the layers' modules; `tiers[level]` holds experts of `codecs[level]`."""
        super().__init__(int(experts[0].num_experts), tiers, device)  # type: ignore[arg-type]
        self._experts, self._codecs = experts, codecs
        self._shapes = [[shapes_of(module, codec) for codec in codecs] for module in experts]
        self._slots: dict[int, tuple[int, Row]] = {}

    def place(self, transfer: Transfer) -> None:
        for slot in transfer.drops:
            self._slots.pop(slot, None)
        shapes = self._shapes[transfer.key // self._num_experts][transfer.level]
        _, tensors = self._slots.pop(transfer.slot, (0, {}))
        if {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()} != shapes:
            # Freed first, to make room for the new one.
            tensors = {}
            tensors = self._make(shapes)
        self._slots[transfer.slot] = (transfer.level, tensors)

    def target_of(self, transfer: Transfer) -> Row:
        return self._slots[transfer.slot][1]

    def parts(
        self, module: nn.Module, layer: int, places: Places
    ) -> Iterator[tuple[Places, Matrices]]:
        for row_of, rows in self._decoded(layer, places):
            yield row_of, _slot_by_slot(module, rows)

    def windows(self, layer: int, places: Places, most: int) -> Iterator[tuple[Places, Slots]]:
        for row_of, rows in self._decoded(layer, places):
            yield row_of, {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    def stored(self, layer: int, expert: int) -> Row:
        """Return an expert as decoded from its best level."""
        return self._decode(layer, 0, self._tiers[0].row(layer, expert, self._shapes[layer][0]))

    def _decoded(self, layer: int, places: Places) -> Iterator[tuple[Places, list[Row]]]:
        """Decode experts in order, a few at a time; yield (expert -> its row, rows)."""
        row_of: dict[int, int] = {}
        rows: list[Row] = []
        nbytes = 0
        for expert, slot in sorted(places.items()):
            row_of[expert] = len(rows)
            rows.append(self._decode(layer, *self._slots[slot]))
            nbytes += sum(tensor.nbytes for tensor in rows[-1].values())
            if nbytes >= DECODED_BYTES:
                yield row_of, rows
                row_of, rows, nbytes = {}, [], 0
        if row_of:
            yield row_of, rows

    def _decode(self, layer: int, level: int, row: Row) -> Row:
        """Return one expert's parameters in the module's layout."""
        module, codec, parameters = self._experts[layer], self._codecs[level], dict[str, Tensor]()
        for name, parameter in expert_parameters(module).items():
            if name in row:
                parameters[name] = row[name]
                continue
            # Products of a transposed view may round differently.
            parameters[name] = decode(module, name, parameter, row, codec).contiguous()
        return parameters

    def _make(self, shapes: Shapes) -> Row:
        """Allocate a slot's tensors, in memory of dropped slots if it fits.

        Slots are allocated and freed on the copies' stream, by the thread that decides, so that a
        later fence comes after every read of what the memory held before.
        """
        with on_stream(self._stream):
            return {
                name: torch.empty(shape, dtype=dtype, device=self._device)
                for name, (shape, dtype) in shapes.items()
            }

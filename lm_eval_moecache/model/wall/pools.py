"""Where experts lie: absent ones in host memory or files, resident ones in slots; and the copies.

Experts at the model's own precision have slots of one size in one tensor for each parameter;
encoded ones are moved as they are stored, and a slot is as large as its expert at its level
(`engine.wall.slots.LeveledCache` says which there are; their bytes never exceed the capacity).
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
from safetensors import SafetensorError, safe_open
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
    Encoded,
    decode,
    expert_matrices,
    matrix_shape,
)
from lm_eval_moecache.model.store import Matrices, OnSlots, Slots
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.sizes import Capacity

DECODED_BYTES = 64 * 2**20
"""Experts are decoded together up to this size, and at least one."""
Places = Mapping[int, int]
"""Expert of the layer -> where it lies."""
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
    """Experts in files, which stay open until it is gone, whoever removes them meanwhile.

    They are read, not mapped: a bad file is an error and no bus error.
    """

    def __init__(
        self,
        parameters: Sequence[Mapping[str, OnDisk]],
        beside: Sequence[Mapping[str, Tensor]] | None = None,
    ) -> None:
        """`beside`: layer -> small parameters [experts, ...] that stay in memory, as biases."""
        self._parameters, self._beside = parameters, beside
        rows = (row.values() for row in parameters)
        files = {f for row in rows for experts in row for spans in experts for f, _, _ in spans}
        self._files = {file: os.open(file, os.O_RDONLY) for file in sorted(files)}
        for descriptor in self._files.values():
            weakref.finalize(self, os.close, descriptor)

    def fill(self, layer: int, expert: int, target: Row) -> None:
        if hasattr(os, "posix_fadvise"):
            # All of it at once: the disk works on the next piece while one is copied.
            for experts in self._parameters[layer].values():
                for file, offset, size in experts[expert]:
                    os.posix_fadvise(self._files[file], offset, size, os.POSIX_FADV_WILLNEED)
        for name, tensor in target.items():
            if self._beside is not None and name in self._beside[layer]:
                tensor.copy_(self._beside[layer][name][expert])
                continue
            rest = memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data)
            for file, offset, size in self._parameters[layer][name][expert]:
                try:
                    self._read(file, offset, rest[:size])
                except OSError as error:
                    raise OSError(f"MoE layer {layer}, expert {expert}: {error}") from error
                rest = rest[size:]

    def _read(self, file: str, offset: int, target: memoryview) -> None:
        while target:
            count = os.preadv(self._files[file], [target], offset)
            if not count:
                raise OSError(f"{file} ends at byte {offset}: the file is truncated.")
            target, offset = target[count:], offset + count


def tensors_in(file: Path | str) -> dict[str, Stored]:
    """Return a safetensors file's tensors, of types that are known here, and read none of them.

    Raises ValueError where the file is not sound.
    """
    try:
        # Compares its header with the file's size.
        with safe_open(file, framework="pt"), open(file, "rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length))
    except (OSError, SafetensorError) as error:
        problem = f"{file} is not a sound safetensors file"
        raise ValueError(f"store='disk': {problem}: {error!r}") from error
    header.pop("__metadata__", None)
    found = dict[str, Stored]()
    for name, entry in header.items():
        if entry["dtype"] in _DTYPES:
            start, shape = 8 + length + entry["data_offsets"][0], tuple(entry["shape"])
            found[name] = Stored(str(file), start, shape, _DTYPES[entry["dtype"]])
    return found


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

    @abstractmethod
    def stored(self, layer: int, expert: int) -> Row:
        """Return one expert from where it is stored, in host memory: nothing is cached."""

    @abstractmethod
    def parts(
        self, module: nn.Module, layer: int, places: Places
    ) -> Iterator[tuple[Places, Matrices]]:
        """Divide experts of a layer by the matrices that are made for them together, on a CPU."""

    @abstractmethod
    def windows(self, layer: int, places: Places, most: int) -> Iterator[tuple[Places, Slots]]:
        """Divide experts by pieces of at most so many slots, for a kernel of transformers."""

    def whole(self, module: nn.Module, layer: int) -> OnSlots | None:
        """Return a stand-in for the whole layer where the cache holds it in one piece."""
        return None

    def elsewhere(self, module: nn.Module, layer: int, experts: Sequence[int]) -> Matrices:
        """Return experts, slot by slot, as they are stored in host memory: no transfer."""
        return _slot_by_slot(module, [self.stored(layer, expert) for expert in experts])

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


def _slot_by_slot(module: nn.Module, rows: Sequence[Row]) -> Matrices:
    return Matrices(module, {name: [row[name] for row in rows] for name in rows[0]})


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
        self._matrices: dict[int, Matrices] = {}
        """Pool -> its slots as products take them, made once for all its layers."""
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

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for pool in self._pools for tensor in pool.values())

    def of_layer(self, layer: int) -> dict[str, Tensor]:
        """Return the slots that a layer's experts may lie in, [slots, ...] for each parameter."""
        return self._pools[self._layers[layer][0]]

    def whole(self, module: nn.Module, layer: int) -> OnSlots | None:
        if layer not in self._whole:
            pool, holds_all, place = self._layers[layer]
            own = slice(place * self._num_experts, (place + 1) * self._num_experts)
            pieces = {name: tensor[own] for name, tensor in self._pools[pool].items()}
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
        """Pieces of the pool itself: nothing is copied."""
        slots = self.of_layer(layer)
        for start in range(0, len(next(iter(slots.values()))), most):
            end = start + most
            own = {e: slot - start for e, slot in places.items() if start <= slot < end}
            if own:
                yield own, {name: pool[start:end] for name, pool in slots.items()}

    def stored(self, layer: int, expert: int) -> Row:
        pool = self.of_layer(layer).items()
        return self._tier.row(layer, expert, {n: (tuple(t.shape[1:]), t.dtype) for n, t in pool})

    def target_of(self, transfer: Transfer) -> Row:
        pool = self.of_layer(transfer.key // self._num_experts)
        return {name: t[transfer.slot] for name, t in pool.items()}

    def tier_of(self, level: int) -> Tier:
        return self._tier


class LadderPools(DeviceMover):
    """One set of tensors for each slot: the mover of the wall clock for encoded experts.

    They are decoded where they lie, for one call of the layer, a few at a time.
    """

    def __init__(
        self,
        experts: Sequence[nn.Module],
        codecs: Sequence[Codec],
        tiers: Sequence[Tier],
        device: torch.device,
    ) -> None:
        """`experts` are the layers' modules; `tiers[level]` hold what `codecs[level]` made."""
        super().__init__(int(experts[0].num_experts), device)  # type: ignore[arg-type]
        self._experts, self._codecs, self._tiers = experts, codecs, tiers
        self._shapes = [[shapes_of(module, codec) for codec in codecs] for module in experts]
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

    def parts(
        self, module: nn.Module, layer: int, places: Places
    ) -> Iterator[tuple[Places, Matrices]]:
        for own, rows in self._decoded(layer, places):
            yield own, _slot_by_slot(module, rows)

    def windows(self, layer: int, places: Places, most: int) -> Iterator[tuple[Places, Slots]]:
        for own, rows in self._decoded(layer, places):
            yield own, {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    def stored(self, layer: int, expert: int) -> Row:
        """As the best level decodes it."""
        return self._decode(layer, 0, self._tiers[0].row(layer, expert, self._shapes[layer][0]))

    def _decoded(self, layer: int, places: Places) -> Iterator[tuple[Places, list[Row]]]:
        """Decode experts in order, a few at a time; each lies where it is in its list."""
        own: dict[int, int] = {}
        rows: list[Row] = []
        nbytes = 0
        for expert, slot in sorted(places.items()):
            own[expert] = len(rows)
            rows.append(self._decode(layer, *self._slots[slot]))
            nbytes += sum(tensor.nbytes for tensor in rows[-1].values())
            if nbytes >= DECODED_BYTES:
                yield own, rows
                own, rows, nbytes = {}, [], 0
        if own:
            yield own, rows

    def _decode(self, layer: int, level: int, row: Row) -> Row:
        """Return one expert's parameters as the module would have them."""
        module, codec, found = self._experts[layer], self._codecs[level], dict[str, Tensor]()
        for name, parameter in expert_parameters(module).items():
            if name in row:
                found[name] = row[name]
                continue
            layout = codec.layout(matrix_shape(module, parameter))
            tensors = [row[part_of(name, i)] for i in range(len(layout))]
            # Products of a transposed view may round differently.
            found[name] = decode(module, parameter, tensors, codec).contiguous()
        return found

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

"""The slots that resident experts lie in, and the copies that fill them.

Experts at the model's own precision have slots of one size in one tensor for each parameter;
encoded ones are moved as they are stored, and a slot is as large as its expert at its level
(`engine.wall.slots.LeveledCache` says which there are; their bytes never exceed the capacity).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from lm_eval_moecache.engine.wall.link import Transfer
from lm_eval_moecache.engine.wall.slots import slots_of
from lm_eval_moecache.model.device import can_time, copy_stream, locked_empty, on_stream
from lm_eval_moecache.model.precision.codecs import Codec
from lm_eval_moecache.model.precision.stored import Encoded, expert_matrices, matrix_shape
from lm_eval_moecache.model.wall.tiers import Row, Shapes, Tier
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.sizes import Capacity


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

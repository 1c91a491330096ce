"""The slots that resident experts lie in, and the copies that fill them."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from lm_eval_moecache.engine.wall.slots import slots_of
from lm_eval_moecache.engine.wall.worker import Transfer
from lm_eval_moecache.model.device import can_time, copy_stream, locked_empty, on_stream
from lm_eval_moecache.model.wall.tiers import Row, Tier
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.sizes import Capacity


class DeviceMover(ABC):
    """The mover of the wall clock (`engine.wall.worker.Mover`), for slots of any kind.

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


def expert_parameters(experts: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of an experts module that have one entry for each expert."""
    return {
        name: parameter.data
        for name, parameter in experts.named_parameters(recurse=False)
        if parameter.dim() > 1 and parameter.shape[0] == experts.num_experts
    }


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
        return sum(t.numel() * t.element_size() for pool in self._pools for t in pool.values())

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
        source = self._tier.source(layer, expert)
        if source is None:
            slots = self.of_layer(layer)
            source = {name: torch.empty(t.shape[1:], dtype=t.dtype) for name, t in slots.items()}
            self._tier.fill(layer, expert, source)
        return source

    def target_of(self, transfer: Transfer) -> Row:
        pool = self.of_layer(transfer.key // self._num_experts)
        return {name: t[transfer.slot] for name, t in pool.items()}

    def tier_of(self, level: int) -> Tier:
        return self._tier

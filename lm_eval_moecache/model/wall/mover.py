"""Copies experts to a device or within host memory: what both kinds of slots share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import cast

import torch
from torch import Tensor

from lm_eval_moecache.engine.wall.worker import Transfer
from lm_eval_moecache.model.wall.tiers import Row, Tier, locked_empty


class DeviceMover(ABC):
    """The mover of the wall clock (`engine.wall.worker.Mover`), for slots of any kind.

    On a CUDA device copies go on a stream of their own, from pinned memory, after what their fence
    marks; `finish` waits for them in the worker's thread.
    """

    def __init__(self, num_experts: int, device: torch.device) -> None:
        self._num_experts = num_experts
        self._device = device
        self._on_cuda = device.type == "cuda"
        # Copies to a device overlap with the bookkeeping of the one before.
        self.depth = 2 if self._on_cuda else 1
        self._staging: list[dict[tuple[str, torch.Size], Tensor]] = [{} for _ in range(self.depth)]
        self._turn = 0
        if self._on_cuda:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

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
        if not self._on_cuda:
            return None
        launched = torch.cuda.Event()  # type: ignore[no-untyped-call]
        launched.record(torch.cuda.current_stream(self._device))
        return launched

    def begin(self, transfer: Transfer) -> object:
        layer, expert = divmod(transfer.key, self._num_experts)
        target, tier = self.target_of(transfer), self.tier_of(transfer.level)
        if not self._on_cuda:
            tier.fill(layer, expert, target)
            return None
        return self._copy_to_device(tier, layer, expert, target, transfer.after)

    def finish(self, token: object) -> float | None:
        if token is None:
            return None
        started, done = cast(tuple[torch.cuda.Event, torch.cuda.Event], token)
        done.synchronize()
        return float(started.elapsed_time(done)) / 1000

    def synchronize(self) -> None:
        if self._on_cuda:
            torch.cuda.current_stream(self._device).synchronize()

    def _copy_to_device(
        self, tier: Tier, layer: int, expert: int, target: Row, after: object
    ) -> object:
        source = tier.source(layer, expert)
        if source is None:
            source = self._stage(tier, layer, expert, target)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_event(cast(torch.cuda.Event, after))
            started, done = _timed_event(), _timed_event()
            started.record(self._stream)
            for name, tensor in target.items():
                tensor.copy_(source[name], non_blocking=True)
            done.record(self._stream)
        return started, done

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


def _timed_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

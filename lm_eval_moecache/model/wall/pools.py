"""The slots that resident experts lie in, and the copies that fill them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from lm_eval_moecache.engine.wall.slots import slots_of
from lm_eval_moecache.engine.wall.worker import Transfer
from lm_eval_moecache.model.wall.mover import DeviceMover
from lm_eval_moecache.model.wall.tiers import Row, Tier
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.sizes import Capacity


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

"""The store of the wall clock: executes each layer from the slots its experts have come to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from lm_eval_moecache.model.grouped import Matrices
from lm_eval_moecache.model.store import BoolArray, Waves
from lm_eval_moecache.model.wall.kernels import OnSlots, Work, WorkInGroups, WorkOnPool
from lm_eval_moecache.model.wall.pools import SlotPools
from lm_eval_moecache.records.geometry import Geometry

KERNELS = ("grouped_mm", "batched_mm")


class SlotStore:
    """Runs experts from slots, as transformers' own kernel would have from the whole layer."""

    levels: list[Mapping[int, int] | None] | None = None

    def __init__(
        self,
        pools: SlotPools,
        slots: Sequence[Mapping[int, int]],
        geometry: Geometry,
        kernel: str,
        device_type: str,
    ) -> None:
        """`slots` say for each layer in which slot of its pool a key lies: `Engine.slots`."""
        self.pools = pools
        self.slots = slots
        self.geometry = geometry
        self.kernel = self._kernel = kernel
        self._on_cpu = device_type == "cpu"
        self._matrices: dict[int, Matrices] = {}
        self.padding: BoolArray | None = None
        """Which tokens of the pass in progress nobody waits for, if any."""

    def begin_pass(self, *, decoding: bool, padding: BoolArray | None = None) -> None:
        """Choose the kernel of a pass; transformers changes kernels for decode steps on devices."""
        swap = decoding and self._kernel == "grouped_mm" and not self._on_cpu
        self.kernel = "batched_mm" if swap else self._kernel
        self.padding = padding

    def at(self, layer: int, waves: Waves) -> LayerSlots:
        """Return the store of one layer's experts module."""
        return LayerSlots(self, layer, waves, self._on_cpu)

    def matrices(self, module: nn.Module, pool: dict[str, Tensor]) -> Matrices:
        """Return a pool's slots as products take them, made once for all its layers."""
        if id(pool) not in self._matrices:
            self._matrices[id(pool)] = Matrices(module, pool)
        return self._matrices[id(pool)]


class LayerSlots:
    """One layer's part of the store."""

    def __init__(self, store: SlotStore, layer: int, waves: Waves, on_cpu: bool) -> None:
        self._store = store
        self._waves = waves
        self._layer = layer
        self._on_cpu = on_cpu
        self._in_one_piece = store.pools.whole_layer(layer)
        self._whole: OnSlots | None = None
        self.slots = store.pools.of_layer(layer)
        self.num_experts = store.geometry.num_experts
        self.first_key = store.geometry.key(layer, 0)
        self.slot_of = store.slots[layer]

    def whole(self, module: nn.Module) -> OnSlots | None:
        if self._whole is None and self._in_one_piece is not None:
            self._whole = OnSlots(module, self._in_one_piece)
        return self._whole

    def matrices(self, module: nn.Module) -> Matrices:
        return self._store.matrices(module, self.slots)

    def elsewhere(self, module: nn.Module, expert: int) -> Matrices:
        return Matrices(module, self._store.pools.stored(self._layer, expert))

    def run(self, module: nn.Module, hidden_TD: Tensor, index_TK: Tensor, w_TK: Tensor) -> Tensor:
        """Execute the experts of the layer's event as they come.

        Assignments to experts that the event does not need (dropped ones) add nothing.
        """
        store = self._store
        work: Work
        if self._on_cpu and store.kernel == "grouped_mm":
            work = WorkInGroups(self, module, hidden_TD, index_TK, w_TK)
        else:
            work = WorkOnPool(self, module, hidden_TD, index_TK, w_TK, store.kernel)
        for keys, is_all in self._waves():
            work.execute(keys, is_all)
        if store.padding is not None:
            work.pad(index_TK[torch.from_numpy(store.padding).to(index_TK.device)])
        return work.result()

"""The store of the wall clock: executes each layer from the slots its experts have come to."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future

from torch import Tensor, nn

from lm_eval_moecache.engine.host import HOST
from lm_eval_moecache.model.grouped import Matrices
from lm_eval_moecache.model.store import Waves
from lm_eval_moecache.model.wall.host import Host
from lm_eval_moecache.model.wall.kernels import (
    Layer,
    OnSlots,
    Places,
    Slots,
    Work,
    WorkInGroups,
    WorkOnPool,
)
from lm_eval_moecache.model.wall.pools import SlotPools
from lm_eval_moecache.records.arrays import BoolArray
from lm_eval_moecache.records.geometry import Geometry

KERNELS = ("grouped_mm", "batched_mm")


class WallStore(ABC):
    """Runs experts from slots, as transformers' own kernel would have from the whole layer."""

    levels: list[Mapping[int, int] | None] | None = None

    def __init__(self, geometry: Geometry, kernel: str, device_type: str) -> None:
        self.geometry = geometry
        self.kernel = self._kernel = kernel
        self.on_cpu = device_type == "cpu"
        self.host = Host()
        self.note_host: Callable[[float, float], None] = lambda busy_s, wait_s: None
        """Told how long the host worked on an event, and how long it was waited for."""
        self.padding: BoolArray | None = None
        """Which tokens of the pass in progress nobody waits for, if any."""

    def begin_pass(self, *, decoding: bool, padding: BoolArray | None = None) -> None:
        """Choose the kernel of a pass; transformers changes kernels for decode steps on devices."""
        swap = decoding and self._kernel == "grouped_mm" and not self.on_cpu
        self.kernel = "batched_mm" if swap else self._kernel
        self.padding = padding

    def close(self) -> None:
        """End the host's thread, after what it works on."""
        self.host.close()

    @abstractmethod
    def at(self, layer: int, waves: Waves) -> LayerOnWall:
        """Return the store of one layer's experts module."""


class LayerOnWall(Layer):
    """One layer's part of the store."""

    def __init__(self, store: WallStore, layer: int, waves: Waves) -> None:
        self._store, self._waves = store, waves
        self._layer = layer
        self.num_experts = store.geometry.num_experts
        self.first_key = store.geometry.key(layer, 0)

    def run(self, module: nn.Module, hidden_TD: Tensor, index_TK: Tensor, w_TK: Tensor) -> Tensor:
        """Execute the experts of the layer's event as they come.

        Assignments to experts that the event does not need (dropped ones) add nothing.
        """
        store = self._store
        work: Work
        if store.on_cpu and store.kernel == "grouped_mm":
            padded = store.padding is not None
            work = WorkInGroups(self, module, hidden_TD, index_TK, w_TK, padded)
        else:
            work = WorkOnPool(self, module, hidden_TD, index_TK, w_TK, store.kernel)
        host: Future[float] | None = None
        for slot_of, is_all in self._waves():
            if HOST in slot_of.values():
                host = self._begin_on_host(work, module, slot_of)
            else:
                work.execute(slot_of, is_all)
        if host is not None:
            start_s = time.perf_counter()
            store.note_host(host.result(), time.perf_counter() - start_s)
        if store.padding is not None:
            work.pad(store.padding)
        return work.result()

    def _begin_on_host(self, work: Work, module: nn.Module, keys: Iterable[int]) -> Future[float]:
        experts = [key - self.first_key for key in keys]
        return self._store.host.run(work.host_call(experts), self, module, experts)


class SlotStore(WallStore):
    """Experts at the model's own precision, in slots of one size."""

    def __init__(self, pools: SlotPools, geometry: Geometry, kernel: str, device_type: str) -> None:
        super().__init__(geometry, kernel, device_type)
        self.pools = pools
        self._matrices: dict[int, Matrices] = {}

    def at(self, layer: int, waves: Waves) -> LayerSlots:
        return LayerSlots(self, layer, waves)

    def matrices(self, module: nn.Module, pool: dict[str, Tensor]) -> Matrices:
        """Return a pool's slots as products take them, made once for all its layers."""
        if id(pool) not in self._matrices:
            self._matrices[id(pool)] = Matrices(module, pool)
        return self._matrices[id(pool)]


class LayerSlots(LayerOnWall):
    """One layer in a `SlotStore`."""

    _store: SlotStore

    def __init__(self, store: SlotStore, layer: int, waves: Waves) -> None:
        super().__init__(store, layer, waves)
        self._in_one_piece = store.pools.whole_layer(layer)
        self._whole: OnSlots | None = None
        self._slots = store.pools.of_layer(layer)

    def whole(self, module: nn.Module) -> OnSlots | None:
        if self._whole is None and self._in_one_piece is not None:
            self._whole = OnSlots(module, self._in_one_piece)
        return self._whole

    def parts(self, module: nn.Module, places: Places) -> Iterator[tuple[Places, Matrices]]:
        yield places, self._store.matrices(module, self._slots)

    def windows(
        self, module: nn.Module, places: Places, most: int
    ) -> Iterator[tuple[Places, Slots]]:
        """Pieces of the pool itself: nothing is copied."""
        num_slots = len(next(iter(self._slots.values())))
        for start in range(0, num_slots, most):
            end = start + most
            own = {e: slot - start for e, slot in places.items() if start <= slot < end}
            if own:
                yield own, {name: pool[start:end] for name, pool in self._slots.items()}

    def elsewhere(self, module: nn.Module, experts: Sequence[int]) -> Matrices:
        rows = [self._store.pools.stored(self._layer, expert) for expert in experts]
        return Matrices(module, {name: [row[name] for row in rows] for name in rows[0]})

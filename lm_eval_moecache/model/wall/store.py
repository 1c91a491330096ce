"""The store of the wall clock: executes each layer from the slots its experts have come to.

With the arithmetic of transformers' own kernels, in as many parts as an event has waves.

Shapes: T tokens, E experts, K experts per token, S = T x K assignments, D hidden size.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from lm_eval_moecache.engine.host import HOST
from lm_eval_moecache.model.device import copy_to_device, copy_to_host
from lm_eval_moecache.model.precision.codecs import Codec, decode, matrix_shape
from lm_eval_moecache.model.store import GroupedCall, Matrices, OnSlots, Slots, Store, Waves
from lm_eval_moecache.model.wall.pools import (
    LadderPools,
    Row,
    SlotPools,
    expert_parameters,
    part_of,
)
from lm_eval_moecache.records.arrays import BoolArray
from lm_eval_moecache.records.geometry import Geometry

KERNELS = ("grouped_mm", "batched_mm")
MAX_GROUPS = 1023
"""What CUDA's grouped product takes."""
MOST = 2**62
DECODED_BYTES = 64 * 2**20
"""Experts are decoded together up to this size, and at least one."""
Places = Mapping[int, int]
"""Expert of the layer -> where it lies."""

AT_ONCE = 8
"""Experts whose weights are read from a file, or decoded, together."""
Elsewhere = Callable[[nn.Module, Sequence[int]], Matrices]
"""Returns experts of a layer as they are stored in host memory."""


class Host:
    """One thread that executes experts on the host while the caller goes on."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "moecache-host")

    def run(
        self, call: GroupedCall, elsewhere: Elsewhere, module: nn.Module, experts: Sequence[int]
    ) -> Future[float]:
        """Execute the assignments to these experts; the result is the seconds it took."""
        # Modes are each thread's own: this one has to be as the caller.
        inference = torch.is_inference_mode_enabled()

        def work() -> float:
            start_s = time.perf_counter()
            with torch.inference_mode() if inference else torch.no_grad():
                for start in range(0, len(experts), AT_ONCE):
                    some = experts[start : start + AT_ONCE]
                    places = ((expert, place) for place, expert in enumerate(some))
                    call.run(places, elsewhere(module, some))
            return time.perf_counter() - start_s

        return self._pool.submit(work)

    def close(self) -> None:
        """End the thread. Safe to call twice."""
        self._pool.shutdown()


class SlotStore(Store):
    """Runs experts from slots, as transformers' own kernel would have from the whole layer."""

    def __init__(
        self,
        pools: SlotPools | LadderPools,
        geometry: Geometry,
        kernel: str,
        device_type: str,
        codecs: Sequence[Codec] = (),
    ) -> None:
        """`codecs`: of the levels, where experts lie encoded."""
        self.pools, self.geometry, self.codecs = pools, geometry, codecs
        self.kernel = self._kernel = kernel
        self.on_cpu = device_type == "cpu"
        self.host = Host()
        self.note_host: Callable[[float, float], None] = lambda busy_s, wait_s: None
        """Told how long the host worked on an event, and how long it was waited for."""
        self.padding: BoolArray | None = None
        """Which tokens of the pass in progress nobody waits for, if any."""
        self._matrices: dict[int, Matrices] = {}

    def begin_pass(self, *, decoding: bool, padding: BoolArray | None = None) -> None:
        swap = decoding and self._kernel == "grouped_mm" and not self.on_cpu
        self.kernel = "batched_mm" if swap else self._kernel
        self.padding = padding

    def close(self) -> None:
        self.host.close()

    def at(self, layer: int, waves: Waves) -> Layer:
        return (LayerLevels if self.codecs else LayerSlots)(self, layer, waves)

    def matrices(self, module: nn.Module, pool: dict[str, Tensor]) -> Matrices:
        """Return a pool's slots as products take them, made once for all its layers."""
        if id(pool) not in self._matrices:
            self._matrices[id(pool)] = Matrices(module, pool)
        return self._matrices[id(pool)]


class Layer(ABC):
    """One layer's part of the store: where its experts are, and what runs them there."""

    def __init__(self, store: SlotStore, layer: int, waves: Waves) -> None:
        self.store, self._waves = store, waves
        self._pools: Any = store.pools
        self._layer = layer
        self.num_experts = store.geometry.num_experts
        self.first_key = store.geometry.key(layer, 0)

    def __call__(
        self, module: nn.Module, hidden_TD: Tensor, index_TK: Tensor, w_TK: Tensor
    ) -> Tensor:
        """Execute the experts of the layer's event as they come.

        Assignments to experts that the event does not need (dropped ones) add nothing.
        """
        store = self.store
        kind = WorkInGroups if store.on_cpu and store.kernel == "grouped_mm" else WorkOnPool
        work: Work = kind(self, module, hidden_TD, index_TK, w_TK)
        host: Future[float] | None = None
        for slot_of, is_all in self._waves():
            if HOST in slot_of.values():
                experts = [key - self.first_key for key in slot_of]
                host = store.host.run(work.host_call(experts), self.elsewhere, module, experts)
            else:
                work.execute(slot_of, is_all)
        if host is not None:
            start_s = time.perf_counter()
            store.note_host(host.result(), time.perf_counter() - start_s)
        if store.padding is not None:
            work.pad(store.padding)
        return work.result()

    def whole(self, module: nn.Module) -> OnSlots | None:
        """Return a stand-in for the whole layer where the cache holds it in one piece."""
        return None

    @abstractmethod
    def parts(self, module: nn.Module, places: Places) -> Iterator[tuple[Places, Matrices]]:
        """Divide experts by the matrices that are made for them together, on a CPU."""

    @abstractmethod
    def windows(
        self, module: nn.Module, places: Places, most: int
    ) -> Iterator[tuple[Places, Slots]]:
        """Divide experts by pieces of at most so many slots, for a kernel of transformers."""

    def elsewhere(self, module: nn.Module, experts: Sequence[int]) -> Matrices:
        """Return experts, slot by slot, as they are stored in host memory: no transfer."""
        return _stacked(module, [self._stored(module, expert) for expert in experts])

    def _stored(self, module: nn.Module, expert: int) -> Row:
        found: Row = self._pools.stored(self._layer, expert)
        return found


def _stacked(module: nn.Module, rows: Sequence[Row]) -> Matrices:
    return Matrices(module, {name: [row[name] for row in rows] for name in rows[0]})


class LayerSlots(Layer):
    """A layer of experts at the model's own precision, in slots of one size."""

    def __init__(self, store: SlotStore, layer: int, waves: Waves) -> None:
        super().__init__(store, layer, waves)
        self._slots: dict[str, Tensor] = self._pools.of_layer(layer)
        self._in_one_piece: dict[str, Tensor] | None = self._pools.whole_layer(layer)
        self._whole: OnSlots | None = None

    def whole(self, module: nn.Module) -> OnSlots | None:
        if self._whole is None and self._in_one_piece is not None:
            self._whole = OnSlots(module, self._in_one_piece)
        return self._whole

    def parts(self, module: nn.Module, places: Places) -> Iterator[tuple[Places, Matrices]]:
        yield places, self.store.matrices(module, self._slots)

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


class LayerLevels(Layer):
    """A layer of encoded experts, decoded where they lie.

    Decoded matrices live for one call of the layer, a few experts at a time.
    """

    def parts(self, module: nn.Module, places: Places) -> Iterator[tuple[Places, Matrices]]:
        for own, rows in self._decoded(module, places):
            yield own, _stacked(module, rows)

    def windows(
        self, module: nn.Module, places: Places, most: int
    ) -> Iterator[tuple[Places, Slots]]:
        for own, rows in self._decoded(module, places):
            yield own, {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    def _decoded(self, module: nn.Module, places: Places) -> Iterator[tuple[Places, list[Row]]]:
        """Decode experts in order, a few at a time; each lies where it is in its list."""
        own: dict[int, int] = {}
        rows: list[Row] = []
        nbytes = 0
        for expert, slot in sorted(places.items()):
            own[expert] = len(rows)
            rows.append(self._decode(module, *self._pools.at(slot)))
            nbytes += sum(tensor.nbytes for tensor in rows[-1].values())
            if nbytes >= DECODED_BYTES:
                yield own, rows
                own, rows, nbytes = {}, [], 0
        if own:
            yield own, rows

    def _decode(self, module: nn.Module, level: int, row: Row) -> Row:
        """Return one expert's parameters as the module would have them."""
        codec, found = self.store.codecs[level], dict[str, Tensor]()
        for name, parameter in expert_parameters(module).items():
            if name in row:
                found[name] = row[name]
                continue
            layout = codec.layout(matrix_shape(module, parameter))
            tensors = [row[part_of(name, i)] for i in range(len(layout))]
            # Products of a transposed view may round differently.
            found[name] = decode(module, parameter, tensors, codec).contiguous()
        return found

    def _stored(self, module: nn.Module, expert: int) -> Row:
        return self._decode(module, 0, super()._stored(module, expert))


class Work(ABC):
    """One call of an experts module, executed in one part or several.

    What several parts have computed is weighted and added once, in the order of the router's
    choice, so that the result does not depend on the parts.
    """

    def __init__(
        self, layer: Layer, module: nn.Module, hidden_TD: Tensor, index_TK: Tensor, w_TK: Tensor
    ) -> None:
        self._layer, self._module = layer, module
        self._hidden_TD, self._index_TK, self._w_TK = hidden_TD, index_TK, w_TK
        self._done: Tensor | None = None
        """The module's output, where one part was all."""

    @abstractmethod
    def execute(self, slot_of: Mapping[int, int], is_all: bool) -> None:
        """Run the assignments to these keys in their slots; `is_all`: the event has no others."""

    @abstractmethod
    def host_call(self, experts: Sequence[int]) -> GroupedCall:
        """Return the call, in host memory, that the host runs its assignments to these in.

        `result` comes after the host is done.
        """

    @abstractmethod
    def pad(self, padding: BoolArray) -> None:
        """Do what the assignments of padding, a mark on tokens [T], need for others to be exact."""

    @abstractmethod
    def result(self) -> Tensor:
        """Return the module's output [T, D]."""


class WorkInGroups(Work):
    """One product per expert: on a CPU, bit for bit what `grouped_mm` computes there.

    It looks at the experts that are asked for; `grouped_mm` would at every slot of the pool. That
    is asked where it has as much to do: a layer in one piece, many tokens, none of them padding.
    """

    def __init__(self, layer: Layer, *given: Any) -> None:
        super().__init__(layer, *given)
        self._asks_whole = layer.store.padding is None
        self._asks_whole &= self._index_TK.numel() >= layer.num_experts
        self._served: set[int] = set()

    @cached_property
    def _call(self) -> GroupedCall:
        given = self._hidden_TD, self._index_TK, self._w_TK
        return GroupedCall(self._module, *given, self._layer.num_experts)

    def execute(self, slot_of: Mapping[int, int], is_all: bool) -> None:
        layer = self._layer
        whole = layer.whole(self._module) if is_all and self._asks_whole else None
        if whole is not None:
            given = self._hidden_TD, self._index_TK, self._w_TK
            self._done = ALL_EXPERTS_FUNCTIONS["grouped_mm"](whole, *given)
            return
        places = {key - layer.first_key: slot for key, slot in sorted(slot_of.items())}
        self._served.update(places)
        for own, matrices in layer.parts(self._module, places):
            self._call.run(own.items(), matrices)

    def host_call(self, experts: Sequence[int]) -> GroupedCall:
        """Both write their rows into the same buffers: these are there before they begin."""
        self._served.update(experts)
        self._call.reserve(self._layer.elsewhere(self._module, experts[:1]))
        return self._call

    def pad(self, padding: BoolArray) -> None:
        """Run the padding's own experts, from where they are stored.

        Nobody reads what padding computes, but it goes on to the next layers, where it shares
        products with tokens that count: with other rows in them, these would round differently.
        """
        for expert in torch.unique(self._index_TK[torch.from_numpy(padding)]).tolist():
            if expert not in self._served:
                self._call.run([(expert, 0)], self._layer.elsewhere(self._module, [expert]))

    def result(self) -> Tensor:
        return self._call.result() if self._done is None else self._done


class WorkOnPool(Work):
    """Transformers' kernel on the pool itself, with slots for indices: on CUDA, few kernels.

    A part has as many rows as the whole, so that a kernel which is chosen by their number is the
    same one for every part; a row's result does not depend on what the others hold.
    """

    def __init__(self, layer: Layer, *given: Any) -> None:
        super().__init__(layer, *given)
        self._kernel = layer.store.kernel
        self._out_SD: Tensor | None = None
        self._on_host: GroupedCall | None = None

    def execute(self, slot_of: Mapping[int, int], is_all: bool) -> None:
        layer = self._layer
        whole = layer.whole(self._module) if is_all else None
        if whole is not None:
            self._done = self._ask(whole, self._hidden_TD, self._index_TK, self._w_TK)
            return
        places = {key - layer.first_key: slot for key, slot in slot_of.items()}
        most = MAX_GROUPS if self._kernel == "grouped_mm" else MOST
        for own, slots in layer.windows(self._module, places, most):
            self._execute_window(slots, own, is_all and len(own) == len(places))

    def host_call(self, experts: Sequence[int]) -> GroupedCall:
        hidden_TD, index_TK, w_TK = self._hidden_TD, self._index_TK, self._w_TK
        # Experts' numbers and values of 16 bits are exact in what they are fetched as.
        fetched = copy_to_host([hidden_TD.float(), index_TK, w_TK.float()], None)
        hidden, index, weights = map(torch.from_numpy, fetched)
        hidden, index = hidden.to(hidden_TD.dtype), index.to(index_TK.dtype)
        self._on_host = GroupedCall(self._module, hidden, index, weights, self._layer.num_experts)
        return self._on_host

    def pad(self, padding: BoolArray) -> None:
        """Do nothing: here a row's result does not depend on the others."""

    def result(self) -> Tensor:
        if self._done is not None:
            return self._done
        if self._on_host is not None:
            host_SD = copy_to_device(self._on_host.unweighted(), self._hidden_TD.device)
            if self._module.has_post_expert_norm:
                host_SD = self._module.post_expert_norm(host_SD)  # type: ignore[operator]
            self._add(host_SD)
        if self._out_SD is None:
            return torch.zeros_like(self._hidden_TD)
        weighted_SD = self._out_SD * self._w_TK.reshape(-1, 1)
        tokens, top_k = self._index_TK.shape
        return weighted_SD.view(tokens, top_k, -1).sum(dim=1).to(self._hidden_TD.dtype)

    def _execute_window(self, slots: Slots, slot_of: Mapping[int, int], is_all: bool) -> None:
        num_slots, top_k = len(next(iter(slots.values()))), self._index_TK.shape[-1]
        # Experts that are not here point beyond the last slot.
        table_E = torch.full((self._layer.num_experts,), num_slots, dtype=torch.int64)
        table_E[list(slot_of)] = torch.tensor(list(slot_of.values()))
        slot_TK = copy_to_device(table_E, self._index_TK.device)[self._index_TK]
        one_token = len(self._hidden_TD) == 1 and len(slot_of) == top_k
        skips = self._kernel == "grouped_mm"
        stand_in = OnSlots(self._module, slots, sparse=skips and not one_token)
        here_TK: Tensor | None = None
        if not (skips or one_token):
            # This kernel computes what is not here, too, and what a slot holds while it is written
            # may be no number even times 0: it reads a slot that holds an expert instead.
            here_TK = slot_TK < num_slots
            slot_TK = slot_TK.where(here_TK, next(iter(slot_of.values())))
        if is_all:
            w_TK = self._w_TK if here_TK is None else self._w_TK * here_TK
            self._done = self._ask(stand_in, self._hidden_TD, slot_TK, w_TK)
            return
        hidden_SD = self._hidden_TD.repeat_interleave(top_k, dim=0)
        slot_S1 = slot_TK.reshape(-1, 1)
        w_S1 = hidden_SD.new_ones(slot_S1.shape)
        if here_TK is not None:
            w_S1 = w_S1 * here_TK.reshape(-1, 1)
        self._add(self._ask(stand_in, hidden_SD, slot_S1, w_S1))

    def _add(self, more_SD: Tensor) -> None:
        self._out_SD = more_SD if self._out_SD is None else self._out_SD + more_SD

    def _ask(self, stand_in: OnSlots, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        result: Tensor = ALL_EXPERTS_FUNCTIONS[self._kernel](stand_in, hidden, index, weights)
        return result

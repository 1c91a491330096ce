"""Experts that are stored encoded: moved as they are stored, and decoded where they are executed.

A slot is as large as its expert at its level (`engine.wall.slots.LeveledCache` says which there
are, and their bytes never exceed the capacity). Decoded matrices live for one call of the layer, a
few experts at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from lm_eval_moecache.engine.wall.worker import Transfer
from lm_eval_moecache.model.device import on_stream
from lm_eval_moecache.model.grouped import Matrices
from lm_eval_moecache.model.precision.codecs import Codec
from lm_eval_moecache.model.precision.stored import (
    Encoded,
    decode_one,
    expert_matrices,
    matrix_shape,
)
from lm_eval_moecache.model.store import Waves
from lm_eval_moecache.model.wall.kernels import OnSlots, Places, Slots
from lm_eval_moecache.model.wall.pools import DeviceMover, expert_parameters
from lm_eval_moecache.model.wall.store import LayerOnWall, WallStore
from lm_eval_moecache.model.wall.tiers import Row, Tier
from lm_eval_moecache.records.geometry import Geometry

Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
DECODED_BYTES = 64 * 2**20
"""Experts are decoded together up to this size, and at least one."""


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
        source = self._tiers[0].source(layer, expert)
        if source is None:
            shapes = self._shapes[layer][0].items()
            source = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in shapes}
            self._tiers[0].fill(layer, expert, source)
        return source

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


def shapes_of(experts: nn.Module, codec: Codec) -> Shapes:
    """Return the tensors of one expert as a codec stores it: name -> shape and type."""
    matrices = expert_matrices(experts)
    found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for name, stacked in matrices.items():
        for i, layout in enumerate(codec.layout(matrix_shape(experts, stacked))):
            found[part_of(name, i)] = layout
    for name, tensor in expert_parameters(experts).items():
        if name not in matrices:
            found[name] = (tuple(tensor.shape[1:]), tensor.dtype)
    return found


class LadderSlotStore(WallStore):
    """Decodes the experts of an event where they lie, and runs them with the usual kernels."""

    def __init__(
        self,
        pools: LadderPools,
        codecs: Sequence[Codec],
        geometry: Geometry,
        kernel: str,
        device_type: str,
    ) -> None:
        super().__init__(geometry, kernel, device_type)
        self.pools, self.codecs = pools, codecs

    def at(self, layer: int, waves: Waves) -> LayerLevels:
        return LayerLevels(self, layer, waves)


class LayerLevels(LayerOnWall):
    """One layer in a `LadderSlotStore`."""

    _store: LadderSlotStore

    def whole(self, module: nn.Module) -> OnSlots | None:
        return None

    def parts(self, module: nn.Module, places: Places) -> Iterator[tuple[Places, Matrices]]:
        for experts, rows in self._decoded(module, places):
            stacked = {name: [row[name] for row in rows] for name in rows[0]}
            yield {e: i for i, e in enumerate(experts)}, Matrices(module, stacked)

    def windows(
        self, module: nn.Module, places: Places, most: int
    ) -> Iterator[tuple[Places, Slots]]:
        for experts, rows in self._decoded(module, places):
            slots = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
            yield {e: i for i, e in enumerate(experts)}, slots

    def elsewhere(self, module: nn.Module, experts: Sequence[int]) -> Matrices:
        stored = [self._store.pools.stored(self._layer, expert) for expert in experts]
        rows = [self._decode(module, 0, row) for row in stored]
        return Matrices(module, {name: [row[name] for row in rows] for name in rows[0]})

    def _decoded(self, module: nn.Module, places: Places) -> Iterator[tuple[list[int], list[Row]]]:
        """Decode experts in order, a few at a time."""
        experts: list[int] = []
        rows: list[Row] = []
        nbytes = 0
        for expert, slot in sorted(places.items()):
            row = self._decode(module, *self._store.pools.at(slot))
            experts.append(expert)
            rows.append(row)
            nbytes += sum(tensor.nbytes for tensor in row.values())
            if nbytes >= DECODED_BYTES:
                yield experts, rows
                experts, rows, nbytes = [], [], 0
        if experts:
            yield experts, rows

    def _decode(self, module: nn.Module, level: int, row: Row) -> Row:
        """Return one expert's parameters as the module would have them."""
        codec, found = self._store.codecs[level], dict[str, Tensor]()
        for name, parameter in expert_parameters(module).items():
            if name in row:
                found[name] = row[name]
                continue
            layout = codec.layout(matrix_shape(module, parameter))
            tensors = [row[part_of(name, i)] for i in range(len(layout))]
            # Products of a transposed view may round differently.
            found[name] = decode_one(module, parameter, tensors, codec).contiguous()
        return found

"""Runs experts that lie in slots, with the arithmetic of transformers' own kernels.

Shapes: T tokens, E experts, K experts per token, S = T x K assignments, D hidden size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from lm_eval_moecache.model.device import copy_to_device, copy_to_host
from lm_eval_moecache.model.grouped import GroupedCall, Matrices
from lm_eval_moecache.records.arrays import BoolArray

Slots = Mapping[str, Tensor]
"""Parameter name -> [slots, ...]."""
_FLAGS = ("config", "has_bias", "has_gate", "has_post_expert_norm", "is_transposed")
MAX_GROUPS = 1023
"""What CUDA's grouped product takes."""
MOST = 2**62


Places = Mapping[int, int]
"""Expert of the layer -> where it lies."""


class Layer(Protocol):
    """Where one layer's experts are."""

    num_experts: int
    first_key: int

    def whole(self, module: nn.Module) -> OnSlots | None:
        """Return a stand-in for the whole layer where the cache holds it in one piece."""

    def parts(self, module: nn.Module, places: Places) -> Iterator[tuple[Places, Matrices]]:
        """Divide experts by the matrices that are made for them together, on a CPU."""

    def windows(
        self, module: nn.Module, places: Places, most: int
    ) -> Iterator[tuple[Places, Slots]]:
        """Divide experts by pieces of at most so many slots, for a kernel of transformers."""

    def elsewhere(self, module: nn.Module, experts: Sequence[int]) -> Matrices:
        """Return experts, slot by slot, as they are stored in host memory: no transfer."""


class Work(ABC):
    """One call of an experts module, executed in one part or several.

    What several parts have computed is weighted and added once, in the order of the router's
    choice, so that the result does not depend on the parts.
    """

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


class OnSlots:
    """Stands for an experts module whose experts are the slots of a pool.

    With `sparse`, an index beyond the last slot stands for an expert that is not there and whose
    output is zero: what transformers does for the experts of other ranks.
    """

    def __init__(self, module: nn.Module, slots: Slots, sparse: bool = False) -> None:
        own = vars(module)
        self.__dict__.update({name: own[name] for name in _FLAGS if name in own}, **slots)
        self.num_experts = len(next(iter(slots.values())))
        self._is_expert_parallel = sparse
        self._module = module
        self.own_class = type(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class WorkInGroups(Work):
    """One product per expert: on a CPU, bit for bit what `grouped_mm` computes there.

    It looks at the experts that are asked for; `grouped_mm` would at every slot of the pool. That
    is asked where it has as much to do: a layer in one piece, many tokens, none of them padding.
    """

    def __init__(
        self,
        layer: Layer,
        module: nn.Module,
        hidden_TD: Tensor,
        index_TK: Tensor,
        w_TK: Tensor,
        padded: bool,
    ) -> None:
        self._layer, self._module = layer, module
        self._given = hidden_TD, index_TK, w_TK
        self._asks_whole = not padded and index_TK.numel() >= layer.num_experts
        self._whole: Tensor | None = None
        self._done: set[int] = set()

    @cached_property
    def _call(self) -> GroupedCall:
        return GroupedCall(self._module, *self._given, self._layer.num_experts)

    def execute(self, slot_of: Mapping[int, int], is_all: bool) -> None:
        layer = self._layer
        whole = layer.whole(self._module) if is_all and self._asks_whole else None
        if whole is not None:
            self._whole = ALL_EXPERTS_FUNCTIONS["grouped_mm"](whole, *self._given)
            return
        places = {key - layer.first_key: slot for key, slot in sorted(slot_of.items())}
        self._done.update(places)
        for own, matrices in layer.parts(self._module, places):
            self._call.run(own.items(), matrices)

    def host_call(self, experts: Sequence[int]) -> GroupedCall:
        """Both write their rows into the same buffers: these are there before they begin."""
        self._done.update(experts)
        self._call.reserve(self._layer.elsewhere(self._module, experts[:1]))
        return self._call

    def pad(self, padding: BoolArray) -> None:
        """Run the padding's own experts, from where they are stored.

        Nobody reads what padding computes, but it goes on to the next layers, where it shares
        products with tokens that count: with other rows in them, these would round differently.
        """
        index_TK = self._given[1]
        for expert in torch.unique(index_TK[torch.from_numpy(padding)]).tolist():
            if expert not in self._done:
                self._call.run([(expert, 0)], self._layer.elsewhere(self._module, [expert]))

    def result(self) -> Tensor:
        return self._call.result() if self._whole is None else self._whole


class WorkOnPool(Work):
    """Transformers' kernel on the pool itself, with slots for indices: on CUDA, few kernels.

    A part has as many rows as the whole, so that a kernel which is chosen by their number is the
    same one for every part; a row's result does not depend on what the others hold.
    """

    def __init__(
        self,
        layer: Layer,
        module: nn.Module,
        hidden_TD: Tensor,
        index_TK: Tensor,
        w_TK: Tensor,
        kernel: str,
    ) -> None:
        self._layer, self._module, self._kernel = layer, module, kernel
        self._hidden_TD, self._index_TK, self._w_TK = hidden_TD, index_TK, w_TK
        self._done: Tensor | None = None
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
        found = map(
            torch.from_numpy, copy_to_host([hidden_TD.float(), index_TK, w_TK.float()], None)
        )
        hidden, index, weights = found
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
            self._out_SD = host_SD if self._out_SD is None else self._out_SD + host_SD
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
        out_SD = self._ask(stand_in, hidden_SD, slot_S1, w_S1)
        self._out_SD = out_SD if self._out_SD is None else self._out_SD + out_SD

    def _ask(self, stand_in: OnSlots, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        result: Tensor = ALL_EXPERTS_FUNCTIONS[self._kernel](stand_in, hidden, index, weights)
        return result

"""Runs experts that lie in slots, with the arithmetic of transformers' own kernels.

Shapes: T tokens, E experts, K experts per token, S = T x K assignments, R of them in one part,
D hidden size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

Slots = Mapping[str, Tensor]
"""Parameter name -> [slots, ...]."""
_FLAGS = ("config", "has_bias", "has_gate", "has_post_expert_norm", "is_transposed")
MAX_GROUPS = 1023
"""What CUDA's grouped product takes."""


class Layer(Protocol):
    """Where one layer's experts are."""

    slots: dict[str, Tensor]
    slot_of: Mapping[int, int]
    num_experts: int
    first_key: int

    def whole(self, module: nn.Module) -> OnSlots | None:
        """Return a stand-in for the whole layer where the cache holds it in one piece."""


class Work(ABC):
    """One call of an experts module, executed in one part or several.

    What several parts have computed is weighted and added once, in the order of the router's
    choice, so that the result does not depend on the parts.
    """

    def __init__(
        self,
        layer: Layer,
        kernel: str,
        module: nn.Module,
        hidden_TD: Tensor,
        index_TK: Tensor,
        w_TK: Tensor,
    ) -> None:
        self.layer, self.kernel, self.module = layer, kernel, module
        self.hidden_TD, self.index_TK, self.w_TK = hidden_TD, index_TK, w_TK
        self.done: Tensor | None = None

    def execute(self, keys: Sequence[int], is_all: bool) -> None:
        """Run the assignments to these keys; `is_all` where the event has no others."""
        stand_in = self.layer.whole(self.module) if is_all else None
        if stand_in is not None:
            self.done = self.ask(stand_in, self.hidden_TD, self.index_TK, self.w_TK)
        else:
            self.execute_part(keys, is_all)

    @abstractmethod
    def execute_part(self, keys: Sequence[int], is_all: bool) -> None:
        """Run the assignments to these keys from wherever their slots are."""

    @abstractmethod
    def outputs(self) -> Tensor | None:
        """Return what the parts have computed, unweighted [S, D]; None where there were none."""

    def result(self) -> Tensor:
        """Return the module's output [T, D]."""
        if self.done is not None:
            return self.done
        out_SD = self.outputs()
        if out_SD is None:
            return torch.zeros_like(self.hidden_TD)
        weighted_SD = out_SD * self.w_TK.reshape(-1, 1)
        tokens, top_k = self.index_TK.shape
        return weighted_SD.view(tokens, top_k, -1).sum(dim=1).to(self.hidden_TD.dtype)

    def ask(self, stand_in: OnSlots, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        result: Tensor = ALL_EXPERTS_FUNCTIONS[self.kernel](stand_in, hidden, index, weights)
        return result


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

    It looks at the experts that are asked for; `grouped_mm` would at every slot of the pool.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._rows_SD: Tensor | None = None
        self._out_SD: Tensor | None = None

    def execute_part(self, keys: Sequence[int], is_all: bool) -> None:
        if self._rows_SD is None:
            self._sort()
        assert self._rows_SD is not None
        experts = sorted(key - self.layer.first_key for key in keys)
        groups: list[tuple[int, int, int]] = []
        rows: list[int] = []
        end = 0
        for expert in experts:
            first, last = self._bounds[expert], self._bounds[expert + 1]
            rows += range(first, last)
            slot = self.layer.slot_of[expert + self.layer.first_key]
            groups.append((slot, end, end := end + last - first))
        if end == len(self._rows_SD):
            self._out_SD = self._run(self._rows_SD, groups)
            return
        rows_R = torch.tensor(rows, device=self._rows_SD.device)
        out_RD = self._run(self._rows_SD[rows_R], groups)
        if self._out_SD is None:
            self._out_SD = out_RD.new_zeros(len(self._rows_SD), out_RD.shape[1])
        self._out_SD[rows_R] = out_RD

    def outputs(self) -> Tensor | None:
        if self._out_SD is None:
            return None
        back_S = torch.empty_like(self._order_S)
        back_S[self._order_S] = torch.arange(len(back_S), device=back_S.device)
        return self._out_SD[back_S]

    def _sort(self) -> None:
        # The sort of transformers' kernel: rows of one expert meet in the same order.
        index_S, self._order_S = torch.sort(self.index_TK.reshape(-1))
        counts = torch.bincount(index_S, minlength=self.layer.num_experts).tolist()
        self._bounds = [0, *accumulate(counts)]
        self._rows_SD = self.hidden_TD[self._order_S // self.index_TK.shape[-1]]

    def _run(self, rows_RD: Tensor, groups: Sequence[tuple[int, int, int]]) -> Tensor:
        module, slots = self.module, self.layer.slots
        up = "gate_up_proj" if module.has_gate else "up_proj"
        transposed = bool(module.is_transposed)
        hidden = _products(rows_RD, slots[up], slots.get(f"{up}_bias"), transposed, groups)
        activate: Any = module._apply_gate if module.has_gate else module.act_fn
        bias = slots.get("down_proj_bias")
        out = _products(activate(hidden), slots["down_proj"], bias, transposed, groups)
        norm: Any = module.post_expert_norm if module.has_post_expert_norm else None
        return out if norm is None else norm(out)


class WorkOnPool(Work):
    """Transformers' kernel on the pool itself, with slots for indices: on CUDA, few kernels.

    A part has as many rows as the whole, so that a kernel which is chosen by their number is the
    same one for every part.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._out_SD: Tensor | None = None

    def execute_part(self, keys: Sequence[int], is_all: bool) -> None:
        slot_TK = self._slots(keys)
        one_token = len(self.hidden_TD) == 1 and len(keys) == self.index_TK.shape[-1]
        stand_in = OnSlots(self.module, self.layer.slots, sparse=not one_token)
        if is_all:
            self.done = self.ask(stand_in, self.hidden_TD, slot_TK, self.w_TK)
            return
        hidden_SD = self.hidden_TD.repeat_interleave(slot_TK.shape[-1], dim=0)
        slot_S1 = slot_TK.reshape(-1, 1)
        out_SD = self.ask(stand_in, hidden_SD, slot_S1, hidden_SD.new_ones(slot_S1.shape))
        self._out_SD = out_SD if self._out_SD is None else self._out_SD + out_SD

    def outputs(self) -> Tensor | None:
        return self._out_SD

    def _slots(self, keys: Sequence[int]) -> Tensor:
        """Turn expert indices into slots; those of other experts point beyond the last slot."""
        absent = len(next(iter(self.layer.slots.values())))
        table_E = torch.full((self.layer.num_experts,), absent, dtype=torch.int64)
        for key in keys:
            table_E[key - self.layer.first_key] = self.layer.slot_of[key]
        return table_E.to(self.index_TK.device)[self.index_TK]


def _products(
    rows: Tensor,
    weights: Tensor,
    bias: Tensor | None,
    transposed: bool,
    groups: Sequence[tuple[int, int, int]],
) -> Tensor:
    rows = rows.to(weights.dtype)
    out = rows.new_empty(len(rows), weights.shape[2 if transposed else 1])
    for slot, start, end in groups:
        weight = weights[slot] if transposed else weights[slot].t()
        torch.mm(rows[start:end], weight, out=out[start:end])
        if bias is not None:
            out[start:end].add_(bias[slot])
    return out

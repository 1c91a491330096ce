"""Experts on a CPU: one product per needed expert, bit for bit what `grouped_mm` computes there.

The last bits of a float32 result depend on more than its operands: a product of 3 rows may be
another kernel than one of 4, and an activation rounds differently in the vector body of a loop and
in its tail. So equality is kept by construction: every product has the rows it has in transformers'
kernel, and everything that works on all rows does so on a buffer of the same shape, each row in the
same place, of which a part of the experts uses its own rows.

Shapes: T tokens, E experts, K experts per token, S = T x K assignments sorted by expert, D hidden
size, H width of the first product.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Stack = Tensor | Sequence[Tensor]
Tensors = Mapping[str, Stack]
"""Parameter name -> [slots, ...], in one piece or slot by slot."""


class Matrices:
    """What lies in slots, slot by slot, as products take it. Views: they follow the slots' content.

    `module` says how its matrices lie; `tensors` may be its own parameters or a cache's pool.
    """

    def __init__(self, module: Any, tensors: Tensors) -> None:
        up = up_name(module)
        transposed = bool(module.is_transposed)
        self.up = _right_hand_sides(tensors[up], transposed)
        self.down = _right_hand_sides(tensors["down_proj"], transposed)
        self.dtype = tensors[up][0].dtype
        self.up_bias = tensors[f"{up}_bias"] if module.has_bias else None
        self.down_bias = tensors["down_proj_bias"] if module.has_bias else None


def up_name(module: Any) -> str:
    """Return the name of what an experts module multiplies its input by."""
    return "gate_up_proj" if module.has_gate else "up_proj"


def _right_hand_sides(stacked: Stack, transposed: bool) -> list[Tensor]:
    matrices = stacked.detach().unbind(0) if isinstance(stacked, Tensor) else stacked
    return list(matrices) if transposed else [matrix.t() for matrix in matrices]


class GroupedCall:
    """One call of an experts module, executed in one part or in several.

    `run` any number of times, each expert once at most, then `result`. What no part has run adds
    nothing to its tokens. A group is an expert's rows; groups are in the order of their experts.
    """

    def __init__(
        self, module: Any, hidden_TD: Tensor, index_TK: Tensor, w_TK: Tensor, num_experts: int
    ) -> None:
        self._module = module
        self._hidden_TD, self._w_TK = hidden_TD, w_TK
        self._top_k = index_TK.shape[-1]
        self._places: Sequence[int] | None = None
        """Of one token, the place in its choice that each group has. What its experts give is put
        there at once: products and weights, unlike the activation, do not depend on the place."""
        index_S = index_TK.reshape(-1)
        chosen: list[int] = index_S.tolist() if len(index_TK) == 1 else []
        if chosen and len(set(chosen)) == len(chosen):
            # A decode step: without kernels for a handful of numbers.
            self._places = sorted(range(len(chosen)), key=chosen.__getitem__)
            experts, self._sizes = [chosen[k] for k in self._places], [1] * len(chosen)
            self._rows_SD = hidden_TD.expand(self._top_k, -1)
        else:
            # The sort of transformers' kernel: rows of one expert meet in the same order.
            sorted_S, self._order_S = torch.sort(index_S)
            found, counts = torch.unique_consecutive(sorted_S, return_counts=True)
            experts, self._sizes = found.tolist(), counts.tolist()
            self._rows_SD = hidden_TD[self._order_S // self._top_k]
        self._group_of = {e: group for group, e in enumerate(experts) if e < num_experts}
        self._middle_SH: Tensor | None = None
        self._out_SD: Tensor | None = None

    @property
    def needed(self) -> list[int]:
        """The experts that have assignments, in ascending order."""
        return list(self._group_of)

    def run(self, slot_of: Iterable[tuple[int, int]], matrices: Matrices) -> None:
        """Run the assignments to these (expert, slot)."""
        groups = [(self._group_of[e], slot) for e, slot in slot_of if e in self._group_of]
        if not groups:
            return
        if self._middle_SH is None or self._out_SD is None:
            self.reserve(matrices, fills=len(groups) == len(self._sizes))
        assert self._middle_SH is not None and self._out_SD is not None
        rows = torch.split(self._rows_SD.to(matrices.dtype), self._sizes)
        middle = torch.split(self._middle_SH, self._sizes)
        up, up_bias = matrices.up, matrices.up_bias
        for group, slot in groups:
            torch.mm(rows[group], up[slot], out=middle[group])
            if up_bias is not None:
                middle[group].add_(up_bias[slot])
        activate = self._module._apply_gate if self._module.has_gate else self._module.act_fn
        active = torch.split(activate(self._middle_SH).to(matrices.dtype), self._sizes)
        out = torch.split(self._out_SD, self._sizes)
        down, down_bias = matrices.down, matrices.down_bias
        places = self._places or range(len(out))
        for group, slot in groups:
            place = out[places[group]]
            torch.mm(active[group], down[slot], out=place)
            if down_bias is not None:
                place.add_(down_bias[slot])

    def reserve(self, matrices: Matrices, fills: bool = False) -> None:
        """Make the buffers that all parts write their rows into; `fills`: the first writes all."""
        # Else zero: activations see finite numbers.
        make = torch.empty if fills else torch.zeros
        rows, dtype, device = len(self._rows_SD), matrices.dtype, self._rows_SD.device
        self._middle_SH = make((rows, matrices.up[0].shape[1]), dtype=dtype, device=device)
        self._out_SD = make((rows, matrices.down[0].shape[1]), dtype=dtype, device=device)

    def unweighted(self) -> Tensor:
        """Return what the experts gave [S, D] in the order of the tokens' choices."""
        assert self._out_SD is not None, "nothing was run"
        return self._as_chosen(self._out_SD)

    def result(self) -> Tensor:
        """Return the module's output [T, D]."""
        if self._out_SD is None:
            return torch.zeros_like(self._hidden_TD)
        out_SD, w_S = self._out_SD, self._w_TK.reshape(-1)
        if self._module.has_post_expert_norm:
            out_SD = self._module.post_expert_norm(out_SD)
        if self._places is None:
            w_S = w_S[self._order_S]
        weighted_SD = self._as_chosen(out_SD * w_S.unsqueeze(-1))
        weighted_TKD = weighted_SD.view(len(self._hidden_TD), self._top_k, -1)
        return weighted_TKD.sum(dim=1).to(self._hidden_TD.dtype)

    def _as_chosen(self, values_SD: Tensor) -> Tensor:
        """Put rows into the order of the tokens' choices."""
        if self._places is not None:
            return values_SD
        back_S = torch.empty_like(self._order_S)
        back_S[self._order_S] = torch.arange(len(back_S), device=back_S.device)
        return values_SD[back_S]


def grouped_forward(
    module: Any, hidden_TD: Tensor, index_TK: Tensor, w_TK: Tensor, matrices: Matrices | None = None
) -> Tensor:
    """Compute what transformers' `grouped_mm` would, on a CPU, from an experts module's tensors."""
    if matrices is None:
        matrices = Matrices(module, tensors_of(module))
    call = GroupedCall(module, hidden_TD, index_TK, w_TK, len(matrices.up))
    call.run(((expert, expert) for expert in call.needed), matrices)
    return call.result()


def tensors_of(module: Any) -> Tensors:
    """Return the tensors by name of an experts module, or of what stands for one."""
    own = vars(module)
    found: Tensors = own.get("_parameters", own)
    return found

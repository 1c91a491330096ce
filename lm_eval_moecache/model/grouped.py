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

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
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
    nothing to its tokens.
    """

    def __init__(
        self, module: Any, hidden_TD: Tensor, index_TK: Tensor, w_TK: Tensor, num_experts: int
    ) -> None:
        self._module = module
        self._hidden_TD, self._w_TK = hidden_TD, w_TK
        self._top_k = index_TK.shape[-1]
        self._num_experts = num_experts
        self._places: list[int] | None = None
        """Of one token, the place in its choice that each sorted row has."""
        self._bounds = self._sort(index_TK)
        """Expert -> its first row and the one after its last, where it has any."""
        self._rows_SD: Tensor
        if self._places is not None:
            self._rows_SD = hidden_TD.expand(self._top_k, -1)
        else:
            self._rows_SD = hidden_TD[self._order_S // self._top_k]
        self._middle_SH: Tensor | None = None
        self._out_SD: Tensor | None = None

    @property
    def needed(self) -> list[int]:
        """The experts that have assignments, in ascending order."""
        return list(self._bounds)

    def run(self, slot_of: Iterable[tuple[int, int]], matrices: Matrices) -> None:
        """Run the assignments to these (expert, slot)."""
        groups = [(slot, *self._bounds[e]) for e, slot in slot_of if e in self._bounds]
        if not groups:
            return
        rows_SD = self._rows_SD.to(matrices.dtype)
        if self._middle_SH is None or self._out_SD is None:
            fills = sum(end - start for _, start, end in groups) == len(rows_SD)
            self.reserve(matrices, fills)
        assert self._middle_SH is not None and self._out_SD is not None
        activate = self._module._apply_gate if self._module.has_gate else self._module.act_fn
        if self._places is not None:
            self._run_one_token(rows_SD, matrices, groups, activate)
            return
        _multiply(rows_SD, matrices.up, matrices.up_bias, groups, self._middle_SH)
        active_SH = activate(self._middle_SH).to(matrices.dtype)
        _multiply(active_SH, matrices.down, matrices.down_bias, groups, self._out_SD)

    def _run_one_token(
        self,
        rows_SD: Tensor,
        matrices: Matrices,
        groups: list[tuple[int, int, int]],
        activate: Callable[[Tensor], Tensor],
    ) -> None:
        """As for many tokens, with fewer kernels: each row is an expert's whole part.

        Sorted rows matter to the activation alone. What comes out is put where the token's choice
        has it: products and weights do not depend on the place.
        """
        assert self._middle_SH is not None and self._out_SD is not None and self._places
        row_1D, middle, out = (
            rows_SD[:1],
            torch.split(self._middle_SH, 1),
            torch.split(self._out_SD, 1),
        )
        up, up_bias = matrices.up, matrices.up_bias
        down, down_bias = matrices.down, matrices.down_bias
        for slot, row, _ in groups:
            torch.mm(row_1D, up[slot], out=middle[row])
            if up_bias is not None:
                middle[row].add_(up_bias[slot])
        active = torch.split(activate(self._middle_SH).to(matrices.dtype), 1)
        for slot, row, _ in groups:
            place = out[self._places[row]]
            torch.mm(active[row], down[slot], out=place)
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
        return self._out_SD if self._places is not None else self._out_SD[self._back()]

    def result(self) -> Tensor:
        """Return the module's output [T, D]."""
        if self._out_SD is None:
            return torch.zeros_like(self._hidden_TD)
        out_SD = self._out_SD
        if self._module.has_post_expert_norm:
            out_SD = self._module.post_expert_norm(out_SD)
        tokens = len(self._hidden_TD)
        if self._places is not None:
            weighted_SD = out_SD * self._w_TK.reshape(-1, 1)
        else:
            weighted_SD = out_SD * self._w_TK.reshape(-1)[self._order_S].unsqueeze(-1)
            weighted_SD = weighted_SD[self._back()]
        weighted_TKD = weighted_SD.view(tokens, self._top_k, -1)
        return weighted_TKD.sum(dim=1).to(self._hidden_TD.dtype)

    def _back(self) -> Tensor:
        """Return the row of each assignment [S]."""
        back_S = torch.empty_like(self._order_S)
        back_S[self._order_S] = torch.arange(len(back_S), device=back_S.device)
        return back_S

    def _sort(self, index_TK: Tensor) -> dict[int, tuple[int, int]]:
        index_S = index_TK.reshape(-1)
        if len(index_TK) == 1:
            # A decode step: without kernels for a handful of numbers.
            chosen: list[int] = index_S.tolist()
            if len(set(chosen)) == len(chosen):
                order = sorted(range(len(chosen)), key=chosen.__getitem__)
                self._places = order
                bounds = {chosen[k]: (row, row + 1) for row, k in enumerate(order)}
                return {e: own for e, own in bounds.items() if e < self._num_experts}
        # The sort of transformers' kernel: rows of one expert meet in the same order.
        sorted_S, self._order_S = torch.sort(index_S)
        counts = torch.bincount(sorted_S, minlength=self._num_experts).tolist()
        ends = list(accumulate(counts[: self._num_experts]))
        return {e: (ends[e] - n, ends[e]) for e, n in enumerate(counts[: len(ends)]) if n}


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


def _multiply(
    rows: Tensor,
    matrices: list[Tensor],
    bias: Stack | None,
    groups: list[tuple[int, int, int]],
    out: Tensor,
) -> None:
    for slot, start, end in groups:
        part = out[start:end]
        torch.mm(rows[start:end], matrices[slot], out=part)
        if bias is not None:
            part.add_(bias[slot])

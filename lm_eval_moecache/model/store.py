"""Where expert weights are stored, and the kernels that run them from there.

One experts function is registered with transformers, which calls it instead of its own kernels.

Shapes: T tokens, E experts, K experts per token, S = T x K assignments sorted by expert, D hidden
size, H width of the first product.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from lm_eval_moecache.model.precision.codecs import (
    Codec,
    Encoded,
    decode,
    expert_parameters,
    is_matrices,
)
from lm_eval_moecache.records.arrays import BoolArray, IntArray

IMPLEMENTATION = "moecache"
STORE_ATTRIBUTE = "moecache_store"
Kernel = Callable[[Any, Tensor, Tensor, Tensor], Tensor]
"""Runs (experts module, hidden states [T, D], indices [T, K], weights [T, K])."""
Waves = Callable[[], Iterator[tuple[Mapping[int, int], bool]]]
"""Yields (key to execute -> its slot, whether these are all) wave by wave: `Engine.waves`."""
Slots = Mapping[str, Tensor]
"""Parameter name -> [slots, ...]."""
_FLAGS = ("config", "has_bias", "has_gate", "has_post_expert_norm", "is_transposed")


class Store(ABC):
    """Holds a model's experts, and executes them."""

    levels: list[IntArray | None] | None = None
    """With several precisions, of each layer's next call the level at which each row executes each
    expert [rows, experts], -1 where it does not. A row is an equal part of the call's tokens."""

    @abstractmethod
    def begin_pass(self, *, decoding: bool, padding: BoolArray | None = None) -> None:
        """Choose the kernel of a pass; transformers changes kernels for decode steps on devices.

        `padding` marks the tokens [T] whose output is discarded, if there are any.
        """

    @abstractmethod
    def at(self, layer: int, waves: Waves) -> Kernel:
        """Return one layer's kernel, which executes its experts wave by wave."""

    def close(self) -> None:
        """Stop background work, if there is any. Safe to call twice."""
        return


class InPlaceStore(Store):
    """Runs experts from the model's own tensors, with the kernel transformers would have used.

    Under the virtual clock a transfer takes time but moves nothing: all experts fit on the compute
    device, so residency is bookkeeping, and outputs are bit for bit the unwrapped model's.
    """

    def __init__(self, implementation: str | None, device_type: str) -> None:
        self._implementation = implementation or "eager"
        self._device_type = device_type
        self.begin_pass(decoding=False)

    def begin_pass(self, *, decoding: bool, padding: BoolArray | None = None) -> None:
        name = self._implementation
        if decoding and name == "grouped_mm" and self._device_type != "cpu":
            # `GenerationMixin._optimize_model_for_decode` does so for the unwrapped model.
            name = "batched_mm"
        self.kernel: Kernel = _own_loop if name == "eager" else ALL_EXPERTS_FUNCTIONS[name]

    def at(self, layer: int, waves: Waves) -> Kernel:
        """Return one layer's kernel, which keeps the views that passes of few tokens run on."""
        matrices: Matrices | None = None
        viewed: list[Any] = []

        def run(module: Any, hidden_TD: Tensor, index_TK: Tensor, w_TK: Tensor) -> Tensor:
            nonlocal matrices, viewed
            if not self._skips_groups(module, index_TK) or hasattr(module, "_hf_hook"):
                # accelerate's hook brings weights for this call only: no view may outlive it.
                return self.run(module, hidden_TD, index_TK, w_TK)
            tensors = tensors_of(module)
            current: list[Any] = list(tensors.values())
            if matrices is None or any(a is not b for a, b in zip(current, viewed, strict=True)):
                matrices, viewed = Matrices(module, tensors), current
            return grouped_forward(module, hidden_TD, index_TK, w_TK, matrices)

        return run

    def run(self, module: Any, hidden_TD: Tensor, index_TK: Tensor, w_TK: Tensor) -> Tensor:
        """Run experts whose tensors are valid for this call only."""
        if self._skips_groups(module, index_TK):
            return grouped_forward(module, hidden_TD, index_TK, w_TK)
        return self.kernel(module, hidden_TD, index_TK, w_TK)

    def _skips_groups(self, module: Any, index_TK: Tensor) -> bool:
        """Whether the kernel would visit experts without rows, and ours may replace it."""
        return (
            self._implementation == "grouped_mm"
            and index_TK.device.type == "cpu"
            and index_TK.numel() < int(module.num_experts)
            and not torch.is_grad_enabled()
        )


class OnSlots:
    """Stands in for an experts module: its experts are the slots of a pool.

    With `sparse`, an index beyond the last slot is an absent expert whose output is zero, as
    transformers treats experts of other ranks.
    """

    def __init__(self, module: nn.Module, slots: Slots, sparse: bool = False) -> None:
        attrs = vars(module)
        self.__dict__.update({name: attrs[name] for name in _FLAGS if name in attrs}, **slots)
        self.num_experts = len(next(iter(slots.values())))
        self._is_expert_parallel = sparse
        self._module = module
        self.own_class = type(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _own_loop(module: Any, hidden_TD: Tensor, index_TK: Tensor, w_TK: Tensor) -> Tensor:
    """Run the class' own loop, which the experts interface's decorator keeps as `__wrapped__`."""
    forward: Any = getattr(module, "own_class", type(module)).forward
    out_TD: Tensor = forward.__wrapped__(module, hidden_TD, index_TK, w_TK)
    return out_TD


def implementation_of(model: Any) -> str | None:
    """Return the experts implementation the model's MoE layers use now."""
    config = getattr(model.config, "text_config", model.config)
    name: str | None = config._experts_implementation
    return name


def experts_forward(module: nn.Module, hidden_TD: Tensor, index_TK: Tensor, w_TK: Tensor) -> Tensor:
    """Run the chosen experts [T, K] on hidden states [T, D] from the store of this module.

    The router hook has already decided indices and weights.
    """
    run: Kernel = getattr(module, STORE_ATTRIBUTE)
    return run(module, hidden_TD, index_TK, w_TK)


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)


Stack = Tensor | Sequence[Tensor]
Tensors = Mapping[str, Stack]
"""Parameter name -> [slots, ...], in one piece or slot by slot."""


class Matrices:
    """Each slot's matrices, oriented for products. Views: they follow the slots' content.

    `module` gives the orientation; `tensors` may be its own parameters or a cache's pool.
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
    """Return the name of the parameter that an experts module multiplies its input by."""
    return "gate_up_proj" if module.has_gate else "up_proj"


def _right_hand_sides(stacked: Stack, transposed: bool) -> list[Tensor]:
    matrices = stacked.detach().unbind(0) if isinstance(stacked, Tensor) else stacked
    return list(matrices) if transposed else [matrix.t() for matrix in matrices]


class GroupedCall:
    """One call of an experts module, in one part or several: bit for bit `grouped_mm` on a CPU.

    The last bits of a float32 result depend on more than its operands: a product of 3 rows may use
    another kernel than one of 4, and an activation rounds differently in the vector body of a loop
    and in its tail. So equality holds by construction: every product has the same rows as in
    transformers' kernel, and row-wise work runs on a buffer of the same shape, each row in the
    same place, of which each part uses the rows of its experts.

    Call `run` any number of times, each expert at most once, then `result`. Experts never run add
    nothing to their tokens. A group is an expert's rows; groups are in ascending order of expert.
    """

    def __init__(
        self, module: Any, hidden_TD: Tensor, index_TK: Tensor, w_TK: Tensor, num_experts: int
    ) -> None:
        self._module = module
        self._hidden_TD, self._w_TK = hidden_TD, w_TK
        self._top_k = index_TK.shape[-1]
        self._places: Sequence[int] | None = None
        """For a single token, each group's place in its choice. Outputs are written there directly:
        products and weights, unlike the activation, do not depend on the place."""
        index_S = index_TK.reshape(-1)
        chosen: list[int] = index_S.tolist() if len(index_TK) == 1 else []
        if chosen and len(set(chosen)) == len(chosen):
            # A decode step: a handful of indices is sorted without launching kernels.
            self._places = sorted(range(len(chosen)), key=chosen.__getitem__)
            experts, self._sizes = [chosen[k] for k in self._places], [1] * len(chosen)
            self._rows_SD = hidden_TD.expand(self._top_k, -1)
        else:
            # Sorted as in transformers' kernel: an expert's rows come in the same order.
            sorted_S, self._order_S = torch.sort(index_S)
            unique, counts = torch.unique_consecutive(sorted_S, return_counts=True)
            experts, self._sizes = unique.tolist(), counts.tolist()
            self._rows_SD = hidden_TD[self._order_S // self._top_k]
        self._group_of = {e: group for group, e in enumerate(experts) if e < num_experts}
        self._middle_SH: Tensor | None = None
        self._out_SD: Tensor | None = None

    @property
    def needed(self) -> list[int]:
        """The experts that have assignments, in ascending order."""
        return list(self._group_of)

    def run(self, slot_of: Iterable[tuple[int, int]], matrices: Matrices) -> None:
        """Run the assignments to these experts, given as (expert, slot)."""
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
        """Allocate the buffers that all parts write to; `fills`: the first one writes every row."""
        # Zeroed otherwise, so that activations see finite numbers.
        make = torch.empty if fills else torch.zeros
        rows, dtype, device = len(self._rows_SD), matrices.dtype, self._rows_SD.device
        self._middle_SH = make((rows, matrices.up[0].shape[1]), dtype=dtype, device=device)
        self._out_SD = make((rows, matrices.down[0].shape[1]), dtype=dtype, device=device)

    def unweighted(self) -> Tensor:
        """Return the experts' outputs [S, D], unweighted, in the order of the tokens' choices."""
        assert self._out_SD is not None, "nothing was run"
        return self._as_chosen(self._out_SD)

    def result(self) -> Tensor:
        """Return the module's output [T, D]."""
        if self._out_SD is None:
            return torch.zeros_like(self._hidden_TD)
        out_SD, w_S = self._out_SD, self._w_TK.reshape(-1)
        if getattr(self._module, "has_post_expert_norm", False):
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
    """Return name -> tensor of an experts module or of its stand-in."""
    attributes = vars(module)
    tensors: Tensors = attributes.get("_parameters", attributes)
    return tensors


# Recently decoded experts are kept up to this size: decoding them again would cost real time.
MEMO_BYTES = 64 * 2**20


class LadderStore(Store):
    """Decodes the experts of an event and runs them with transformers' kernel.

    The arithmetic is that of a model with the decoded weights at the compute dtype, on every
    device: no library's low-precision product, so that all codecs compute alike.
    """

    def __init__(
        self,
        stored: Sequence[Encoded],
        codecs: Sequence[Codec],
        implementation: str | None,
        device_type: str,
    ) -> None:
        self.stored, self.codecs = stored, codecs
        self.levels = [None] * len(stored)
        """None where all experts are at the best level."""
        self._kernels = InPlaceStore(implementation, device_type)
        self._decoded: OrderedDict[tuple[int, str, int, int], Tensor] = OrderedDict()
        self._decoded_bytes = 0

    def begin_pass(self, *, decoding: bool, padding: BoolArray | None = None) -> None:
        self._kernels.begin_pass(decoding=decoding)

    def at(self, layer: int, waves: Waves) -> Kernel:
        return partial(self._run, layer)

    def _run(
        self, layer: int, module: nn.Module, hidden_TD: Tensor, index_TK: Tensor, w_TK: Tensor
    ) -> Tensor:
        """Run the chosen experts, each at the level at which its row executes it.

        An expert at two levels has two slots. Assignments to experts that a row does not execute
        (padding, dropped ones) run on its first one: the output at padding positions is discarded,
        and the weight of a dropped expert is 0.
        """
        assert self.levels is not None
        levels_RE, num_levels = self.levels[layer], len(self.codecs)
        num_experts = len(next(iter(module.parameters(recurse=False))))
        if levels_RE is None:
            levels_RE = np.full((1, num_experts), -1)
            levels_RE[0, torch.unique(index_TK).tolist()] = 0
        is_executed = levels_RE >= 0
        # Slots in ascending order of expert: kernels sort, and rows keep their usual order.
        numbers_RE = np.arange(num_experts) * num_levels + levels_RE
        numbers, slot_of = np.unique(numbers_RE[is_executed], return_inverse=True)
        if not len(numbers):
            return torch.zeros_like(hidden_TD)
        pairs = [divmod(number, num_levels) for number in numbers.tolist()]
        slots = {
            name: torch.stack([self._matrix(layer, module, name, *pair) for pair in pairs])
            if is_matrices(module, parameter)
            else parameter[[expert for expert, _ in pairs]]
            for name, parameter in expert_parameters(module).items()
        }
        table_RE = np.zeros_like(levels_RE)
        table_RE[is_executed] = slot_of
        first_R1 = np.take_along_axis(table_RE, is_executed.argmax(-1)[:, None], -1)
        table_RE = np.where(is_executed, table_RE, first_R1)
        rows_T1 = np.arange(len(index_TK))[:, None] * len(table_RE) // len(index_TK)
        sent = [torch.from_numpy(each).to(index_TK.device) for each in (table_RE, rows_T1)]
        slot_TK = sent[0].to(index_TK.dtype)[sent[1], index_TK]
        return self._kernels.run(OnSlots(module, slots), hidden_TD, slot_TK, w_TK)

    def _matrix(self, layer: int, module: nn.Module, name: str, expert: int, level: int) -> Tensor:
        """Return one expert's decoded matrix, in the module's orientation."""
        memo_key = (layer, name, expert, level)
        matrix = self._decoded.get(memo_key)
        if matrix is not None:
            self._decoded.move_to_end(memo_key)
            return matrix
        row = {part: stack[expert] for part, stack in self.stored[layer][level].items()}
        matrix = decode(module, name, getattr(module, name), row, self.codecs[level])
        self._decoded[memo_key] = matrix
        self._decoded_bytes += matrix.nbytes
        while self._decoded_bytes > MEMO_BYTES:
            self._decoded_bytes -= self._decoded.popitem(last=False)[1].nbytes
        return matrix

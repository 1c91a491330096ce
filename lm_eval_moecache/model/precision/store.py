"""The store of a ladder: runs each expert from the level at which the cache holds it.

Shapes: T tokens, K experts per token, E experts, D hidden size.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from lm_eval_moecache.model.precision.codecs import Codec
from lm_eval_moecache.model.precision.stored import Encoded, decode, is_matrices
from lm_eval_moecache.model.store import InPlaceStore, Kernel, OnSlots, Store, Waves
from lm_eval_moecache.records.arrays import BoolArray

# Decoding again what was decoded a moment ago would cost real time, where it fits.
MEMO_BYTES = 64 * 2**20


class LadderStore(Store):
    """Decodes the experts of an event and runs them with the kernel of transformers.

    The arithmetic is that of a model whose weights are the decoded ones, at the compute dtype, on
    every device: no library's own low-precision product, so that it is the same for all codecs.
    """

    def __init__(
        self,
        stored: Sequence[Mapping[str, Encoded]],
        codecs: Sequence[Codec],
        implementation: str | None,
        device_type: str,
    ) -> None:
        self.stored, self.codecs = stored, codecs
        self.levels = [None] * len(stored)
        """Layer -> the levels of its event's keys; None where all are at the best one."""
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
        """Run the chosen experts, each at the level of the layer's event.

        Assignments to experts that are not of the event (padding, dropped ones) run on another:
        nobody reads what padding computes, and the weight of a dropped expert is 0.
        """
        assert self.levels is not None
        levels = self.levels[layer]
        num_experts = len(next(iter(module.parameters(recurse=False))))
        if levels is None:
            wanted = dict.fromkeys(torch.unique(index_TK).tolist(), 0)
        else:
            wanted = {key % num_experts: level for key, level in levels.items()}
        experts = sorted(wanted)
        if not experts:
            return torch.zeros_like(hidden_TD)
        slots = {
            name: torch.stack([self._matrix(layer, module, name, e, wanted[e]) for e in experts])
            if is_matrices(module, parameter)
            else parameter[experts]
            for name, parameter in module.named_parameters(recurse=False)
            if parameter.dim() > 1 and parameter.shape[0] == num_experts
        }
        # Slots in the order of experts: the kernels sort, and rows of one expert meet as ever.
        table_E = torch.zeros(num_experts, dtype=index_TK.dtype)
        table_E[experts] = torch.arange(len(experts), dtype=index_TK.dtype)
        slot_TK = table_E.to(index_TK.device)[index_TK]
        return self._kernels.run(OnSlots(module, slots), hidden_TD, slot_TK, w_TK)

    def _matrix(self, layer: int, module: nn.Module, name: str, expert: int, level: int) -> Tensor:
        """Return one expert's decoded matrix, as the module would have it."""
        place = (layer, name, expert, level)
        found = self._decoded.get(place)
        if found is not None:
            self._decoded.move_to_end(place)
            return found
        tensors = [whole[expert] for whole in self.stored[layer][name][level]]
        found = decode(module, getattr(module, name), tensors, self.codecs[level])
        self._decoded[place] = found
        self._decoded_bytes += found.nbytes
        while self._decoded_bytes > MEMO_BYTES:
            self._decoded_bytes -= self._decoded.popitem(last=False)[1].nbytes
        return found

"""Where expert weights lie, and the kernel that runs them from there.

One experts function is registered with transformers, which calls it instead of its own kernels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from lm_eval_moecache.model.grouped import Matrices, grouped_forward, tensors_of
from lm_eval_moecache.records.arrays import BoolArray

IMPLEMENTATION = "moecache"
STORE_ATTRIBUTE = "moecache_store"
Kernel = Callable[[Any, Tensor, Tensor, Tensor], Tensor]
"""Runs (experts module, hidden states [T, D], indices [T, K], weights [T, K])."""
Waves = Callable[[], Iterator[tuple[Mapping[int, int], bool]]]
"""Tells the keys to execute and their slots, as they come: `Executor.waves`."""
Slots = Mapping[str, Tensor]
"""Parameter name -> [slots, ...]."""
_FLAGS = ("config", "has_bias", "has_gate", "has_post_expert_norm", "is_transposed")


class Store(ABC):
    """Where a model's experts are executed from."""

    levels: list[Mapping[int, int] | None] | None = None
    """Where there are several precisions, layer -> the levels of the keys of its next event."""

    @abstractmethod
    def begin_pass(self, *, decoding: bool, padding: BoolArray | None = None) -> None:
        """Choose the kernel of a pass; transformers changes kernels for decode steps on devices.

        `padding` marks the tokens [T] that nobody waits for, where there are any.
        """

    @abstractmethod
    def at(self, layer: int, waves: Waves) -> Kernel:
        """Return what runs one layer's experts, which are executed as the `waves` come."""

    def close(self) -> None:
        """End what runs beside the caller, if anything does. Safe to call twice."""
        return


class InPlaceStore(Store):
    """Runs experts from the model's own tensors, with the kernel transformers would have used.

    Under the virtual clock a transfer takes time but moves nothing: the experts fit where they
    are, so residency is bookkeeping, and the arithmetic is bit for bit the unwrapped model's.
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
        """Return the kernel of one layer, which keeps the views that few tokens' products take."""
        matrices: Matrices | None = None
        seen: list[Any] = []

        def run(module: Any, hidden_TD: Tensor, index_TK: Tensor, w_TK: Tensor) -> Tensor:
            nonlocal matrices, seen
            if not self._skips_groups(module, index_TK) or hasattr(module, "_hf_hook"):
                # With a hook of accelerate, weights are there for this call only: no view may stay.
                return self.run(module, hidden_TD, index_TK, w_TK)
            tensors = tensors_of(module)
            now: list[Any] = list(tensors.values())
            if matrices is None or any(a is not b for a, b in zip(now, seen, strict=True)):
                matrices, seen = Matrices(module, tensors), now
            return grouped_forward(module, hidden_TD, index_TK, w_TK, matrices)

        return run

    def run(self, module: Any, hidden_TD: Tensor, index_TK: Tensor, w_TK: Tensor) -> Tensor:
        """Run experts that are there for this call only."""
        if self._skips_groups(module, index_TK):
            return grouped_forward(module, hidden_TD, index_TK, w_TK)
        return self.kernel(module, hidden_TD, index_TK, w_TK)

    def _skips_groups(self, module: Any, index_TK: Tensor) -> bool:
        """Whether the kernel would visit experts without a row, and ours may stand for it."""
        return (
            self._implementation == "grouped_mm"
            and index_TK.device.type == "cpu"
            and index_TK.numel() < int(module.num_experts)
            and not torch.is_grad_enabled()
        )


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


def _own_loop(module: Any, hidden_TD: Tensor, index_TK: Tensor, w_TK: Tensor) -> Tensor:
    """Run the class' own loop, which the decorator of the experts interface keeps."""
    own: Any = getattr(module, "own_class", type(module)).forward
    result: Tensor = own.__wrapped__(module, hidden_TD, index_TK, w_TK)
    return result


def implementation_of(model: Any) -> str | None:
    """Return the experts implementation the model's MoE layers use now."""
    config = getattr(model.config, "text_config", model.config)
    name: str | None = config._experts_implementation
    return name


def experts_forward(module: nn.Module, hidden_TD: Tensor, index_TK: Tensor, w_TK: Tensor) -> Tensor:
    """Run the chosen experts [T, K] on hidden states [T, D] from the store of this module.

    The router hook has already decided what indices and weights are.
    """
    run: Kernel = getattr(module, STORE_ATTRIBUTE)
    return run(module, hidden_TD, index_TK, w_TK)


def register_experts_function() -> None:
    """Make `moecache` an experts implementation that models can be set to."""
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)

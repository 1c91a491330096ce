"""Where expert weights lie, and the kernel that runs them from there.

One experts function is registered with transformers, which calls it instead of its own kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from lm_eval_moecache.model.grouped import Matrices, grouped_forward, tensors_of
from lm_eval_moecache.records.arrays import BoolArray

Kernel = Callable[[Any, Tensor, Tensor, Tensor], Tensor]
Waves = Callable[[], Iterator[tuple[Mapping[int, int], bool]]]
"""Tells the keys to execute and their slots, as they come: `Executor.waves`."""


class LayerStore(Protocol):
    """What an experts module finds its weights through."""

    @property
    def run(self) -> Kernel:
        """Runs (experts module, hidden states, indices, weights) in the pass in progress."""


class Store(Protocol):
    """Where a model's experts are executed from."""

    levels: list[Mapping[int, int] | None] | None
    """Where there are several precisions, layer -> the levels of the keys of its next event."""

    def begin_pass(self, *, decoding: bool, padding: BoolArray | None = None) -> None:
        """Choose the kernel of a pass; transformers changes kernels for decode steps.

        `padding` marks the tokens [T] that nobody waits for, where there are any.
        """

    def close(self) -> None:
        """End what runs beside the caller. Safe to call twice."""

    def at(self, layer: int, waves: Waves) -> LayerStore:
        """Return the store of one layer's experts, which are executed as the `waves` come."""


class InPlaceStore:
    """Runs experts from the model's own tensors, with the kernel transformers would have used.

    Under the virtual clock a transfer takes time but moves nothing: the experts fit where they
    are, so residency is bookkeeping, and the arithmetic is bit for bit the unwrapped model's.
    """

    levels: list[Mapping[int, int] | None] | None = None

    def __init__(self, implementation: str | None, device_type: str) -> None:
        self._implementation = implementation or "eager"
        self._device_type = device_type
        self.kernel: Kernel = self._kernel(decoding=False)
        """Runs (experts module, hidden states, indices, weights) in the pass in progress."""

    def begin_pass(self, *, decoding: bool, padding: BoolArray | None = None) -> None:
        """Choose the kernel of a pass; transformers changes kernels for decode steps."""
        self.kernel = self._kernel(decoding)

    def close(self) -> None:
        """Do nothing: the caller executes."""

    def at(self, layer: int, waves: Waves) -> InPlaceLayer:
        return InPlaceLayer(self)

    def run(self, module: Any, hidden_TD: Tensor, index_TK: Tensor, w_TK: Tensor) -> Tensor:
        """Run experts that are there for this call only."""
        if self.skips_groups(module, index_TK):
            return grouped_forward(module, hidden_TD, index_TK, w_TK)
        return self.kernel(module, hidden_TD, index_TK, w_TK)

    def skips_groups(self, module: Any, index_TK: Tensor) -> bool:
        """Whether the kernel would visit experts without a row, and ours may stand for it."""
        return (
            self._implementation == "grouped_mm"
            and index_TK.device.type == "cpu"
            and index_TK.numel() < int(module.num_experts)
            and not torch.is_grad_enabled()
        )

    def _kernel(self, decoding: bool) -> Kernel:
        name = self._implementation
        if name == "eager":
            return _own_loop
        if decoding and name == "grouped_mm" and self._device_type != "cpu":
            # `GenerationMixin._optimize_model_for_decode` does so for the unwrapped model.
            name = "batched_mm"
        kernel: Kernel = ALL_EXPERTS_FUNCTIONS[name]
        return kernel


class InPlaceLayer:
    """One layer's part of the store: keeps the views that the products of few tokens go through."""

    def __init__(self, store: InPlaceStore) -> None:
        self._store = store
        self._matrices: Matrices | None = None
        self._seen: list[Any] = []

    def run(self, module: Any, hidden_TD: Tensor, index_TK: Tensor, w_TK: Tensor) -> Tensor:
        """Run the chosen experts from the module's own tensors."""
        if not self._store.skips_groups(module, index_TK) or hasattr(module, "_hf_hook"):
            # With a hook of accelerate, weights are there for this call only: no view may stay.
            return self._store.run(module, hidden_TD, index_TK, w_TK)
        tensors = tensors_of(module)
        now: list[Any] = list(tensors.values())
        if self._matrices is None or any(a is not b for a, b in zip(now, self._seen, strict=True)):
            self._matrices, self._seen = Matrices(module, tensors), now
        return grouped_forward(module, hidden_TD, index_TK, w_TK, self._matrices)


def _own_loop(
    experts: nn.Module, hidden_TD: Tensor, index_TK: Tensor, weights_TK: Tensor
) -> Tensor:
    """Run the class' own loop, which the decorator of the experts interface keeps."""
    own: Any = getattr(experts, "own_class", type(experts)).forward
    result: Tensor = own.__wrapped__(experts, hidden_TD, index_TK, weights_TK)
    return result


def implementation_of(model: Any) -> str | None:
    """Return the experts implementation the model's MoE layers use now."""
    config = getattr(model.config, "text_config", model.config)
    name: str | None = config._experts_implementation
    return name


IMPLEMENTATION = "moecache"
STORE_ATTRIBUTE = "moecache_store"


def experts_forward(
    module: nn.Module, hidden_TD: Tensor, index_TK: Tensor, weights_TK: Tensor
) -> Tensor:
    """Run the chosen experts [T, K] on hidden states [T, D] from the store of this module.

    The router hook has already decided what `index_TK` and `weights_TK` are.
    """
    store: LayerStore = getattr(module, STORE_ATTRIBUTE)
    return store.run(module, hidden_TD, index_TK, weights_TK)


def register_experts_function() -> None:
    """Make `moecache` an experts implementation that models can be set to."""
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)

"""The store: where expert weights lie, and the kernel that runs them from there."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

Kernel = Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]


class InPlaceStore:
    """Runs experts from the model's own tensors, with the kernel transformers would have used.

    Under the virtual clock a transfer takes time but moves nothing: the experts fit where they
    are, so residency is bookkeeping, and the arithmetic is bit for bit the unwrapped model's.
    """

    def __init__(self, implementation: str | None) -> None:
        self._implementation = implementation or "eager"
        self.decoding = False
        """Whether the pass is a decode step of generation: transformers changes kernels there."""

    def forward(
        self, experts: nn.Module, hidden_TD: Tensor, index_TK: Tensor, weights_TK: Tensor
    ) -> Tensor:
        return self._kernel(experts, hidden_TD)(experts, hidden_TD, index_TK, weights_TK)

    def _kernel(self, experts: nn.Module, hidden_TD: Tensor) -> Kernel:
        name = self._implementation
        if name == "eager":
            # The decorator of the experts interface keeps the class' own loop under __wrapped__.
            own: Kernel = type(experts).forward.__wrapped__  # type: ignore[attr-defined]
            return own
        if self.decoding and name == "grouped_mm" and hidden_TD.device.type != "cpu":
            # `GenerationMixin._optimize_model_for_decode` does so for the unwrapped model.
            name = "batched_mm"
        kernel: Kernel = ALL_EXPERTS_FUNCTIONS[name]
        return kernel

"""What a weighting rule is.

Shapes: T tokens, E experts, K experts per token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn


class WeightingRule(ABC):
    """Turns logits [T, E] and chosen experts [T, K] into weights [T, K].

    A new one is one file in `rules/` with one subclass. Which rule a router follows is found by
    asking it, so that no list of model names has to be kept.
    """

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    @classmethod
    def of(cls, router: nn.Module) -> WeightingRule | None:
        """Return the rule as this router may follow it, or None where it cannot be."""
        return cls()

    @abstractmethod
    def raw(self, logits_TE: Tensor, experts_TK: Tensor) -> Tensor:
        """Return float32 weights before the family's constant scale."""

    def __call__(self, logits_TE: Tensor, experts_TK: Tensor, dtype: torch.dtype) -> Tensor:
        weights = self.raw(logits_TE.float(), experts_TK)
        return (weights if self.scale == 1 else weights * self.scale).to(dtype)

"""Softmax over the chosen experts, times a learned scale of each expert."""

from __future__ import annotations

from torch import Tensor, nn

from lm_eval_moecache.model.offloaded import value_of
from lm_eval_moecache.model.weighting.base import WeightingRule


class SoftmaxChosenScaled(WeightingRule):
    """Softmax over the chosen experts, each times its own scale (Gemma 4)."""

    def __init__(self, scale_E: Tensor) -> None:
        super().__init__()
        self._scale_E = scale_E.detach().float()

    @classmethod
    def of(cls, router: nn.Module) -> SoftmaxChosenScaled | None:
        has_scale = isinstance(getattr(router, "per_expert_scale", None), Tensor)
        return cls(value_of(router, "per_expert_scale")) if has_scale else None

    def raw(self, logits_TE: Tensor, experts_TK: Tensor) -> Tensor:
        scale_E = self._scale_E.to(logits_TE.device)
        return logits_TE.gather(-1, experts_TK).softmax(-1) * scale_E[experts_TK]

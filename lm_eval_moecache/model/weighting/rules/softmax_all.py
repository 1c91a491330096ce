"""Softmax over all experts, not renormalised."""

from __future__ import annotations

from torch import Tensor

from lm_eval_moecache.model.weighting.base import WeightingRule


class SoftmaxAll(WeightingRule):
    """Softmax over all experts, not renormalised (OLMoE, DeepSeek-V2, Qwen2-MoE)."""

    def raw(self, logits_TE: Tensor, experts_TK: Tensor) -> Tensor:
        return logits_TE.softmax(-1).gather(-1, experts_TK)

"""Sigmoid of the chosen logits, renormalised."""

from __future__ import annotations

from torch import Tensor

from lm_eval_moecache.model.weighting.base import WeightingRule


class SigmoidNormed(WeightingRule):
    """Sigmoid of the chosen logits, renormalised to sum to one (DeepSeek-V3, GLM)."""

    def raw(self, logits_TE: Tensor, experts_TK: Tensor) -> Tensor:
        chosen = logits_TE.gather(-1, experts_TK).sigmoid()
        return chosen / (chosen.sum(-1, keepdim=True) + 1e-20)

"""Sigmoid of each chosen logit."""

from __future__ import annotations

from torch import Tensor

from lm_eval_moecache.model.weighting.base import WeightingRule


class Sigmoid(WeightingRule):
    """Sigmoid of each chosen logit, not renormalised; a correction bias only selects."""

    def raw(self, logits_TE: Tensor, experts_TK: Tensor) -> Tensor:
        return logits_TE.gather(-1, experts_TK).sigmoid()

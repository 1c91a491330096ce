"""Softmax over the chosen experts."""

from __future__ import annotations

from torch import Tensor

from lm_eval_moecache.model.weighting.base import WeightingRule


class SoftmaxChosen(WeightingRule):
    """Softmax over the chosen experts (GPT-OSS, Granite; Mixtral and Qwen3-MoE renormalise
    softmax-then-top-k, which is the same)."""

    def raw(self, logits_TE: Tensor, experts_TK: Tensor) -> Tensor:
        return logits_TE.gather(-1, experts_TK).softmax(-1)

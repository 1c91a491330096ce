"""The weights that model families give to a chosen set of experts: a table of rules.

Shapes: T tokens, E experts, K experts per token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from lm_eval_moecache.model.gate import value_of


class WeightingRule(ABC):
    """Turns logits [T, E] and chosen experts [T, K] into weights [T, K].

    A new one is a subclass here and an entry of `RULES`. Which rule a router follows is found by
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


class Sigmoid(WeightingRule):
    """Sigmoid of each chosen logit, not renormalised; a correction bias only selects."""

    def raw(self, logits_TE: Tensor, experts_TK: Tensor) -> Tensor:
        return logits_TE.gather(-1, experts_TK).sigmoid()


class SigmoidNormed(WeightingRule):
    """Sigmoid of the chosen logits, renormalised to sum to one (DeepSeek-V3, GLM)."""

    def raw(self, logits_TE: Tensor, experts_TK: Tensor) -> Tensor:
        chosen = logits_TE.gather(-1, experts_TK).sigmoid()
        return chosen / (chosen.sum(-1, keepdim=True) + 1e-20)


class SoftmaxAll(WeightingRule):
    """Softmax over all experts, not renormalised (OLMoE, DeepSeek-V2, Qwen2-MoE)."""

    def raw(self, logits_TE: Tensor, experts_TK: Tensor) -> Tensor:
        return logits_TE.softmax(-1).gather(-1, experts_TK)


class SoftmaxChosen(WeightingRule):
    """Softmax over the chosen experts (GPT-OSS, Granite; Mixtral and Qwen3-MoE renormalise
    softmax-then-top-k, which is the same)."""

    def raw(self, logits_TE: Tensor, experts_TK: Tensor) -> Tensor:
        return logits_TE.gather(-1, experts_TK).softmax(-1)


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


class SparseMixer(WeightingRule):
    """Phi-MoE: each expert in turn against those not yet taken that come close to it."""

    def __init__(self, jitter_eps: float) -> None:
        super().__init__()
        self._jitter_eps = jitter_eps

    @classmethod
    def of(cls, router: nn.Module) -> SparseMixer | None:
        jitter_eps = getattr(router, "router_jitter_noise", None)
        return cls(jitter_eps) if isinstance(jitter_eps, float) else None

    def raw(self, logits_TE: Tensor, experts_TK: Tensor) -> Tensor:
        left = logits_TE.clone()
        weights = []
        for k in range(experts_TK.shape[-1]):
            chosen = experts_TK[:, k : k + 1]
            own = left.gather(-1, chosen)
            factor = torch.maximum(logits_TE.abs(), own)
            far = ((own - logits_TE) / factor) > 2 * self._jitter_eps
            weights.append(left.masked_fill(far, float("-inf")).softmax(-1).gather(-1, chosen))
            left = left.scatter(-1, chosen, float("-inf"))
        return torch.cat(weights, -1)


class SqrtSoftplusNormed(WeightingRule):
    """Square root of softplus of the chosen logits, renormalised to sum to one (DeepSeek-V4)."""

    def raw(self, logits_TE: Tensor, experts_TK: Tensor) -> Tensor:
        chosen = nn.functional.softplus(logits_TE.gather(-1, experts_TK)).sqrt()
        return chosen / (chosen.sum(-1, keepdim=True) + 1e-20)


RULES: list[type[WeightingRule]] = [
    Sigmoid,
    SigmoidNormed,
    SoftmaxAll,
    SoftmaxChosen,
    SoftmaxChosenScaled,
    SparseMixer,
    SqrtSoftplusNormed,
]
"""Tried in this order."""

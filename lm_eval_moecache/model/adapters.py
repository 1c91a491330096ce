"""Router adapters: the weights a model family gives to a chosen set of experts.

A changed selection is weighted from the router's unmodified logits by the family's own rule.
There are five rules among the models of transformers' experts interface; which one a router
follows is found by asking it, so that no list of model names has to be kept.

Shapes: T tokens, E experts, K experts per token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lm_eval_moecache.records.arrays import FloatArray, IntArray, Weigh


class WeightingRule(ABC):
    """Turns logits [T, E] and chosen experts [T, K] into weights [T, K]."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    @abstractmethod
    def raw(self, logits_TE: Tensor, experts_TK: Tensor) -> Tensor:
        """Return float32 weights before the family's constant scale."""

    def __call__(self, logits_TE: Tensor, experts_TK: Tensor, dtype: torch.dtype) -> Tensor:
        return (self.raw(logits_TE.float(), experts_TK) * self.scale).to(dtype)


class SoftmaxAll(WeightingRule):
    """Softmax over all experts, not renormalised (OLMoE, DeepSeek-V2, Qwen2-MoE)."""

    def raw(self, logits_TE: Tensor, experts_TK: Tensor) -> Tensor:
        return logits_TE.softmax(-1).gather(-1, experts_TK)


class SoftmaxChosen(WeightingRule):
    """Softmax over the chosen experts (GPT-OSS, Granite; Mixtral and Qwen3-MoE renormalise
    softmax-then-top-k, which is the same)."""

    def raw(self, logits_TE: Tensor, experts_TK: Tensor) -> Tensor:
        return logits_TE.gather(-1, experts_TK).softmax(-1)


class Sigmoid(WeightingRule):
    """Sigmoid of each chosen logit, not renormalised; a correction bias only selects."""

    def raw(self, logits_TE: Tensor, experts_TK: Tensor) -> Tensor:
        return logits_TE.gather(-1, experts_TK).sigmoid()


class SigmoidNormed(WeightingRule):
    """Sigmoid of the chosen logits, renormalised to sum to one (DeepSeek-V3, GLM)."""

    def raw(self, logits_TE: Tensor, experts_TK: Tensor) -> Tensor:
        chosen = logits_TE.gather(-1, experts_TK).sigmoid()
        return chosen / (chosen.sum(-1, keepdim=True) + 1e-20)


class SparseMixer(WeightingRule):
    """Phi-MoE: each expert in turn against those not yet taken that come close to it."""

    def __init__(self, jitter_eps: float) -> None:
        super().__init__()
        self._jitter_eps = jitter_eps

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


def detect_rule(router: nn.Module, hidden_dim: int) -> WeightingRule | None:
    """Find the rule that reproduces this router's weights on random input, or None."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(32, hidden_dim, generator=generator)
    try:
        # Logits spread about 1 keep softmax from underflow and sigmoids from their flat ends, where
        # rules could not be told apart. A constant input scale changes the spread, not the rule.
        spread = float(_ask(router, hidden)[0].float().std())
        output = _ask(router, hidden / max(spread, 1e-6))
    except TypeError:
        return None
    logits_TE, weights_TK, experts_TK = (t.float() for t in output[:3])
    experts_TK = experts_TK.long()
    rules: list[WeightingRule] = [SoftmaxAll(), SoftmaxChosen(), SigmoidNormed(), Sigmoid()]
    jitter_eps = getattr(router, "router_jitter_noise", None)
    if isinstance(jitter_eps, float):
        rules.insert(0, SparseMixer(jitter_eps))
    for rule in rules:
        ratio = weights_TK / rule.raw(logits_TE, experts_TK)
        scale = float(ratio.median())
        # bf16 keeps 8 bits of a weight, hence the tolerance.
        if torch.allclose(ratio, torch.full_like(ratio, scale), rtol=0.02):
            rule.scale = _exact_scale(router, scale)
            return rule
    return None


def find_rules(routers: Sequence[nn.Module]) -> list[WeightingRule | None]:
    """Find how each router weighs a selection. Raises ValueError where one's rule is not known."""
    rules = [detect_rule(router, next(router.parameters()).shape[-1]) for router in routers]
    if None in rules:
        router = type(routers[rules.index(None)]).__name__
        raise ValueError(
            f"routing, miss: the router {router} weighs its experts by a rule that is not "
            "known, so a changed selection cannot be weighted. Allowed for this model: "
            "routing=standard with miss=fetch."
        )
    return rules


def in_numpy(rule: WeightingRule) -> Weigh:
    """Return a family's rule as algorithms see it."""

    def weigh(logits: FloatArray, experts: IntArray) -> FloatArray:
        weights = rule(torch.from_numpy(logits), torch.from_numpy(experts), torch.float32)
        found: FloatArray = weights.numpy()
        return found

    return weigh


def _ask(router: nn.Module, hidden: Tensor) -> Any:
    parameter = next(router.parameters())
    with torch.no_grad():
        return router.forward(hidden.to(parameter.device, parameter.dtype))


def _exact_scale(router: nn.Module, seen: float) -> float:
    """Return the router's own scaling factor where that explains what was seen, else this."""
    own = getattr(router, "routed_scaling_factor", None)
    if isinstance(own, int | float) and abs(seen / own - 1) < 0.02:
        return float(own)
    return 1.0 if abs(seen - 1) < 0.02 else float(f"{seen:.4g}")

"""Phi-MoE's sparse mixer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lm_eval_moecache.model.weighting.base import WeightingRule


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

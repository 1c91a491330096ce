"""Square root of softplus of the chosen logits, renormalised."""

from __future__ import annotations

from torch import Tensor, nn

from lm_eval_moecache.model.weighting.base import WeightingRule


class SqrtSoftplusNormed(WeightingRule):
    """Square root of softplus of the chosen logits, renormalised to sum to one (DeepSeek-V4)."""

    def raw(self, logits_TE: Tensor, experts_TK: Tensor) -> Tensor:
        chosen = nn.functional.softplus(logits_TE.gather(-1, experts_TK)).sqrt()
        return chosen / (chosen.sum(-1, keepdim=True) + 1e-20)

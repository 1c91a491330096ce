"""Muon: momentum whose update is orthogonalised, for all weight matrices of a stack at once.

Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon/), with the update scaled to the size
of an AdamW update as in Liu et al. 2025 (arXiv 2502.16982, section 2.2). It needs far fewer tokens
here than AdamW, and tokens are what two CPU cores are short of.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from lm_eval_moecache.tiny.exchange import all_sum

ITERATIONS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalise(stack: Tensor) -> Tensor:
    """Newton-Schulz on each matrix of a stack (number, rows, columns)."""
    wide = stack if stack.shape[-2] <= stack.shape[-1] else stack.mT
    x: Tensor = wide / (wide.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if wide is stack else x.mT


class Muon(torch.optim.Optimizer):
    """For parameters of two dimensions, or three where the first one counts matrices.

    Each of `workers` orthogonalises its share of the parameters and then all exchange them.
    """

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter],
        *,
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.05,
        rank: int = 0,
        workers: int = 1,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.rank, self.workers = rank, workers

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            weights = group["params"]
            updates = all_sum([self._update(i, w, group) for i, w in enumerate(weights)])
            for weight, update in zip(weights, updates, strict=True):
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.sub_(update, alpha=group["lr"] * 0.2 * max(weight.shape[-2:]) ** 0.5)

    def _update(self, index: int, weight: Tensor, group: dict[str, float]) -> Tensor:
        state = self.state[weight]
        if not state:
            state["velocity"] = torch.zeros_like(weight)
        velocity: Tensor = state["velocity"]
        grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        velocity.lerp_(grad, 1 - group["momentum"])
        if index % self.workers != self.rank:
            return torch.zeros_like(weight)
        blend = grad.lerp(velocity, group["momentum"])
        return orthogonalise(blend.view(-1, *blend.shape[-2:])).reshape(weight.shape)

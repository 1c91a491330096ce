"""Muon: momentum with orthogonalised updates, for all weight matrices of a stack at once.

Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon/), with the update scaled to the size
of an AdamW update as in Liu et al. 2025 (arXiv 2502.16982, section 2.2). It needs far fewer tokens
than AdamW here, and two CPU cores process few.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

ITERATIONS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalise(stack: Tensor) -> Tensor:
    """Newton-Schulz iteration on each matrix of a stack (number, rows, columns)."""
    wide = stack if stack.shape[-2] <= stack.shape[-1] else stack.mT
    x: Tensor = wide / (wide.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide is stack else x.mT


class Muon(torch.optim.Optimizer):
    """For parameters of two dimensions, or three if the first indexes matrices."""

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter],
        *,
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.05,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                self._update(weight, group)

    def _update(self, weight: Tensor, group: dict[str, float]) -> None:
        state = self.state[weight]
        if not state:
            state["velocity"] = torch.zeros_like(weight)
        velocity: Tensor = state["velocity"]
        velocity.lerp_(weight.grad, 1 - group["momentum"])
        blend = weight.grad.lerp(velocity, group["momentum"])
        update = orthogonalise(blend.view(-1, *blend.shape[-2:])).reshape(weight.shape)
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.sub_(update, alpha=group["lr"] * 0.2 * max(weight.shape[-2:]) ** 0.5)

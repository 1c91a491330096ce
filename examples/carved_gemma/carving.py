"""Cuts trained FFNs into experts, and fits routers and output matrices without gradients.

Shapes: T tokens, D hidden size, I neurons of an FFN, S shared neurons, E routed experts, K experts
per token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """How an FFN is cut: `num_shared` of its `num_groups` groups run for every token."""

    num_groups: int = 32
    num_shared: int = 4
    top: int = 16
    linear_path: bool = True

    @property
    def num_experts(self) -> int:
        return self.num_groups - self.num_shared

    @property
    def top_k(self) -> int:
        return self.top - self.num_shared


class MaskedFFN(nn.Module):
    """A carved FFN in dense form: all neurons are computed, and those not chosen times zero.

    The same function as CarvedMLP and faster to train on a CPU. Neurons are ordered by group, the
    shared ones first.
    """

    def __init__(self, mlp: Any, shape: Shape, order: Tensor) -> None:
        super().__init__()
        self.shape = shape
        self.gate_proj = nn.Parameter(mlp.gate_proj.weight.detach()[order])
        self.up_proj = nn.Parameter(mlp.up_proj.weight.detach()[order])
        self.down_proj = nn.Parameter(mlp.down_proj.weight.detach()[:, order])
        size = self.down_proj.shape[0]
        self.router = nn.Linear(size, shape.num_experts)
        self.linear_path = nn.Linear(size, size) if shape.linear_path else None
        if self.linear_path is not None:
            nn.init.zeros_(self.linear_path.weight)
            nn.init.zeros_(self.linear_path.bias)
        self.act_fn = mlp.act_fn
        self.choose: Callable[[Tensor, Tensor], Tensor] | None = None
        """Replaces the router: (inputs, neurons [T, I]) -> weights [T, E], 0 where not chosen."""

    @property
    def width(self) -> int:
        """Neurons of a group."""
        return self.gate_proj.shape[0] // self.shape.num_groups

    def neurons(self, x: Tensor) -> Tensor:
        gate = nn.functional.linear(x, self.gate_proj)
        return self.act_fn(gate) * nn.functional.linear(x, self.up_proj)

    def weights(self, x: Tensor) -> Tensor:
        """Return each token's weights [T, E], 0 where not chosen."""
        logits = self.router(x)
        chosen = logits.topk(self.shape.top_k, -1)
        return torch.zeros_like(logits).scatter(-1, chosen.indices, chosen.values.sigmoid())

    def masked(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        """Return neurons [T, I] times the weight of their expert."""
        hidden = self.neurons(x) if hidden is None else hidden
        weights = self.weights(x) if self.choose is None else self.choose(x, hidden)
        shared = self.width * self.shape.num_shared
        routed = hidden[:, shared:] * weights.repeat_interleave(self.width, -1)
        return torch.cat([hidden[:, :shared], routed], -1)

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        output = nn.functional.linear(self.masked(x), self.down_proj)
        if self.linear_path is not None:
            output = output + self.linear_path(x)
        return output.reshape(hidden_states.shape)


def contributions(hidden: Tensor, down_proj: Tensor) -> Tensor:
    """Return the size of what each neuron adds to the output [T, I]."""
    return hidden.abs() * down_proj.norm(dim=0)


def energies(hidden: Tensor, down_proj: Tensor, num_groups: int) -> Tensor:
    """Return the size of what each group of neighbouring neurons adds, about [T, groups]."""
    squares = contributions(hidden, down_proj).square()
    return squares.reshape(len(hidden), num_groups, -1).sum(-1).sqrt()


def in_groups(sizes: Tensor, shape: Shape, num_rounds: int = 6) -> Tensor:
    """Order neurons by group: the largest contributors are shared, the others grouped by use.

    Neurons that contribute to the same tokens come into one group (balanced k-means of their
    contributions' directions). `sizes` is [T, I]; the order is a permutation of I.
    """
    width = sizes.shape[1] // shape.num_groups
    by_size = sizes.square().mean(0).argsort(descending=True)
    shared, rest = by_size.split([width * shape.num_shared, width * shape.num_experts])
    directions = nn.functional.normalize(sizes[:, rest].T - sizes[:, rest].mean(0)[:, None])
    draws = torch.Generator().manual_seed(0)
    centres = directions[torch.randperm(len(rest), generator=draws)[: shape.num_experts]]
    groups = np.zeros(len(rest), np.int64)
    for _ in range(num_rounds):
        cosines = (directions @ centres.T).repeat_interleave(width, 1).numpy()
        _, places = linear_sum_assignment(cosines, maximize=True)
        if (places // width == groups).all():
            break
        groups = places // width
        centres = torch.stack([directions[groups == e].mean(0) for e in range(shape.num_experts)])
        centres = nn.functional.normalize(centres)
    return torch.cat([shared, rest[torch.from_numpy(groups.argsort(kind="stable"))]])


def at_random(num_neurons: int) -> Tensor:
    """Order neurons at random: what `in_groups` is compared with."""
    return torch.randperm(num_neurons, generator=torch.Generator().manual_seed(0))


def by_energy(ffn: MaskedFFN) -> Callable[[Tensor, Tensor], Tensor]:
    """Choose the groups that add most, which a router cannot know: the bound of any router."""

    def choose(_: Tensor, hidden: Tensor) -> Tensor:
        routed = energies(hidden, ffn.down_proj, ffn.shape.num_groups)[:, ffn.shape.num_shared :]
        chosen = routed.topk(ffn.shape.top_k, -1).indices
        return torch.zeros_like(routed).scatter(-1, chosen, 1.0)

    return choose


def fit_router(ffn: MaskedFFN, x: Tensor, hidden: Tensor, num_steps: int = 300) -> float:
    """Fit the router to foretell which experts add most; returns the share it finds.

    A logistic regression for each expert, on standardised inputs. The share is of the last tenth
    of the tokens, which are not fitted.
    """
    targets = by_energy(ffn)(x, hidden)
    # A norm may put a feature to nought.
    mean, std = x.mean(0), x.std(0).clamp_min(1e-6)
    inputs = (x - mean) / std
    weight = torch.zeros(targets.shape[1], x.shape[1], requires_grad=True)
    share = ffn.shape.top_k / ffn.shape.num_experts
    bias = torch.full((targets.shape[1],), float(np.log(share / (1 - share))), requires_grad=True)
    optimizer = torch.optim.AdamW([weight, bias], lr=1e-2, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, num_steps)
    num_fitted = len(x) * 9 // 10
    draws = torch.Generator().manual_seed(0)
    with torch.enable_grad():
        for _ in range(num_steps):
            rows = torch.randint(num_fitted, (2048,), generator=draws)
            logits = nn.functional.linear(inputs[rows], weight, bias)
            loss = nn.functional.binary_cross_entropy_with_logits(logits, targets[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    with torch.no_grad():
        ffn.router.weight.copy_(weight / std)
        ffn.router.bias.copy_(bias - (weight / std) @ mean)
        found = (ffn.weights(x[num_fitted:]) > 0) & (targets[num_fitted:] > 0)
        return float(found.sum()) / float(targets[num_fitted:].sum())


def refit(
    ffn: MaskedFFN, x: Tensor, hidden: Tensor, target: Tensor, ridges: tuple[float, ...]
) -> tuple[float, float]:
    """Fit the output matrix and the linear path to the whole FFN's output by least squares.

    Each token counts alike, whatever the size of its output, as the norm behind the FFN makes them.
    The ridge pulls towards the weights as they were; the best of `ridges` on the last tenth of the
    tokens is taken. Returns the share of the output's variance missing there, before and after.
    """
    features = ffn.masked(x, hidden)
    num_neurons = features.shape[1]
    weights = ffn.down_proj.T
    if ffn.linear_path is not None:
        features = torch.cat([features, x, torch.ones(len(x), 1)], 1)
        path = torch.cat([ffn.linear_path.weight.T, ffn.linear_path.bias[None]])
        weights = torch.cat([weights, path])
    scale = target.square().mean(1, keepdim=True).rsqrt()
    features, target = features * scale, target * scale
    num_fitted = len(x) * 9 // 10
    held_out, expected = features[num_fitted:], target[num_fitted:]
    features, target = features[:num_fitted], target[:num_fitted]
    gram = (features.T @ features).double()
    moment = (features.T @ (target - features @ weights)).double()
    diagonal = gram.diagonal()

    def missing(solution: Tensor) -> float:
        return float((held_out @ solution - expected).square().mean())

    before = missing(weights)
    tried = list[tuple[float, Tensor]]()
    for ridge in ridges:
        pull = ridge * (diagonal + diagonal.mean())
        factor = torch.linalg.cholesky(gram + pull.diag())
        solution = weights + torch.cholesky_solve(moment, factor).float()
        tried.append((missing(solution), solution))
    after, solution = min(tried, key=lambda pair: pair[0])
    with torch.no_grad():
        ffn.down_proj.copy_(solution[:num_neurons].T)
        if ffn.linear_path is not None:
            ffn.linear_path.weight.copy_(solution[num_neurons:-1].T)
            ffn.linear_path.bias.copy_(solution[-1])
    return before, after

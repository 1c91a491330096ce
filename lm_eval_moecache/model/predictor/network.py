"""Applies a trained predictor to router inputs, and trains that of one layer.

Trained as CommitMoE's sections 4.2 and 5.1 say. Shapes: T tokens, N samples, D hidden size, E
experts.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from lm_eval_moecache.algorithms.prefetch.base import PrefetchAlgorithm
from lm_eval_moecache.model.predictor.samples import Pairs, top_k
from lm_eval_moecache.records.artifact import Artifact
from lm_eval_moecache.records.predictor import (
    HIDDEN_FACTOR,
    array_name,
    hidden_size,
    num_stages,
)

Stages = list[tuple[Tensor, Tensor]]


class PredictorNetwork:
    """The predictors of all layers. They compute in float32, whatever the model computes in."""

    def __init__(self, artifact: Artifact) -> None:
        self.hidden_size = hidden_size(artifact)
        self._layers: list[Stages] = []
        for layer in range(artifact.num_layers):
            stages = range(num_stages(layer, artifact.num_layers))
            self._layers.append(
                [
                    (_get(artifact, layer, s, "weight"), _get(artifact, layer, s, "bias"))
                    for s in stages
                ]
            )

    @torch.no_grad()
    def __call__(self, layer: int, hidden_TD: Tensor) -> Tensor:
        """Return logits [T, E] for the layer after `layer` (the first one after the last)."""
        stages = self._layers[layer]
        if stages[0][0].device != hidden_TD.device:
            stages = [(w.to(hidden_TD.device), b.to(hidden_TD.device)) for w, b in stages]
            self._layers[layer] = stages
        values = hidden_TD.float()
        for place, (weight, bias) in enumerate(stages):
            values = nn.functional.linear(values.relu() if place else values, weight, bias)
        return values


def new_network(hidden: int, num_experts: int, stages: int) -> nn.Sequential:
    """Build an untrained predictor of one layer, drawn from torch's own generator."""
    if stages == 1:
        return nn.Sequential(nn.Linear(hidden, num_experts))
    wide = HIDDEN_FACTOR * hidden
    return nn.Sequential(nn.Linear(hidden, wide), nn.ReLU(), nn.Linear(wide, num_experts))


def network_of(prefetch: PrefetchAlgorithm, width: int) -> PredictorNetwork | None:
    """Make the network of a prefetcher that uses one; refuse one for inputs of another width."""
    if not prefetch.uses_predictor or prefetch.artifact is None:
        return None
    network = PredictorNetwork(prefetch.artifact)
    if network.hidden_size != width:
        raise ValueError(
            f"prefetch.profile={prefetch.artifact.path!r} takes hidden states of "
            f"{network.hidden_size} numbers, but the routers of {prefetch.geometry.model!r} take "
            f"{width}. Make one for this model with `moecache profile predictor`."
        )
    return network


def _get(artifact: Artifact, layer: int, stage: int, what: str) -> Tensor:
    return torch.from_numpy(artifact.arrays[array_name(layer, stage, what)]).float()


_CHUNK = 65536


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """How to train. The paper gives no batch size, no patience and no most number of epochs."""

    loss: str = "kl"
    learning_rate: float = 5e-5
    halve_every: int = 5
    batch_size: int = 32
    max_epochs: int = 30
    patience: int = 5
    seed: int = 42


@dataclass(frozen=True, slots=True)
class Trained:
    """The arrays of one layer's stages, (weight, bias) each, and how the training went."""

    stages: list[tuple[npt.NDArray[np.float16], npt.NDArray[np.float16]]]
    epochs: int
    best_epoch: int
    train_loss: float
    held_out_loss: float


def train(
    pairs: Pairs, held_out: Pairs, *, stages: int, num_chosen: int, recipe: Recipe, layer: int
) -> Trained:
    """Train one layer's predictor; the same samples, recipe and layer give the same arrays.

    Adam with its learning rate halved every few epochs; the epoch with the least held-out loss
    is kept, and training stops when `patience` epochs have brought nothing better.
    """
    torch.manual_seed(recipe.seed * 1009 + layer)
    order = torch.Generator().manual_seed(recipe.seed * 1009 + layer)
    network = new_network(pairs.inputs_ND.shape[1], pairs.targets_NE.shape[1], stages)
    inputs, targets = _tensors(pairs, recipe.loss, num_chosen)
    judged = _tensors(held_out, recipe.loss, num_chosen)
    adam = torch.optim.Adam(network.parameters(), lr=recipe.learning_rate)
    halving = torch.optim.lr_scheduler.StepLR(adam, step_size=recipe.halve_every, gamma=0.5)
    best, best_epoch, epoch = float("inf"), 0, 0
    kept: dict[str, Any] = copy.deepcopy(network.state_dict())
    train_loss = kept_train_loss = float("nan")
    for epoch in range(1, recipe.max_epochs + 1):
        train_loss = _run_epoch(network, adam, inputs, targets, recipe, order)
        halving.step()
        loss = _mean_loss(network, *judged, recipe.loss)
        if loss < best:
            best, best_epoch, kept_train_loss = loss, epoch, train_loss
            kept = copy.deepcopy(network.state_dict())
        elif epoch - best_epoch >= recipe.patience:
            break
    network.load_state_dict(kept)
    linears = [module for module in network if isinstance(module, nn.Linear)]
    arrays = [(_half(linear.weight), _half(linear.bias)) for linear in linears]
    return Trained(arrays, epoch, best_epoch, kept_train_loss, best)


def _run_epoch(
    network: nn.Sequential,
    adam: torch.optim.Optimizer,
    inputs: Tensor,
    targets: Tensor,
    recipe: Recipe,
    order: torch.Generator,
) -> float:
    total = 0.0
    shuffled = torch.randperm(len(inputs), generator=order)
    for rows in torch.split(shuffled, recipe.batch_size):
        loss = _loss(network(inputs[rows].float()), targets[rows], recipe.loss)
        adam.zero_grad()
        torch.autograd.backward(loss)
        adam.step()
        total += float(loss.detach()) * len(rows)
    return total / len(inputs)


def _tensors(pairs: Pairs, loss: str, num_chosen: int) -> tuple[Tensor, Tensor]:
    """Return inputs, and as targets the distribution (`kl`) or the set (`bce`) of the router."""
    inputs = torch.from_numpy(pairs.inputs_ND)
    if loss == "kl":
        return inputs, torch.from_numpy(pairs.targets_NE).float().softmax(-1)
    chosen = np.zeros(pairs.targets_NE.shape, dtype=np.float32)
    np.put_along_axis(chosen, top_k(pairs.targets_NE, num_chosen), 1.0, axis=-1)
    return inputs, torch.from_numpy(chosen)


def _loss(predicted: Tensor, targets: Tensor, loss: str) -> Tensor:
    """Return eq. 4, or the binary cross-entropy of the chosen experts."""
    if loss == "kl":
        return nn.functional.kl_div(predicted.log_softmax(-1), targets, reduction="batchmean")
    return nn.functional.binary_cross_entropy_with_logits(predicted, targets)


@torch.no_grad()
def _mean_loss(network: nn.Sequential, inputs: Tensor, targets: Tensor, loss: str) -> float:
    total = 0.0
    for start in range(0, len(inputs), _CHUNK):
        rows = slice(start, start + _CHUNK)
        part = _loss(network(inputs[rows].float()), targets[rows], loss)
        total += float(part) * len(inputs[rows])
    return total / len(inputs)


def _half(values: Tensor) -> npt.NDArray[np.float16]:
    return values.detach().to(torch.float16).numpy()

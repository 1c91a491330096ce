"""Applies a trained predictor to router inputs.

Shapes: T tokens, D hidden size, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lm_eval_moecache.algorithms.prefetch.base import PrefetchAlgorithm
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

"""Trains a network until its loss on what was held out falls no more."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch import nn


class Best(NamedTuple):
    """The epoch with the least held-out loss, of all `epochs` that were run."""

    epochs: int
    epoch: int
    train_loss: float
    held_out_loss: float


def fit(
    network: nn.Module,
    train_epoch: Callable[[], float],
    held_out_loss: Callable[[], float],
    epochs: Iterable[object],
    patience: int,
) -> Best:
    """Train until `patience` epochs have brought nothing better; leave the best epoch's weights.

    `train_epoch` returns the loss that it saw on the way.
    """
    kept: dict[str, Any] = copy.deepcopy(network.state_dict())
    best = Best(0, 0, float("nan"), float("inf"))
    for epoch, _ in enumerate(epochs, start=1):
        train_loss, loss = train_epoch(), held_out_loss()
        best = best._replace(epochs=epoch)
        if loss < best.held_out_loss:
            best = Best(epoch, epoch, train_loss, loss)
            kept = copy.deepcopy(network.state_dict())
        elif epoch - best.epoch >= patience:
            break
    network.load_state_dict(kept)
    return best

"""What routers chose in some passes, from where the model computes to where the cache is served."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from lm_eval_moecache.records.arrays import FloatArray, IntArray
from lm_eval_moecache.records.event import NO_PREDICTIONS, UNSEEN_SCORES


@dataclass(frozen=True)
class Batch:
    """The events of some passes of one phase, in the order passes, layers, rows.

    A row is a run of its own. Arrays are by token, event after event. Those that no algorithm of
    the policy uses have no rows.
    """

    phase: str
    num_layers: int
    experts: IntArray
    """[tokens, top_k] in router order, heaviest first."""
    bounds: IntArray | None = None
    """Event e's tokens are rows `bounds[e]` to `bounds[e + 1]`; None: a token an event."""
    weights: FloatArray = field(default_factory=lambda: UNSEEN_SCORES)
    """[tokens, top_k]"""
    logits: FloatArray = field(default_factory=lambda: UNSEEN_SCORES)
    """[tokens, experts], unmodified."""
    targets: Sequence[Sequence[int]] = ()
    """By layer, the layers that it predicts; empty where none predicts any."""
    predicted: FloatArray = field(default_factory=lambda: UNSEEN_SCORES)
    """[predictions, experts]: each token's in turn, one for each target of its layer."""
    positions: Sequence[IntArray] | None = None
    """By pass and row, its tokens' positions in their sequences, where passes are charged by them.
    """
    num_rows: int = 1
    first_layer: int = 0
    """The layer of the first event: not 0 where a layer is served for all tokens of a text."""

    @property
    def num_events(self) -> int:
        return len(self.experts) if self.bounds is None else len(self.bounds) - 1

    @property
    def num_passes(self) -> int:
        return self.num_events // (self.num_layers * self.num_rows)

    @cached_property
    def sizes(self) -> IntArray:
        """How many tokens each event has."""
        if self.bounds is None:
            return np.ones(self.num_events, np.int64)
        return np.diff(self.bounds)

    @property
    def tokens_of_passes(self) -> list[int]:
        """How many tokens each pass of a single row has: in its first layer, of which some models
        run the last one for the last token alone."""
        tokens: list[int] = self.sizes[:: self.num_layers].tolist()
        return tokens

    def tokens_at(self, event: int) -> slice:
        """Return the rows of an event's tokens."""
        if self.bounds is None:
            return slice(event, event + 1)
        return slice(int(self.bounds[event]), int(self.bounds[event + 1]))

    def at(self, event: int) -> Batch:
        """Return an event of passes of a single row as a batch of its own."""
        own, layer = self.tokens_at(event), event % self.num_layers
        ahead = slice(*self.prediction_bounds[event : event + 2].tolist())
        return replace(
            self,
            num_layers=1,
            first_layer=self.first_layer + layer,
            experts=self.experts[own],
            bounds=np.array([0, own.stop - own.start]),
            weights=self.weights[own],
            logits=self.logits[own],
            targets=self.targets[layer : layer + 1],
            predicted=self.predicted[ahead],
        )

    def predicted_at(self, event: int | None = None) -> Mapping[int, FloatArray]:
        """Return what an event predicts: target layer -> logits [tokens, experts].

        Without its number, all rows of a batch of one event each.
        """
        if not len(self.targets):
            return NO_PREDICTIONS
        targets = self.targets[(event or 0) // self.num_rows % self.num_layers]
        if not len(self.predicted):
            return dict.fromkeys(targets, UNSEEN_SCORES)
        own = self.predicted
        if event is not None:
            own = own[slice(*self.prediction_bounds[event : event + 2].tolist())]
        by_token = own.reshape(-1, len(targets), own.shape[1]) if targets else own
        return {target: by_token[:, place] for place, target in enumerate(targets)}

    @cached_property
    def prediction_bounds(self) -> IntArray:
        """Bounds of each event's predictions [events + 1]."""
        if not len(self.targets):
            return np.zeros(self.num_events + 1, np.int64)
        if self.num_layers == 1:
            bounds = np.arange(self.num_events + 1) if self.bounds is None else self.bounds
            return bounds * len(self.targets[0])
        each = np.repeat([*map(len, self.targets)], self.num_rows)
        return np.append(0, np.cumsum(np.tile(each, self.num_passes) * self.sizes))

    def row(self, place: int) -> Batch:
        """Return the passes of one row."""
        if self.num_rows == 1:
            return self
        rows = np.arange(self.num_events) % self.num_rows
        own = np.repeat(rows, self.sizes) == place
        sizes, predicted = self.sizes[place :: self.num_rows], self.predicted
        if len(predicted):
            predicted = predicted[np.repeat(rows, np.diff(self.prediction_bounds)) == place]
        return replace(
            self,
            experts=self.experts[own],
            bounds=None if (sizes == 1).all() else np.append(0, np.cumsum(sizes)),
            weights=self.weights[own] if len(self.weights) else self.weights,
            logits=self.logits[own] if len(self.logits) else self.logits,
            predicted=predicted,
            positions=None if self.positions is None else self.positions[place :: self.num_rows],
            num_rows=1,
        )


def joined(passes: Sequence[Batch]) -> Batch:
    """Return passes of one row and phase as one batch."""
    if len(passes) == 1:
        return passes[0]
    sizes = np.concatenate([each.sizes for each in passes])
    positions = [place for each in passes for place in each.positions or ()]
    arrays: dict[str, Any] = {
        name: np.concatenate([getattr(each, name) for each in passes])
        for name in ("experts", "weights", "logits", "predicted")
    }
    return replace(
        passes[0],
        bounds=None if (sizes == 1).all() else np.append(0, np.cumsum(sizes)),
        positions=positions if passes[0].positions is not None else None,
        **arrays,
    )

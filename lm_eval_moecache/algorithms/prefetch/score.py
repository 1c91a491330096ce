"""Score-based prefetch: every expert above a percentile of the predicted gate scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np

from lm_eval_moecache.algorithms.prefetch.base import PrefetchAlgorithm, by_mass, rows_by_mass
from lm_eval_moecache.records.arrays import FloatArray, IntArray, softmax
from lm_eval_moecache.records.event import Event
from lm_eval_moecache.records.geometry import Geometry

_BINS = 4096


class Score(PrefetchAlgorithm):
    """Proposes the next layer's experts whose gate score exceeds a percentile of the scores.

    SpecMD section 3.1.4 after Zhu et al. 2025: "all experts above a configurable percentile
    threshold (the default is 80th percentile)" of the softmax scores. The paper does not say
    over what the percentile is taken; that it adapts the number of experts to the distribution
    rules out one token's experts alone (80% of 64 would always leave 13).
    `scope=history`: the percentile of all scores predicted so far for that layer;
    `scope=token`: of the one token's scores, a fixed share. Cost: one gate, charged to the clock.

    The history is a histogram of bins of 1/4096, and the percentile is rounded down to a bin. That
    is fine beside the usual scores, but coarse where most are tiny: with a router so sure of its
    choice, or so many experts, that the percentile lies below 1/4096, the bar is 0 and every expert
    is proposed. `scope=token` has no such limit.
    """

    source: ClassVar[str] = "SpecMD section 3.1.4; Zhu et al. 2025"
    depth: int = 1

    def __init__(
        self,
        geometry: Geometry,
        *,
        seed: int = 0,
        percentile: float = 80.0,
        scope: Literal["history", "token"] = "history",
    ) -> None:
        super().__init__(geometry, seed=seed)
        if not 0 <= percentile <= 100:
            raise ValueError(f"prefetch.percentile={percentile} must lie between 0 and 100.")
        self.percentile = percentile
        self.scope = scope
        self._history = _History(percentile / 100, geometry.num_layers)

    def propose(self, event: Event) -> Sequence[int]:
        keys: list[int] = []
        for layer, logits in event.predicted.items():
            scores = softmax(logits)
            if self.scope == "token":
                bar: FloatArray | float = np.percentile(
                    scores, self.percentile, axis=-1, keepdims=True
                )
            else:
                bar = self._history.add(layer, scores)
            keys += by_mass(layer, scores > bar, scores)
        return keys

    def propose_arrays(
        self, layers: Sequence[int], logits: FloatArray
    ) -> tuple[IntArray, IntArray]:
        scores = softmax(logits)
        if self.scope == "token":
            bars = np.percentile(scores, self.percentile, axis=-1)
        else:
            bars = self._history.add_rows(layers, scores)
        return rows_by_mass(layers, scores > bars[:, None], scores)


class _History:
    """Each layer's scores so far, counted in bins, and a pointer to the bin of their quantile.

    A new event moves the quantile a little, so stepping the pointer costs less than summing bins.
    """

    def __init__(self, share: float, num_layers: int) -> None:
        self._share = share
        # The last bin counts the scores of exactly 1, which belong to the one before.
        self._counts = np.zeros((num_layers, _BINS + 1), dtype=np.int64)
        self._flat = self._counts.ravel()
        self._total = [0] * num_layers
        self._bin = [0] * num_layers
        self._below = [0] * num_layers
        """How many scores lie in bins before `_bin`."""

    def add(self, layer: int, scores: FloatArray) -> float:
        """Take in an event's scores; return the first bin up to which the share of all lies."""
        bins = (scores.ravel() * _BINS).astype(np.int64)
        np.add.at(self._counts[layer], bins, 1)
        return self._step(layer, bins.size, int(np.count_nonzero(bins < self._bin[layer])))

    def _step(self, layer: int, count: int, count_below: int) -> float:
        """Move a layer's pointer, as so many scores more have been counted, some of them below."""
        count_of, start, place = self._flat.item, layer * (_BINS + 1), self._bin[layer]
        self._total[layer] += count
        below = self._below[layer] + count_below
        rank = self._share * self._total[layer]
        while place < _BINS - 1 and (upto := below + count_of(start + place)) < rank:
            below, place = upto, place + 1
        while place > 0 and below >= rank:
            place -= 1
            below -= count_of(start + place)
        self._bin[layer], self._below[layer] = place, below
        return place / _BINS

    def add_rows(self, layers: Sequence[int], scores: FloatArray) -> FloatArray:
        """Take in [events, experts], one row after the other; return what `add` says of each."""
        bins = (scores * _BINS).astype(np.int64)
        first, num_events = layers[0], len(layers)
        if num_events == layers.count(first):
            return self._add_to_one(first, bins)
        if len(set(layers)) < num_events:
            own = zip(layers, scores, strict=True)
            return np.array([self.add(layer, row) for layer, row in own], dtype=np.float32)
        starts = np.multiply(layers, _BINS + 1)
        np.add.at(self._flat, (bins + starts[:, None]).ravel(), 1)
        places = np.array([self._bin[layer] for layer in layers])
        below: list[int] = (bins < places[:, None]).sum(axis=1).tolist()
        size = bins.shape[1]
        steps = [self._step(layer, size, own) for layer, own in zip(layers, below, strict=True)]
        return np.array(steps, dtype=np.float32)

    def _add_to_one(self, layer: int, bins: IntArray) -> FloatArray:
        """Take in the bins of many events [events, experts] of one layer, in their order.

        In the bins around the pointer it counts, for all events at once, what lies below; where
        the quantile leaves them, around twice as many.
        """
        num_events, size = bins.shape
        rank = self._share * (self._total[layer] + size * np.arange(1, num_events + 1))
        reach, pointer = 16, self._bin[layer]
        while True:
            low, high = max(pointer - reach, 0), min(pointer + reach, _BINS)
            upto = self._counted(layer, bins, low, high)
            if (high == _BINS or (upto[:, -1] >= rank).all()) and (
                low == 0 or (upto[:, 0] < rank).all()
            ):
                break
            reach *= 2
        steps = (upto[:, 1:-1] < rank[:, None]).sum(axis=1)
        place = int(steps[-1])
        self._total[layer] += bins.size
        self._bin[layer], self._below[layer] = low + place, int(upto[-1, place])
        self._counts[layer] += np.bincount(bins.ravel(), minlength=_BINS + 1)
        return np.asarray((low + steps) / _BINS, dtype=np.float32)

    def _counted(self, layer: int, bins: IntArray, low: int, high: int) -> IntArray:
        """Return how many scores lie below bins `low` to `high` after each event: [events, bins].

        Both ends are included.
        """
        num_events, width = len(bins), high - low + 1
        own = np.clip(bins - (low - 1), 0, width)
        own += np.arange(num_events)[:, None] * (width + 1)
        fresh = np.bincount(own.ravel(), minlength=num_events * (width + 1))
        fresh = fresh.reshape(num_events, width + 1)[:, :width]
        before = np.append(0, self._counts[layer].cumsum())[low : high + 1]
        return np.asarray(before + fresh.cumsum(axis=1).cumsum(axis=0), dtype=np.int64)

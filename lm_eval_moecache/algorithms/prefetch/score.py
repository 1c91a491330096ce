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
        self._history = [_History(percentile / 100) for _ in range(geometry.num_layers)]

    def propose(self, event: Event) -> Sequence[int]:
        keys: list[int] = []
        for layer, logits in event.predicted.items():
            scores = softmax(logits)
            if self.scope == "token":
                bar: FloatArray | float = np.percentile(
                    scores, self.percentile, axis=-1, keepdims=True
                )
            else:
                bar = self._history[layer].add(scores)
            keys += by_mass(layer, scores > bar, scores)
        return keys

    def propose_rows(self, layer: int, logits: FloatArray) -> list[list[int]]:
        scores = softmax(logits)
        if self.scope == "token":
            bars = np.percentile(scores, self.percentile, axis=-1)
        else:
            bars = self._history[layer].add_rows(scores)
        return rows_by_mass(layer, scores > bars[:, None], scores)


class _History:
    """The scores seen for one layer, counted in bins, and a pointer to the bin of the quantile.

    A new event moves the quantile a little, so stepping the pointer costs less than summing bins.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        # The last bin counts the scores of exactly 1, which belong to the one before.
        self._counts = np.zeros(_BINS + 1, dtype=np.int64)
        self._count_of = self._counts.item
        self._total = 0
        self._bin = 0
        self._below = 0
        """How many scores lie in bins before `_bin`."""

    def add(self, scores: FloatArray) -> float:
        """Take in an event's scores; return the first bin up to which the share of all lies."""
        bins = (scores.ravel() * _BINS).astype(np.int64)
        np.add.at(self._counts, bins, 1)
        count_of, place = self._count_of, self._bin
        self._total += bins.size
        below = self._below + int(np.count_nonzero(bins < place))
        rank = self._share * self._total
        while place < _BINS - 1 and (upto := below + count_of(place)) < rank:
            below, place = upto, place + 1
        while place > 0 and below >= rank:
            place -= 1
            below -= count_of(place)
        self._bin, self._below = place, below
        return place / _BINS

    def add_rows(self, scores: FloatArray) -> FloatArray:
        """Take in [events, experts], one row after the other; return what `add` says of each.

        In the bins around the pointer it counts, for all events at once, what lies below; where
        the quantile leaves them, around twice as many.
        """
        bins = (scores * _BINS).astype(np.int64)
        rank = self._share * (self._total + bins.shape[1] * np.arange(1, len(bins) + 1))
        reach = 16
        while True:
            low, high = max(self._bin - reach, 0), min(self._bin + reach, _BINS)
            upto = self._counted(bins, low, high)
            if (high == _BINS or (upto[:, -1] >= rank).all()) and (
                low == 0 or (upto[:, 0] < rank).all()
            ):
                break
            reach *= 2
        steps = (upto[:, 1:-1] < rank[:, None]).sum(axis=1)
        place = int(steps[-1])
        self._total += bins.size
        self._bin, self._below = low + place, int(upto[-1, place])
        np.add.at(self._counts, bins.ravel(), 1)
        return np.asarray((low + steps) / _BINS, dtype=np.float32)

    def _counted(self, bins: IntArray, low: int, high: int) -> IntArray:
        """Return how many scores lie below bins `low` to `high` after each event: [events, bins].

        Both ends are included.
        """
        num_events, width = len(bins), high - low + 1
        own = np.maximum(bins - low + 1, 0)
        flat = (np.arange(num_events)[:, None] * width + own)[own < width]
        fresh = np.bincount(flat, minlength=num_events * width).reshape(num_events, width)
        before = np.append(0, self._counts.cumsum())[low : high + 1]
        return np.asarray(before + fresh.cumsum(axis=1).cumsum(axis=0), dtype=np.int64)

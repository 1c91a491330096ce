"""Score-based prefetch: every expert above a percentile of the predicted gate scores."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any, ClassVar, Literal

import numpy as np

from lm_eval_moecache.algorithms.prefetch.base import PrefetchAlgorithm, by_mass
from lm_eval_moecache.records.arrays import FloatArray, IntArray, softmax
from lm_eval_moecache.records.event import Event
from lm_eval_moecache.records.jit import Upgrade, compiled, table_at
from lm_eval_moecache.records.ranges import Range

_BINS = 4096
_LAST = np.iinfo(np.int64).max
"""Sorts after all ranks."""

Percentile = Annotated[float, Range(" (80 for the 80th, not 0.8)", least=1, most=100)]


@dataclass(eq=False, kw_only=True)
class Score(PrefetchAlgorithm):
    """Proposes the next layer's experts whose gate score exceeds a percentile of the scores.

    SpecMD section 3.1.4 after Zhu et al. 2025: "all experts above a configurable percentile
    threshold (the default is 80th percentile)" of the softmax scores. The paper does not say which
    scores; that the rule adapts the number of experts to the distribution excludes a single token's
    scores (80% of 64 would always leave 13).
    `scope=history`: the percentile of all scores predicted so far for that layer;
    `scope=token`: of the one token's scores, a fixed share. Cost: one gate, charged to the clock.

    The history is a histogram with bins of 1/4096, and the percentile is rounded down to a bin.
    That is fine for usual scores, but coarse where most are tiny: with a router so certain, or so
    many experts, that the percentile lies below 1/4096, the threshold is 0 and every expert is
    proposed. `scope=token` has no such limit.
    """

    name: ClassVar[str] = "score"
    source: ClassVar[str] = "SpecMD section 3.1.4; Zhu et al. 2025"
    depth = 1

    percentile: Percentile = 80.0
    scope: Literal["history", "token"] = "history"

    def __post_init__(self) -> None:
        self._history = _History(self.percentile / 100, self.geometry.num_layers)

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
        scores, history = softmax(logits), self._history
        if self.scope == "history" and UPGRADE.is_due(len(scores)):
            return _taken([history], layers, scores)
        rows = [scores[i : i + 1] for i in range(len(scores))]
        bars: Iterable[Any] = map(history.add, layers, rows)
        if self.scope == "token":
            bars = np.percentile(scores, self.percentile, axis=-1, keepdims=True)
        own = zip(layers, rows, bars, strict=True)
        told = [by_mass(layer, row > bar, row) for layer, row, bar in own]
        return np.array([*chain(*told)], np.int64), np.array([*map(len, told)])

    def propose_rows(
        self, rules: Sequence[Score], layers: Sequence[int], logits: FloatArray
    ) -> tuple[IntArray, IntArray]:
        if self.scope == "token" or not UPGRADE.is_due():
            return super().propose_rows(rules, layers, logits)
        scores = softmax(logits.reshape(-1, logits.shape[-1]))
        return _taken([rule._history for rule in rules], [*layers] * len(rules), scores)


class _History:
    """A histogram of each layer's scores so far, with a pointer to the bin of their quantile.

    A new event moves the quantile only a little, so stepping the pointer is cheaper than summing
    bins.
    """

    def __init__(self, share: float, num_layers: int) -> None:
        self.share = share
        # The last bin counts scores of exactly 1, which belong to the bin before it.
        self.counts = np.zeros((num_layers, _BINS + 1), dtype=np.int64)
        self.places = np.zeros((num_layers, 3), dtype=np.int64)
        """How many scores there are, the pointer, and how many lie in bins before it."""

    def add(self, layer: int, scores: FloatArray) -> float:
        """Add an event's scores; return the lower edge of the quantile's bin."""
        counts, place = self.counts[layer], self.places[layer]
        bins = (scores.ravel() * _BINS).astype(np.int64)
        np.add.at(counts, bins, 1)
        if place[0]:
            place[2] += np.count_nonzero(bins < place[1])
        else:
            # The first event moves it far.
            sums = counts[: _BINS - 1].cumsum()
            place[1] = sums.searchsorted(self.share * bins.size)
            place[2] = sums[place[1] - 1] if place[1] else 0
        place[0] += bins.size
        return step(counts, place, self.share) / _BINS


def step(counts: Any, place: Any, share: float) -> int:
    """Move a layer's pointer to the bin of its scores' quantile `share`, and return it."""
    at, below, rank = int(place[1]), int(place[2]), share * place[0]
    while at < _BINS - 1 and below + counts[at] < rank:
        below += counts[at]
        at += 1
    while at > 0 and below >= rank:
        at -= 1
        below -= counts[at]
    place[1], place[2] = at, below
    return at


def take_rows(
    layers: Any,
    scores: Any,
    bits: Any,
    share: float,
    like: Any,
    places: Any,
    ranks: Any,
    found: Any,
) -> None:
    """Add one-token events in turn; write the ranks of the keys above each threshold.

    `places` [runs, 2] has where the `counts` and `places` of each run's history are, which are like
    the two in `like`, and the runs have equally many of the events. A key's rank is lower the
    higher its score, whose `bits` order positive floats as their values do; ties go to the smaller
    key. So `_History.add` and `by_mass` do for each event.
    """
    num_experts, per_run = scores.shape[1], len(layers) // len(places)
    for row in range(len(layers)):
        layer, taken, run = layers[row], 0, row // per_run
        counts = table_at(like[0], places[run, 0])[layer]
        place = table_at(like[1], places[run, 1])[layer]
        for expert in range(num_experts):
            own = int(scores[row, expert] * _BINS)
            counts[own] += 1
            place[2] += own < place[1]
        place[0] += num_experts
        bar, base = step(counts, place, share) / _BINS, layer * num_experts
        for expert in range(num_experts):
            if scores[row, expert] > bar:
                ranks[row, taken] = base + expert - (int(bits[row, expert]) << 32)
                taken += 1
        found[row] = taken


def _taken(
    histories: Sequence[_History], layers: Sequence[int], scores: FloatArray
) -> tuple[IntArray, IntArray]:
    """Add each history's share of the scores [events, experts]; return the keys, and how many."""
    ranks, found = np.full(scores.shape, _LAST), np.empty(len(scores), np.int64)
    take: Any = compiled(UPGRADE.modules, UPGRADE.entry)
    places = [
        [array.__array_interface__["data"][0] for array in (own.counts, own.places)]
        for own in histories
    ]
    like, bits = (histories[0].counts, histories[0].places), scores.view(np.int32)
    share = histories[0].share
    take(np.array(layers), scores, bits, share, like, np.array(places), ranks, found)
    # numpy sorts a whole chunk several times as fast as compiled code does row by row.
    ranks = np.sort(ranks[:, : found.max(initial=0)], axis=-1)
    return ranks[ranks < _LAST] & 0xFFFFFFFF, found


UPGRADE = Upgrade((sys.modules[__name__],), "take_rows", load=2_000, make=20_000)
"""Counts events of one token."""

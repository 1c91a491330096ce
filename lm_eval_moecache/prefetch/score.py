"""Score-based prefetch: every expert above a percentile of the predicted gate scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np

from lm_eval_moecache.core.records import Event, FloatArray, Geometry, softmax
from lm_eval_moecache.prefetch.base import PrefetchAlgorithm, by_mass

_BINS = 4096
_BLOCKS = 64


class Score(PrefetchAlgorithm):
    """Proposes the next layer's experts whose gate score exceeds a percentile of the scores.

    SpecMD section 3.1.4 after Zhu et al. 2025: "all experts above a configurable percentile
    threshold (the default is 80th percentile)" of the softmax scores. The paper does not say
    over what the percentile is taken; that it adapts the number of experts to the distribution
    rules out one token's experts alone (80% of 64 would always leave 13).
    `scope=history`: the percentile of all scores predicted so far for that layer;
    `scope=token`: of the one token's scores, a fixed share. Cost: one gate, charged to the clock.
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
        layers = range(geometry.num_layers)
        # Per layer, the scores seen in each bin, and in each block of bins: the block that holds
        # the percentile is found first, which is several times faster than summing all bins.
        self._histogram = [np.zeros((_BLOCKS, _BINS // _BLOCKS), dtype=np.int64) for _ in layers]
        self._blocks = [np.zeros(_BLOCKS, dtype=np.int64) for _ in layers]

    def propose(self, event: Event) -> Sequence[int]:
        keys: list[int] = []
        for layer, logits in event.predicted.items():
            scores = softmax(logits)
            if self.scope == "token":
                bar: FloatArray | float = np.percentile(
                    scores, self.percentile, axis=-1, keepdims=True
                )
            else:
                bar = self._running_percentile(layer, scores)
            keys += by_mass(layer, scores > bar, scores)
        return keys

    def _running_percentile(self, layer: int, scores: np.ndarray) -> float:
        """Percentile over every score seen for this layer, to 1/4096 of the score range."""
        histogram, blocks = self._histogram[layer], self._blocks[layer]
        bins = np.minimum((scores.ravel() * _BINS).astype(np.int64), _BINS - 1)
        np.add.at(histogram.reshape(-1), bins, 1)
        np.add.at(blocks, bins // (_BINS // _BLOCKS), 1)
        cumulated = blocks.cumsum()
        rank = self.percentile / 100 * cumulated[-1]
        block = int(cumulated.searchsorted(rank))
        inside = histogram[block].cumsum() + (cumulated[block] - blocks[block])
        return float(block * (_BINS // _BLOCKS) + inside.searchsorted(rank)) / _BINS

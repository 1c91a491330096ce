"""Score-based prefetch: every expert above a percentile of the predicted gate scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

import numpy as np

from lm_eval_moecache.algorithms.likeliest import BINS, Likeliest
from lm_eval_moecache.algorithms.prefetch.base import ScorePrefetch
from lm_eval_moecache.records.arrays import FloatArray, IntArray, softmax
from lm_eval_moecache.records.memory import address_of
from lm_eval_moecache.records.ranges import Range

Percentile = Annotated[float, Range(" (80 for the 80th, not 0.8)", least=1, most=100)]


@dataclass(eq=False, kw_only=True)
class Score(ScorePrefetch):
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
    remembers: ClassVar[bool] = True
    depth = 1

    percentile: Percentile = 80.0
    scope: Literal["history", "token"] = "history"

    def forget(self) -> None:
        layers = self.geometry.num_layers
        self.counts: IntArray = np.zeros((layers, BINS + 1), np.int64)
        self.places: IntArray = np.zeros((layers, 3), np.int64)
        """The history: see `Proposing.histories`."""

    @cached_property
    def loop(self) -> Likeliest:
        return Likeliest(self.geometry, share=self.percentile / 100)

    def give(self, own: Sequence[Any], scores: FloatArray) -> None:
        if self.scope == "token":
            bars = np.percentile(scores, self.percentile, axis=-1)
            self.loop.give(bars=bars.astype(np.float32))
        else:
            places = [(address_of(rule.counts), address_of(rule.places)) for rule in own]
            self.loop.give(histories=np.array(places))

    def scores(self, logits: FloatArray, is_alone: bool) -> FloatArray:
        return softmax(logits)

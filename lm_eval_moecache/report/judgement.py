"""Decides whether one figure got worse: by a test over its samples, exactly, or by a tolerance."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lm_eval_moecache.report.results import Score
from lm_eval_moecache.report.statistics import sign_flip_test, sign_test, z_test

SAME, BETTER, WITHIN, WORSE, CHANGED = "same", "better", "within", "worse", "changed"
MISSING, NEW = "missing", "new"
REGRESSIONS = (WORSE, CHANGED, MISSING)
EXACTLY = "exactly"
Samples = Mapping[str, Any]
# Guards comparisons of floats that are equal but for the order of a sum.
_EPSILON = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class Test:
    """A test of one figure: its p-value, and what was tested.

    `least_p` is the smallest p that this many changed samples can give, `least_possible` the
    smallest if every sample had changed for the worse.
    """

    p: float
    by: str
    least_p: float = 0.0
    least_possible: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """`change` is new less baseline; `allowed` how much worse it may get without being tested.

    `corrected` is the test's p-value after the correction over the whole comparison; 1 where too
    few samples changed to tell a loss from chance.
    """

    baseline: float | None
    new: float | None
    allowed: float
    judged_by: str
    verdict: str
    p: float | None = None
    corrected: float | None = None

    @property
    def change(self) -> float | None:
        if self.baseline is None or self.new is None:
            return None
        return self.new - self.baseline


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """A figure of both sides before the verdict; without a test `allowed` alone decides.

    `higher_is_better` None: no end is the better one, and any change beyond `allowed` counts.
    """

    baseline: float
    new: float
    higher_is_better: bool | None
    allowed: float
    judged_by: str
    test: Test | None = None

    def judge(self, corrected: float | None, alpha: float) -> Judgement:
        return Judgement(
            baseline=self.baseline,
            new=self.new,
            allowed=self.allowed,
            judged_by=self.judged_by if self.test is None else self.test.by,
            verdict=self._verdict(corrected, alpha),
            p=None if self.test is None else self.test.p,
            corrected=corrected,
        )

    def _verdict(self, corrected: float | None, alpha: float) -> str:
        slack = _EPSILON * max(abs(self.baseline), abs(self.new))
        loss = self.baseline - self.new if self.higher_is_better else self.new - self.baseline
        if abs(loss) <= slack:
            return SAME
        if self.higher_is_better is None:
            return WITHIN if abs(loss) <= self.allowed + slack else CHANGED
        if loss < 0:
            return BETTER
        by_chance = corrected is not None and corrected > alpha
        return WITHIN if by_chance or loss <= self.allowed + slack else WORSE


def presence(baseline: float | None, new: float | None) -> Judgement:
    """Judge a figure that a side does not have."""
    verdict = SAME if baseline == new else MISSING if new is None else NEW
    return Judgement(baseline=baseline, new=new, allowed=0.0, judged_by="presence", verdict=verdict)


def floor_of(score: Score, floor: float) -> float:
    """Return the smallest loss that matters: of a share in points, of others relative to it."""
    share = score.higher_is_better and 0 <= score.value <= 1
    return floor if share else floor * abs(score.value)


def score_test(baseline: Score, new: Score, old_samples: Samples, samples: Samples) -> Test | None:
    """Test whether a score fell, on the same documents where both sides have them.

    Else by the standard errors; None where lm-eval gives none.
    """
    if old_samples and len(old_samples) > 1 and old_samples.keys() == samples.keys():
        return _paired(old_samples, samples, baseline.higher_is_better)
    if baseline.stderr is None or new.stderr is None:
        return None
    loss = baseline.value - new.value if baseline.higher_is_better else new.value - baseline.value
    p = z_test(loss, math.hypot(baseline.stderr, new.stderr))
    return Test(p=p, by="standard errors")


def _paired(old: Samples, new: Samples, higher_is_better: bool) -> Test:
    """McNemar's exact test on right and wrong, sign flips on anything else.

    Pairs (log-likelihood, words) are judged by the log-likelihood, of which more is better.
    """
    losses = []
    for doc, before in old.items():
        after = new[doc]
        if isinstance(before, list):
            losses.append(before[0] - after[0])
        else:
            losses.append(before - after if higher_is_better else after - before)
    if all(loss in (-1, 0, 1) for loss in losses):
        return mcnemar(losses.count(-1), losses.count(1), len(losses))
    return Test(
        p=sign_flip_test(losses),
        by=f"sign flips of {len(losses)} documents",
        least_p=0.5 ** sum(loss != 0 for loss in losses),
        least_possible=0.5 ** len(losses),
    )


def mcnemar(won: int, lost: int, documents: int) -> Test:
    return Test(
        p=sign_test(won, lost),
        by=f"McNemar: {lost} lost, {won} won of {documents} documents",
        least_p=0.5 ** (won + lost),
        least_possible=0.5**documents,
    )


def changes(old: Samples, new: Samples) -> tuple[int, int, int, int] | None:
    """Return (right before, right after, won, lost) of right-or-wrong answers; None for others."""
    if not old or old.keys() != new.keys():
        return None
    if any(value not in (0, 1) for side in (old, new) for value in side.values()):
        return None
    won = sum(new[doc] > old[doc] for doc in old)
    lost = sum(new[doc] < old[doc] for doc in old)
    return int(sum(old.values())), int(sum(new.values())), won, lost
